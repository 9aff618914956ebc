# SPDX-License-Identifier: Apache-2.0
"""Cuts READs and WRITEs into batches, posts them within a budget, and polls them until NIXL says that they have ended.

Bytes in flight are limited per peer and in total, transfers in flight per peer; whenever one ends, the next is posted.
Peers take turns. A dropped job (`TransferQueue.drop`) does not use the budget any more, but its end is still awaited,
because a posted transfer cannot be cancelled. Owned by the transfer thread; once per worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.transport.agent import Handle, Operation, Ranges, TransferState, Transport, TransportError
from kvcached_nixl.worker.transfer.peers import PeerListener


@dataclass
class TransferTally:
    """Of the transfers of one hand-over that have succeeded. ``seconds``: in which at least one was in flight."""

    num_bytes: int = 0
    descriptors: int = 0
    seconds: float = 0.0
    _in_flight: int = 0
    _since_seconds: float = 0.0

    def posted(self, now_seconds: float) -> None:
        if not self._in_flight:
            self._since_seconds = now_seconds
        self._in_flight += 1

    def ended(self, now_seconds: float) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self.seconds += now_seconds - self._since_seconds


@dataclass(frozen=True)
class Budget:
    """How much may be in flight, and how large one transfer may be.

    Attributes:
        descriptors: most in one transfer. Passing them to NIXL holds Python's interpreter lock, some 0.2 ms for 1,000;
            it is free while NIXL posts them, one by one. One transfer of many is slower than several of fewer.
            From 1,024 on, NIXL would post them on threads of its own, which select no device (``split_batch_size`` of
            its UCX backend, with the ``num_threads`` that vLLM gives it).
        batch_bytes: in one transfer, approximately.
        peer_bytes, all_bytes: in flight with one peer, and with all peers.
        peer_transfers: in flight with one peer.
    """

    descriptors: int = 1000
    batch_bytes: int = 64 << 20
    peer_bytes: int = 256 << 20
    all_bytes: int = 1 << 30
    peer_transfers: int = 16


POSTING_SECONDS = 0.01
"""Longest time to post in one turn; the rest is posted in the next turn, after notifications were read."""
DROPPED_POLL_SECONDS = 0.05
MOVING_SECONDS = 0.05


@dataclass(eq=False)
class TransferJob:
    """Ranges to move for one owner, in order.

    Attributes:
        local, remote: (n, 2) addresses and lengths, which correspond row by row.
        ended: called once, when nothing of the job is in flight and nothing more will be posted, with the error text or
            "". For a dropped job, too, it is called only after its transfers in flight have ended.
        notify: returns the notification of a WRITE's batch, given (index, whether it is the last batch).
        is_host: the ranges are in registered host memory, not in KV memory.
        tally: of its hand-over.
    """

    operation: Operation
    peer: str
    local: Ranges
    remote: Ranges
    ended: Callable[[str], None]
    notify: Callable[[int, bool], bytes] | None = None
    is_host: bool = False
    tally: TransferTally = field(default_factory=TransferTally)
    row: int = 0
    index: int = 0
    in_flight: int = 0
    failed: str = ""
    dropped: bool = False
    is_idle: bool = False
    bytes_to_row: Ranges = field(init=False)

    def __post_init__(self) -> None:
        self.bytes_to_row = np.concatenate(([0], np.cumsum(self.local[:, 1])))

    @property
    def is_posted(self) -> bool:
        return self.dropped or bool(self.failed) or self.row >= len(self.local)


@dataclass(eq=False)
class _Batch:
    job: TransferJob
    handle: Handle
    num_bytes: int
    descriptors: int
    connection: object


@dataclass(eq=False)
class _Lane:
    """What is queued for one peer and in flight with it."""

    queue: deque[TransferJob] = field(default_factory=deque)
    num_bytes: int = 0
    transfers: int = 0


@dataclass(eq=False)
class TransferQueue(PeerListener):
    """See the module.

    Attributes:
        lost: called with a peer to which a transfer has failed, before the job's ``ended``. It must remove the peer:
            only that ends what is left of a failed transfer.
        moved: called with the bytes of KV of each transfer that has succeeded.
        has_more: the last turn ran out of time with budget left and more to post.
    """

    transport: Transport
    clock: Clock
    lost: Callable[[str], None]
    budget: Budget = Budget()
    moved: Callable[[int], None] = lambda _: None
    has_more: bool = False
    _lanes: dict[str, _Lane] = field(default_factory=dict)
    _active: dict[_Batch, None] = field(default_factory=dict)
    _dropped: dict[_Batch, None] = field(default_factory=dict)
    _dropped_at_seconds: float = 0.0
    _all_bytes: int = 0
    _idle: deque[TransferJob] = field(default_factory=deque)
    _turns: int = 0
    # When a transfer began or ended last.
    _moved_at_seconds: float = -MOVING_SECONDS

    def __len__(self) -> int:
        """Transfers in flight whose job was not dropped."""
        return len(self._active)

    @property
    def is_busy(self) -> bool:
        """Whether `turn` has to be called again soon."""
        return bool(self._active or self._lanes or self._idle)

    @property
    def is_moving(self) -> bool:
        """Whether more is to be posted, with or without budget left, or an ownership token is being read, the last and
        shortest transfer of a hand-over; and a transfer began or ended in the last MOVING_SECONDS. A peer that stands
        still does not count."""
        if self.clock.now_seconds() >= self._moved_at_seconds + MOVING_SECONDS:
            return False
        return any(lane.queue for lane in self._lanes.values()) or any(batch.job.is_host for batch in self._active)

    def is_used(self, agent: str) -> bool:
        return agent in self._lanes

    def submit(self, job: TransferJob, *, is_urgent: bool = False) -> None:
        """Queue a job; an urgent one goes ahead of the others for the same peer."""
        if len(job.local) == 0:
            self._settle(job)
        elif is_urgent:
            self._lanes.setdefault(job.peer, _Lane()).queue.appendleft(job)
        else:
            self._lanes.setdefault(job.peer, _Lane()).queue.append(job)

    def drop(self, job: TransferJob) -> None:
        """Post nothing more of a job; its ``ended`` is called when its transfers in flight have ended. Idempotent."""
        if job.dropped:
            return
        job.dropped = True
        if not job.in_flight:
            self._settle(job)
            return
        for batch in [batch for batch in self._active if batch.job is job]:
            self._leave(batch)
            self._dropped[batch] = None

    def turn(self) -> None:
        """Poll transfers, call ``ended`` of jobs that have ended, and post more within the budget."""
        self._look(list(self._active))
        now = self.clock.now_seconds()
        if self._dropped and now >= self._dropped_at_seconds:
            self._dropped_at_seconds = now + DROPPED_POLL_SECONDS
            self._look(list(self._dropped))
        # Before posting: when its blocks have been read, an owner may submit an urgent READ of the ownership token.
        self._tell()
        self._post(now + POSTING_SECONDS)
        self._tell()

    def _tell(self) -> None:
        while self._idle:
            job = self._idle.popleft()
            job.ended(job.failed)

    def _look(self, batches: list[_Batch]) -> None:
        for batch in batches:
            state = self.transport.state(batch.handle)
            if state is TransferState.IN_FLIGHT:
                continue
            job = batch.job
            if state is TransferState.FAILED:
                self._fail(job, f"a {job.operation} failed", batch.connection)
                if not self.transport.is_idle(batch.handle):
                    # Another transfer keeps its connection open.
                    if batch in self._active:
                        self._leave(batch)
                        self._dropped[batch] = None
                    continue
            self.transport.release(batch.handle)
            now = self._moved_at_seconds = self.clock.now_seconds()
            job.tally.ended(now)
            if state is TransferState.DONE:
                job.tally.num_bytes += batch.num_bytes
                job.tally.descriptors += batch.descriptors
                if not job.is_host:
                    self.moved(batch.num_bytes)
            if batch in self._active:
                self._leave(batch)
            else:
                del self._dropped[batch]
            job.in_flight -= 1
            if job.is_posted and not job.in_flight:
                self._settle(job)

    def _settle(self, job: TransferJob) -> None:
        if not job.is_idle:
            job.is_idle = True
            self._idle.append(job)

    def _fail(self, job: TransferJob, reason: str, connection: object) -> None:
        job.failed = job.failed or reason
        # Else it is of an earlier connection, and says nothing of the current one.
        if self.transport.connection(job.peer) is connection:
            self.lost(job.peer)

    def _leave(self, batch: _Batch) -> None:
        del self._active[batch]
        lane = self._lanes.get(batch.job.peer)
        if lane is not None:
            lane.num_bytes -= batch.num_bytes
            lane.transfers -= 1
            if not lane.transfers and not lane.queue:
                del self._lanes[batch.job.peer]
        self._all_bytes -= batch.num_bytes

    def _post(self, until_seconds: float) -> None:
        """Post one batch of each peer in turn, until the budget or the time is used up."""
        waiting = deque(peer for peer, lane in self._lanes.items() if lane.queue)
        # Begin with another peer each turn, so that none is starved when time runs out.
        self._turns += 1
        waiting.rotate(-self._turns)
        while waiting and self.clock.now_seconds() < until_seconds:
            peer = waiting.popleft()
            lane = self._lanes.get(peer)
            if lane is not None and self._post_one(peer, lane):
                waiting.append(peer)
        self.has_more = bool(waiting)

    def _post_one(self, peer: str, lane: _Lane) -> bool:
        """Post the next batch of a peer. Returns whether there may be more to post to it."""
        budget = self.budget
        while lane.queue and lane.queue[0].is_posted:
            job = lane.queue.popleft()
            if not job.in_flight:
                self._settle(job)
        if not lane.queue:
            if not lane.transfers:
                self._lanes.pop(peer, None)
            return False
        job = lane.queue[0]
        if lane.transfers >= budget.peer_transfers:
            return False
        room = min(budget.peer_bytes - lane.num_bytes, budget.all_bytes - self._all_bytes)
        if room <= 0 and lane.transfers:
            return False
        if room <= 0 and self._all_bytes >= 2 * budget.all_bytes:
            return False
        end = int(np.searchsorted(job.bytes_to_row, job.bytes_to_row[job.row] + budget.batch_bytes, side="right")) - 1
        end = min(max(end, job.row + 1), job.row + budget.descriptors, len(job.local))
        rows = slice(job.row, end)
        notification = b"" if job.notify is None else job.notify(job.index, end == len(job.local))
        num_bytes = int(job.bytes_to_row[end] - job.bytes_to_row[job.row])
        try:
            handle = self.transport.post(
                job.operation, peer, job.local[rows], job.remote[rows], notification, is_host=job.is_host
            )
        except TransportError as error:
            self._fail(job, str(error), self.transport.connection(peer))
            return True
        job.row, job.index, job.in_flight = end, job.index + 1, job.in_flight + 1
        batch = _Batch(job, handle, num_bytes, end - rows.start, self.transport.connection(peer))
        self._active[batch] = None
        self._moved_at_seconds = self.clock.now_seconds()
        job.tally.posted(self._moved_at_seconds)
        lane.num_bytes += num_bytes
        lane.transfers += 1
        self._all_bytes += num_bytes
        return True
