# SPDX-License-Identifier: Apache-2.0
"""The in-memory transport and real NIXL, for the same cases; a free port; a wait for results without an event."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvcached_nixl.transport.agent import Transport
from support.memory_transport import Network

ARRIVAL_SECONDS = 20.0


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


def until(found: Callable[[], Any]) -> Any:
    """Polls ``found`` and returns its first true result. NIXL has no event to wait for."""
    deadline = time.monotonic() + ARRIVAL_SECONDS
    while time.monotonic() < deadline:
        if answer := found():
            return answer
        time.sleep(0.001)
    raise TimeoutError(f"nothing arrived in {ARRIVAL_SECONDS} s")
