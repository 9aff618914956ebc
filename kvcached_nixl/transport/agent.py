# SPDX-License-Identifier: Apache-2.0
"""Makes NIXL agents, and registers memory with them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from kvcached_nixl.transport.base import TransportError, WriteGate


def make_agent(backends: Sequence[str]) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(uuid.uuid4().hex, nixl_agent_config(backends=list(backends)))


def register_host_memory(agent: Any, memory: npt.NDArray[Any], backends: Sequence[str]) -> Any:
    """Registers an array in host memory, so that peers can read it. Returns what NIXL needs to deregister it."""
    found = agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    agent.register_memory(found, backends=list(backends))
    return found


PROGRESS_MICROSECONDS = 10_000
"""How long the progress thread of a gate's agent waits for socket events before it polls by itself."""


def _make_resting_agent(name: str, backends: Sequence[str]) -> Any:
    """An agent whose progress thread sleeps until something arrives.

    NIXL's Python API gives its C++ agent a delay of 0, with which each gate's progress thread would keep a core busy.
    """
    from nixl import _bindings
    from nixl._api import nixl_agent, nixl_agent_config

    made = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
    config = _bindings.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, PROGRESS_MICROSECONDS
    made.agent = _bindings.nixlAgent(name, config)
    for backend in backends:
        made.create_backend(backend, {})
    return made


def open_gate(
    backends: Sequence[str], extents: Sequence[tuple[int, int]], memory_type: str, device_id: int = 0
) -> WriteGate:
    """Opens a gate to the memory in ``extents``, (address, bytes) each.

    Raises:
        TransportError: NIXL could not make the agent, or not register the memory with it.
    """
    try:
        agent = _make_resting_agent(uuid.uuid4().hex, backends)
        rows = [(address, length, device_id, "") for address, length in extents]
        agent.register_memory(agent.get_reg_descs(rows, memory_type), backends=list(backends))
    except Exception as error:
        raise TransportError(f"NIXL could not make an agent for peers to write through: {error}") from error
    return WriteGate(agent)
