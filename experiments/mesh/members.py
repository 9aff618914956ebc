# SPDX-License-Identifier: Apache-2.0
"""Hand-overs of the mesh, from the router's point of view; and engines: a few blocks of real memory, and a loop that
writes a pattern instead of computing KV."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from experiments.common.engines import Ended, Engine, Request
from kvcached_nixl.scheduler.engine import Progress
from kvcached_nixl.wire.planes import Planes

if TYPE_CHECKING:
    from experiments.mesh.mesh import Mesh


class End(enum.Enum):
    """What the client got.

    FAILED: the request got no KV, although both engines stayed alive and neither they nor their connection had a fault.
    """

    RIGHT = "right bytes"
    WRONG = "wrong bytes"
    DISTURBED = "none: an engine ended, stood still or lost a connection"
    ABORTED = "none: the client had gone"
    FAILED = "none, though nothing was done to it"


@dataclass(eq=False)
class Case:
    """One hand-over.

    Attributes:
        number: determines its prompt.
        is_decode_first: both sides get their requests together, decode a little earlier.
        aborts_at: round in which its client disconnects; None if it does not.
        troubles: number of faults of its two engines when it began.
        is_cut: the connection of the two engines was lost, and neither has noticed yet.
        waiting: number of its requests that have not ended.
    """

    number: int
    num_tokens: int
    prefill: Member
    decode: Member
    is_decode_first: bool
    aborts_at: int | None
    troubles: tuple[int, int]
    is_cut: bool = False
    prefill_task: Task | None = None
    decode_task: Task | None = None
    waiting: int = 0
    is_aborted: bool = False
    has_kv: bool = False
    is_wrong: bool = False

    @property
    def name(self) -> str:
        return f"hand-over-{self.number}"

    @property
    def is_moved(self) -> bool:
        """Whether decode has KV that it did not have before."""
        return self.has_kv and self.decode_task is not None and self.decode_task.num_cached < self.num_tokens

    @property
    def end(self) -> End:
        if self.is_wrong:
            return End.WRONG
        if self.has_kv:
            return End.RIGHT
        sides = (self.prefill, self.decode)
        lived = all(side.is_alive for side in sides)
        if self.is_cut or not lived or tuple(side.troubles for side in sides) != self.troubles:
            return End.DISTURBED
        return End.ABORTED if self.is_aborted else End.FAILED


# -------------------------------------------------------------------------------------------------------------- engines


BLOCK_SIZE = 16
NUM_BLOCKS = 256
CHUNK_TOKENS = 64
CELL_BYTES = 8


class State(enum.Enum):
    QUEUED = "queued"
    COMPUTING = "computing"
    FETCHING = "waits for KV"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(eq=False)
class Task:
    """A request inside an engine.

    Attributes:
        num_cached: tokens of a decode request that are in decode's prefix cache.
        rounds: number of rounds that it still decodes.
    """

    request: Request
    case: Case
    num_cached: int = 0
    rounds: int = 0
    computed: int = 0
    state: State = State.QUEUED
    blocks: list[int] = field(default_factory=list)


class Memory:
    """K and V of every block. The prompt's seed and the token's position determine the content of a cell."""

    def __init__(self) -> None:
        self._cells: npt.NDArray[np.uint64] = np.zeros((2, NUM_BLOCKS, BLOCK_SIZE), dtype=np.uint64)

    @property
    def planes(self) -> Planes:
        bases = tuple(int(plane.ctypes.data) for plane in self._cells)
        strides = (BLOCK_SIZE * CELL_BYTES, CELL_BYTES, CELL_BYTES)
        return Planes(bases, *strides, CELL_BYTES, NUM_BLOCKS, BLOCK_SIZE, num_heads=1)

    def fill(self, seed: int, blocks: list[int], begin: int, end: int) -> None:
        """Write the cells of tokens ``begin`` to ``end``; both must be at a block boundary."""
        used = blocks[begin // BLOCK_SIZE : end // BLOCK_SIZE]
        cells = _cells(seed, begin, end).reshape(len(used), BLOCK_SIZE)
        self._cells[0, used], self._cells[1, used] = cells, ~cells

    def holds(self, seed: int, blocks: list[int]) -> bool:
        """Whether the blocks contain the cells of the whole prompt."""
        cells = _cells(seed, 0, len(blocks) * BLOCK_SIZE).reshape(len(blocks), BLOCK_SIZE)
        return bool((self._cells[0, blocks] == cells).all() and (self._cells[1, blocks] == ~cells).all())


class Member:
    """One engine, until its process ends.

    Attributes:
        seconds: CPU time of this process for hand-overs, both for the engine's and for the transfer thread.
        troubles: number of its faults that may make its hand-overs fail.
    """

    def __init__(self, engine: Engine, memory: Memory, agent: str, mesh: Mesh) -> None:
        self.engine = engine
        self.memory = memory
        self.agent = agent
        self.tasks: dict[str, Task] = {}
        self.seconds = 0.0
        self.troubles = 0
        self.is_alive = True
        self._mesh = mesh

    @property
    def is_settled(self) -> bool:
        """Whether no state of any request is left."""
        handover = self.engine.handover
        return not (self.tasks or self.engine.pool.tables or handover.pending or handover.num_kept)

    def add(self, task: Task) -> None:
        """Accept a client's request."""
        self.tasks[task.request.request_id] = task
        begun = time.thread_time()
        self.engine.handover.arrived(task.request)
        self.seconds += time.thread_time() - begun

    def abort(self, task: Task) -> None:
        """Called when the client of a request has disconnected."""
        if task.state is State.ENDED or not self.is_alive:
            return
        state, task.state = task.state, State.ENDED
        is_kept, _ = self.engine.handover.finished(task.request, False, (task.blocks,))
        # A request that was fetching keeps its blocks until it is reported as received.
        if state is not State.FETCHING and not is_kept:
            self._forget(task)
        if task.case.prefill_task is task:
            self._mesh.answered(task, None)
        else:
            self._mesh.ended(task, False)

    def turn(self) -> None:
        """Run one turn of its transfer thread."""
        begun = time.thread_time()
        self.engine.side.thread.turn()
        self.seconds += time.thread_time() - begun

    def step(self) -> None:
        """Run one step of its loop, if it has work."""
        begun = time.thread_time()
        handover = self.engine.handover
        if not (self.tasks or handover.pending or handover.num_waiting or handover.num_kept):
            return
        tasks = list(self.tasks.values())
        for task in tasks:
            if task.state is State.QUEUED:
                self._admit(task)
        computing = [task for task in tasks if task.state is State.COMPUTING]
        ended = self.engine.step([self._progress(task) for task in computing], lambda: self._compute(computing))
        self._take(ended)
        for task in computing:
            if task.computed >= task.request.num_prompt_tokens:
                self._finish_prefill(task)
        self.seconds += time.thread_time() - begun
        for task in tasks:
            if task.state is State.DECODING:
                self._decode(task)

    def _admit(self, task: Task) -> None:
        request, handover = task.request, self.engine.handover
        num_blocks = request.num_prompt_tokens // BLOCK_SIZE
        if task.case.prefill_task is task:
            blocks = self.engine.pool.allocate(request.request_id, num_blocks)
            if blocks is not None:
                task.blocks, task.state = blocks, State.COMPUTING
            return
        missing, _ = handover.matched(request, task.num_cached)
        blocks = self.engine.pool.allocate(request.request_id, num_blocks)
        if blocks is None:
            return
        task.blocks = blocks
        self.memory.fill(task.case.number, blocks, 0, task.num_cached)
        handover.allocated(request, (list(blocks),), missing)
        task.state = State.FETCHING if missing else State.DECODING

    def _progress(self, task: Task) -> Progress:
        is_first = not task.computed
        task.computed = min(task.computed + CHUNK_TOKENS, task.request.num_prompt_tokens)
        return Progress(task.request.request_id, (list(task.blocks),) if is_first else (), is_first, task.computed)

    def _compute(self, tasks: list[Task]) -> None:
        for task in tasks:
            begin = (task.computed - 1) // CHUNK_TOKENS * CHUNK_TOKENS
            self.memory.fill(task.case.number, task.blocks, begin, task.computed)

    def _take(self, ended: Ended) -> None:
        for request_id in ended.received:
            task = self.tasks[request_id]
            if request_id in ended.failed:
                task.state = State.ENDED
                self.engine.handover.finished(task.request, False, (task.blocks,))
                self._forget(task)
                self._mesh.ended(task, False)
            elif task.state is State.ENDED:
                self._forget(task)
            else:
                self._check(task)
                task.state = State.DECODING
        for request_id in ended.sent:
            self._forget(self.tasks[request_id])

    def _finish_prefill(self, task: Task) -> None:
        task.state = State.ENDED
        is_kept, params = self.engine.handover.finished(task.request, True, (list(task.blocks),))
        if not is_kept:
            self._forget(task)
        self._mesh.answered(task, params)

    def _decode(self, task: Task) -> None:
        task.rounds -= 1
        if task.rounds >= 0:
            return
        if task.request.num_prompt_tokens > task.num_cached:
            # Compared again: a late write of another hand-over must not have changed the blocks meanwhile.
            self._check(task)
        task.state = State.ENDED
        self.engine.handover.finished(task.request, True, (task.blocks,))
        self._forget(task)
        self._mesh.ended(task, True)

    def _check(self, task: Task) -> None:
        task.case.is_wrong |= not self.memory.holds(task.case.number, task.blocks)

    def _forget(self, task: Task) -> None:
        self.engine.pool.free(task.request.request_id)
        del self.tasks[task.request.request_id]


def _cells(seed: int, begin: int, end: int) -> npt.NDArray[np.uint64]:
    return np.arange(begin, end, dtype=np.uint64) + np.uint64(seed << 20)
