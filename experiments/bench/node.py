# SPDX-License-Identifier: Apache-2.0
"""An engine in its own process: its half of a hand-over over a real NIXL agent, and a second agent for plain NIXL.

The parent calls `Node`'s methods by name, over a pipe.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import mmap
import os
import statistics
import threading
import time
import uuid
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from experiments.bench.timing import Computing, longest_hold
from experiments.common.engines import Channel, Engine, Pool, Request, asks_prefill, host_words
from experiments.common.server_side.few_cores import BINDINGS, wait_for_events
from kvcached_nixl.deadlines import Clock
from kvcached_nixl.scheduler.engine import Progress
from kvcached_nixl.settings import Settings
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.transport.agent import Operation, Ranges, Transport, descriptors, peer_name, register_host_memory
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.planes import GroupMemory, Planes
from kvcached_nixl.worker.geometry.descriptors import KernelBlocks
from kvcached_nixl.worker.transfer import topology
from kvcached_nixl.worker.transfer.transfer_queue import Budget

BLOCK_SIZE = 16
CELL_BYTES = 256
"""K or V of one token in one layer on one rank: one head of 128 numbers of 16 bits."""
PLANES = 2 * 32
"""K and V of 32 layers."""
PAGE_BYTES = BLOCK_SIZE * CELL_BYTES
BLOCK_BYTES = PLANES * PAGE_BYTES
SPARE_BLOCKS = 1.25
"""Blocks in a pool, as a multiple of those that one hand-over needs."""
CONTIGUOUS, APART = "contiguous", "non-contiguous"
LAYOUTS = (CONTIGUOUS, APART)
END_SECONDS = 120.0
HOLDS = 20
CHECKED_BLOCKS = 64


def planes(address: int, num_blocks: int, layout: str) -> Planes:
    """Return kvcached's layout of blocks: all layers of a block adjacent, or K and V of each layer apart."""
    distance, stride = (PAGE_BYTES, BLOCK_BYTES) if layout == CONTIGUOUS else (num_blocks * PAGE_BYTES, PAGE_BYTES)
    bases = tuple(address + place * distance for place in range(PLANES))
    return Planes(bases, stride, CELL_BYTES, CELL_BYTES, CELL_BYTES, num_blocks, BLOCK_SIZE, num_heads=1)


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

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def meet(self, far: bytes) -> None:
        self._peer = peer_name(self._agent.add_remote_agent(far))

    def finish(self, handle: Any) -> None:
        """Poll a transfer without a pause until it has ended, and release its handle."""
        while (state := self._agent.check_xfer_state(handle)) == "PROC":
            continue
        if state != "DONE":
            raise RuntimeError(f"found a transfer {state}; expected it to be done")
        self._agent.release_xfer_handle(handle)

    def post(self, operation: Operation, local: Ranges, remote: Ranges) -> Any:
        """Post one transfer; returns its handle."""
        sides = (descriptors(self._agent, one, "DRAM") for one in (local, remote))
        handle = self._agent.initialize_xfer(operation, *sides, self._peer, b"")
        self._agent.transfer(handle)
        return handle


class _Channel(Channel):
    def __init__(self, woken: threading.Event) -> None:
        super().__init__()
        self.woken_at = 0.0
        self._woken = woken

    def wake(self, host: str, port: int, key: str) -> None:
        self.woken_at = time.perf_counter()
        self._woken.set()


class Node:
    """See the module. Does one hand-over at a time."""

    def __init__(self, name: str, direction: str, layout: str, tokens: int, seed: int) -> None:
        num_blocks = int(tokens // BLOCK_SIZE * SPARE_BLOCKS) + 1
        self._memory = mmap.mmap(-1, num_blocks * BLOCK_BYTES)
        self._words_of_memory = np.frombuffer(self._memory, dtype=np.uint64)
        # Touches every page. Each cell of prefill holds its own position, which `check` compares.
        self._words_of_memory[:] = np.arange(len(self._words_of_memory), dtype=np.uint64) if name == "prefill" else 1
        address = int(self._words_of_memory.ctypes.data)
        self._planes = planes(address, num_blocks, layout)
        order = 1 + np.random.default_rng(seed).permutation(num_blocks - 1)
        self._agent = agent(address, len(self._memory))
        self._plain = Plain(address, len(self._memory))
        words = host_words()
        self._registered = register_host_memory(self._agent, words, ["UCX"])
        self._woken = threading.Event()
        self._channel = _Channel(self._woken)
        self._engine = Engine(
            RemotePrefill(name, "127.0.0.1", 5600, 1),
            Settings(TransferMode(direction)),
            Clock(),
            Transport(self._agent, "DRAM"),
            self._channel,
            self._planes,
            Pool(order.tolist()),
            words,
        )
        self._engine.side.thread.start()
        self._engine.step()
        self._computing = Computing()
        self._tokens = tokens
        self._requests: dict[str, Request] = {}

    def close(self) -> None:
        """Stop the transfer thread."""
        self._engine.side.close()

    def introduce(self) -> dict[str, Any]:
        """Return what the other node needs for `meet`."""
        return {"answers": self._engine.answers, "plain": self._plain.metadata(), "planes": self._planes}

    def meet(self, far: dict[str, Any]) -> None:
        self._channel.answers = far["answers"]
        self._plain.meet(far["plain"])
        self._far_planes: Planes = far["planes"]

    def compute(self, is_on: bool) -> tuple[float, ...]:
        """Start a thread that uses the interpreter as an engine's thread does; or stop it and return its times.

        Call it between steps: a step resets the transfer thread's ``engine_computes``.
        """
        if is_on:
            self._computing.start()
        self._engine.side.thread.engine_computes = is_on
        return () if is_on else self._computing.stop()

    def offer(self, name: str) -> dict[str, Any]:
        """Prefill: compute a request and keep its blocks. Returns the parameters for decode."""
        request = self._requests[name] = Request(name, self._prompt(name), asks_prefill())
        blocks = self._allocate(name)
        self._engine.handover.arrived(request)
        self._engine.step([Progress(name, (blocks,), True, self._tokens)])
        is_kept, params = self._engine.handover.finished(request, True, (blocks,))
        assert is_kept and params is not None
        self._engine.step()
        return params

    def fetch(self, name: str, params: dict[str, Any], is_computing: bool) -> tuple[float, float]:
        """Decode: get the KV of a request. Returns when the worker got the request, and when the engine was woken."""
        request = Request(name, self._prompt(params["remote_request_id"]), params)
        blocks = self._allocate(name)
        handover = self._engine.handover
        handover.arrived(request)
        missing, _ = handover.matched(request, 0)
        handover.allocated(request, (blocks,), missing)
        self._woken.clear()
        self._channel.woken_at = 0.0
        begun = time.perf_counter()
        ended = self._engine.step()
        self._engine.side.thread.engine_computes = is_computing
        until = time.monotonic() + END_SECONDS
        while not ended.received:
            if not self._woken.wait(until - time.monotonic()):
                raise RuntimeError(f"{name} has not ended within {END_SECONDS:g} s")
            self._woken.clear()
            ended = self._engine.step()
            self._engine.side.thread.engine_computes = is_computing
        reported = self._channel.woken_at
        if ended.failed:
            raise RuntimeError(f"{name} has no KV")
        self.check(blocks, params["kvcached_nixl"]["groups"][0]["block_ids"])
        handover.finished(request, True, (blocks,))
        self._engine.step()
        self._engine.pool.free(name)
        return begun, reported

    def end(self, name: str) -> None:
        """Prefill: wait until a request's blocks are no longer needed, and free them."""
        until = time.monotonic() + END_SECONDS
        while name not in self._engine.step().sent:
            if not self._woken.wait(min(0.05, until - time.monotonic())) and time.monotonic() > until:
                raise RuntimeError(f"{name} is still kept after {END_SECONDS:g} s")
            self._woken.clear()
        del self._requests[name]
        self._engine.pool.free(name)

    def draw(self, name: str) -> list[int]:
        """Return blocks as a request would get them, for plain NIXL."""
        blocks = self._allocate(name)
        self._engine.pool.free(name)
        # Rotate the free list, so that the next call returns other blocks.
        free = self._engine.pool.free_blocks
        free[:] = free[len(blocks) // 3 :] + free[: len(blocks) // 3]
        return blocks

    def move(self, operation: Operation, local: list[int], remote: list[int]) -> float:
        """Transfer with plain NIXL. Returns the seconds from making descriptors to the end."""
        here, there = self._ranges(local, remote)
        begun = time.perf_counter()
        self._plain.finish(self._plain.post(operation, here, there))
        return time.perf_counter() - begun

    def hold(self, operation: Operation, local: list[int], remote: list[int]) -> float:
        """Return how long posting one of this package's batches blocks the interpreter for all other threads.

        The median of several posts.
        """
        here, there = self._ranges(local, remote)
        held: list[float] = []
        handles: list[Any] = []
        for rows in itertools.islice(itertools.cycle(cut(here[:, 1], Budget())), HOLDS):

            def post(rows: slice = rows) -> None:
                handles.append(self._plain.post(operation, here[rows], there[rows]))

            held.append(longest_hold(post))
            self._plain.finish(handles.pop())
        return statistics.median(held)

    def _ranges(self, local: list[int], remote: list[int]) -> tuple[Ranges, Ranges]:
        own = self._engine.side.thread._context.local
        routes = topology.routes(own.groups, (GroupMemory((self._far_planes,)),), is_prefill=False)
        found = topology.ranges(routes, [(KernelBlocks(local), KernelBlocks(remote), 0)], self._tokens)
        return found.local, found.remote

    def _prompt(self, name: str) -> list[int]:
        return [hash_of(name), *range(1, self._tokens)]

    def _allocate(self, name: str) -> list[int]:
        found = self._engine.pool.allocate(name, self._tokens // BLOCK_SIZE)
        assert found is not None, "two hand-overs at a time"
        return list(found)

    def check(self, local: list[int], remote: list[int]) -> None:
        """Decode: raise unless a few cells of a few blocks are prefill's, which hold their position in its memory."""
        for place in range(0, len(local), max(1, len(local) // CHECKED_BLOCKS)):
            for plane in (0, PLANES - 1):
                here = self._offset(self._planes, plane, local[place])
                there = self._offset(self._far_planes, plane, remote[place])
                if self._words_of_memory[here] != there:
                    raise RuntimeError(f"plane {plane} of block {local[place]} does not hold prefill's {remote[place]}")

    @staticmethod
    def _offset(planes: Planes, plane: int, block: int) -> int:
        """Return the offset of a block's first cell from the beginning of memory, in 64-bit words."""
        return (planes.bases[plane] - planes.bases[0] + block * planes.block_stride_bytes) // 8


def hash_of(name: str) -> int:
    """Return a token id derived from a name, so that prompts differ."""
    return sum(name.encode()) % 50_000


def serve(connection: Connection, environment: Mapping[str, str], *arguments: Any) -> None:
    """Run a node until the pipe is closed."""
    # Before NIXL is imported: UCX reads the environment then.
    os.environ.update(environment)
    logging.disable(logging.INFO)
    share_cores()
    node: Node | None = None
    try:
        while True:
            try:
                method, values = connection.recv()
            except EOFError:
                break
            try:
                if node is None:
                    node = Node(*arguments)
                connection.send((True, getattr(node, method)(*values)))
            except Exception as cause:  # noqa: BLE001 - the parent raises it
                connection.send((False, f"{type(cause).__name__}: {cause}"))
    finally:
        # NIXL's threads may block an ordinary exit for ever.
        os._exit(0)
