# SPDX-License-Identifier: Apache-2.0
"""Plain NIXL: an agent, and a transfer whose state is polled without a pause until it has ended."""

from __future__ import annotations

import importlib
import time
import uuid
from collections import deque
from typing import Any

import numpy as np

from experiments.common.server_side.few_cores import BINDINGS, wait_for_events
from kvcached_nixl.transport.agent import Operation, Ranges, descriptors, peer_name
from kvcached_nixl.worker.transfer.transfer_queue import Budget


def agent(memory_address: int, memory_bytes: int) -> Any:
    """Return a NIXL agent that has registered this memory."""
    from nixl._api import nixl_agent, nixl_agent_config

    made = nixl_agent(str(uuid.uuid4()), nixl_agent_config(backends=["UCX"]))
    found = made.get_reg_descs([(memory_address, memory_bytes, 0, "")], "DRAM")
    made.register_memory(found, backends=["UCX"])
    return made


def share_cores() -> None:
    """Make agents created later wait for events: on few cores their polling threads would take each other's time."""
    for name in BINDINGS:
        try:
            bindings = importlib.import_module(name)
        except ImportError:
            continue
        wait_for_events(bindings)


def cut(lengths: Any, budget: Budget) -> list[slice]:
    """Return the rows of each transfer, cut as `TransferQueue` cuts them."""
    until = np.concatenate(([0], np.cumsum(lengths)))
    found, row = [], 0
    while row < len(lengths):
        end = int(np.searchsorted(until, until[row] + budget.batch_bytes, side="right")) - 1
        end = min(max(end, row + 1), row + budget.descriptors, len(lengths))
        found.append(slice(row, end))
        row = end
    return found


class Plain:
    """Plain NIXL on one side. ``meet`` takes the other side's metadata."""

    def __init__(self, memory_address: int, memory_bytes: int) -> None:
        self._agent = agent(memory_address, memory_bytes)
        self._peer = ""

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def meet(self, far: bytes) -> None:
        self._peer = peer_name(self._agent.add_remote_agent(far))

    def leave(self) -> None:
        """Remove the other side."""
        self._agent.remove_remote_agent(self._peer)

    def move(self, operation: Operation, local: Ranges, remote: Ranges, budget: Budget | None) -> float:
        """Return the seconds from making descriptors to the end; cut by ``budget``, or all in one transfer if None."""
        rows = deque([slice(0, len(local))] if budget is None else cut(local[:, 1], budget))
        in_flight: deque[Any] = deque()
        done: deque[Any] = deque()
        begun = time.perf_counter()
        while rows or in_flight:
            if rows and (budget is None or len(in_flight) < budget.peer_transfers):
                some = rows.popleft()
                in_flight.append(self.post(operation, local[some], remote[some]))
            handle = in_flight.popleft()
            (in_flight if self._is_in_flight(handle) else done).append(handle)
        seconds = time.perf_counter() - begun
        for handle in done:
            self._agent.release_xfer_handle(handle)
        return seconds

    def finish(self, handle: Any) -> None:
        """Wait for a transfer, and release its handle."""
        while self._is_in_flight(handle):
            continue
        self._agent.release_xfer_handle(handle)

    def post(self, operation: Operation, local: Ranges, remote: Ranges) -> Any:
        """Post one transfer; returns its handle."""
        sides = (descriptors(self._agent, one, "DRAM") for one in (local, remote))
        handle = self._agent.initialize_xfer(operation, *sides, self._peer, b"")
        self._agent.transfer(handle)
        return handle

    def _is_in_flight(self, handle: Any) -> bool:
        state = self._agent.check_xfer_state(handle)
        if state not in ("PROC", "DONE"):
            raise RuntimeError(f"found a transfer {state}; expected it to be done")
        return bool(state == "PROC")
