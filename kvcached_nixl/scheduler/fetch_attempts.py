# SPDX-License-Identifier: Apache-2.0
"""Decode: attempts to fetch KV, and the blocks that they fill. One per engine, on the engine's thread.

    WAITING ─── every rank has reported ─────────────────────────────────────────► forgotten: the KV has arrived
       │
       └─ failed, timed out, revoked, aborted ─► OVER, its blocks held ── every rank has reported ─► blocks are free

A request ends at once when its attempt does. Its blocks do not: they are taken from it, and free when no rank has a
transfer into them in flight (rules R2 and R9).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvcached_nixl.deadlines import Clock, Deadlines
from kvcached_nixl.ids import DecodeRequestId
from kvcached_nixl.scheduler.engine import BlockPool
from kvcached_nixl.scheduler.holds import Holds
from kvcached_nixl.wire.messages import draw_attempt

__all__ = ["FetchAttempt", "FetchAttempts"]


@dataclass
class FetchAttempt:
    """A request that was given blocks.

    Attributes:
        adapter: number of its LoRA adapter.
        begun_seconds: when it was given them.
        since_seconds: when its timeout began.
        is_waiting: its request waits for the KV.
        is_held: the blocks were taken from the request, because they may still be written.
    """

    number: int
    request_id: DecodeRequestId
    adapter: int
    begun_seconds: float
    since_seconds: float
    is_waiting: bool = True
    is_held: bool = False


class FetchAttempts:
    """See the module.

    Attributes:
        num_quarantined_blocks: blocks held for requests that ended without KV.
    """

    def __init__(self, holds: Holds, clock: Clock, timeout_seconds: float) -> None:
        self._holds = holds
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._attempts: dict[int, FetchAttempt] = {}
        self._waiting: dict[DecodeRequestId, FetchAttempt] = {}
        self._deadlines = Deadlines[int]()
        self._kept_by_others: dict[DecodeRequestId, set[int]] = {}
        self.num_quarantined_blocks = 0

    def __len__(self) -> int:
        """Attempts of which not every rank has reported the end."""
        return len(self._attempts)

    @property
    def due_at_seconds(self) -> float | None:
        """When the next attempt times out; None if none waits."""
        return self._deadlines.first_seconds

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def waiting(self) -> Iterator[FetchAttempt]:
        """Iterates over a copy: the caller may end them."""
        return iter(list(self._waiting.values()))

    def of_request(self, request_id: DecodeRequestId) -> FetchAttempt | None:
        """Returns the attempt that a request waits for."""
        return self._waiting.get(request_id)

    def find_waiting(self, number: int) -> FetchAttempt | None:
        attempt = self._attempts.get(number)
        return attempt if attempt is not None and attempt.is_waiting else None

    def start(self, request_id: DecodeRequestId, adapter: int) -> int:
        """Returns the number of a new attempt. Its timeout begins."""
        now = self._clock.now_seconds()
        attempt = FetchAttempt(draw_attempt(), request_id, adapter, now, now)
        self._attempts[attempt.number] = self._waiting[request_id] = attempt
        self._deadlines[attempt.number] = now + self._timeout_seconds
        return attempt.number

    def known(self, numbers: Iterable[int]) -> None:
        """Prefill has not computed what these wait for yet, and will: their timeouts begin again."""
        now = self._clock.now_seconds()
        for attempt in filter(None, map(self.find_waiting, numbers)):
            attempt.since_seconds = now
            self._deadlines[attempt.number] = now + self._timeout_seconds

    def longest_seconds(self) -> float:
        """Returns for how long the first timeout has run; 0 if none does. May be called from any thread."""
        since = [one.since_seconds for one in list(self._waiting.values())]
        return max(0.0, self._clock.now_seconds() - min(since)) if since else 0.0

    def take_due(self) -> list[FetchAttempt]:
        """Returns the waiting attempts whose time is over. Their deadlines are forgotten."""
        return [self._attempts[number] for number in self._deadlines.take_due(self._clock.now_seconds())]

    def stop_waiting(self, attempt: FetchAttempt) -> None:
        """Its request goes on without the attempt, or has ended."""
        attempt.is_waiting = False
        self._deadlines.pop(attempt.number, None)
        del self._waiting[attempt.request_id]

    def hold(self, attempt: FetchAttempt, blocks: BlockPool) -> None:
        """Takes the blocks from the request, until every rank has reported that nothing is in flight into them."""
        before = self._holds.num_blocks
        self._holds.take(blocks, attempt.request_id, attempt.number)
        attempt.is_held = True
        self.num_quarantined_blocks += self._holds.num_blocks - before

    def all_ranks_ended(self, number: int, blocks: BlockPool) -> FetchAttempt | None:
        """No rank has a transfer of the attempt in flight. Frees its blocks, if they are held.

        Returns: the attempt, if its request still waits: all its KV has arrived.
        """
        attempt = self._attempts.pop(number, None)
        if attempt is None:
            return None
        if attempt.is_waiting:
            self.stop_waiting(attempt)
            return attempt
        if attempt.is_held and number not in self._kept_by_others.get(attempt.request_id, ()):
            self._give_back(number, blocks)
        return None

    def kept(self, request_id: DecodeRequestId) -> None:
        """Another connector keeps the blocks of a request that has just ended: they are free when both release them."""
        held = {one.number for one in self._attempts.values() if one.is_held and one.request_id == request_id}
        if held:
            self._kept_by_others[request_id] = held

    def let_go(self, request_ids: Iterable[DecodeRequestId], blocks: BlockPool) -> None:
        """Other connectors have released the blocks of these requests."""
        for request_id in request_ids:
            for number in self._kept_by_others.pop(request_id, ()):
                if number not in self._attempts:
                    self._give_back(number, blocks)

    def _give_back(self, number: int, blocks: BlockPool) -> None:
        before = self._holds.num_blocks
        self._holds.give_back(blocks, number)
        self.num_quarantined_blocks -= before - self._holds.num_blocks
