# SPDX-License-Identifier: Apache-2.0
"""The in-memory transport and real NIXL, for the same cases; and a free port."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvcached_nixl.transport.agent import Transport
from support.memory_transport import Network

MEMORY_BYTES = 1 << 20


@dataclass
class Side:
    """An agent and the memory that it registered. ``kept``: NIXL's agent first."""

    transport: Transport
    memory: np.ndarray[Any, np.dtype[np.uint8]]
    kept: list[Any] = field(default_factory=list)

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)


def nixl_side() -> Side:
    api = pytest.importorskip("nixl._api", reason="needs an environment: bash experiments/env.sh")
    agent = api.nixl_agent(str(uuid.uuid4()), api.nixl_agent_config(backends=["UCX"]))
    memory = np.zeros(MEMORY_BYTES, dtype=np.uint8)
    registered = agent.register_memory(
        agent.get_reg_descs([(memory.ctypes.data, MEMORY_BYTES, 0, "")], "DRAM"), backends=["UCX"]
    )
    return Side(Transport(agent, "DRAM"), memory, [agent, registered])


@pytest.fixture(params=["memory", "nixl"])
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    if request.param == "memory":
        network = Network(immediate=True)
        agents = [network.agent(name) for name in ("one", "other")]
        made = [Side(one, np.zeros(MEMORY_BYTES, dtype=np.uint8), [one.agent]) for one in agents]
    else:
        made = [nixl_side(), nixl_side()]
    yield made[0], made[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])
