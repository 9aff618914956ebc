# SPDX-License-Identifier: Apache-2.0
"""What has ended, from the transfer thread to the engine's thread. Once per worker."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed, RevocationCause
from kvcached_nixl.wire.step import FetchSpec
from kvcached_nixl.wire.timeline import Reported
from kvcached_nixl.worker.staging.slab import SlabUse
from kvcached_nixl.worker.transfer.transfer_queue import TransferTally

__all__ = ["Failed", "Outcome", "OutcomeQueue"]


class Failed(NamedTuple):
    """An attempt that brings no KV."""

    request_id: DecodeRequestId
    cause: FailureCause
    reason: str


@dataclass
class Outcome:
    """What has ended since the last `take`. Each attempt, request and hold is named once.

    Attributes:
        finished: decode's attempts that have nothing in flight any more.
        failed: decode's attempts that bring no KV, and why; their transfers may still be in flight.
        done: prefill's requests whose blocks are not needed any more.
        idle_holds: holds whose blocks nothing reads any more.
        expired: prefill's requests whose lease expired; they are in ``done`` as well.
        moved: (bytes, descriptors, seconds) of each hand-over whose bytes this rank has moved.
        revoked: offers that were taken back, by `RevocationCause`.
        spared: numbers of revocations whose offers were not.
        claimed: numbers of `AwaitClaim`.
        known: decode's attempts whose request waits for its turn at prefill, or is computed there.
        moved_bytes: of KV that this rank's transfers have moved, also for hand-overs that fail.
        slab: its use now; None if it has not changed, or there is none.
        slab_waits: how often a hand-over has begun to wait for slots.
        timelines: of hand-overs that have ended on this rank.
    """

    finished: set[int] = field(default_factory=set)
    failed: dict[int, Failed] = field(default_factory=dict)
    done: set[PrefillRequestId] = field(default_factory=set)
    idle_holds: set[int] = field(default_factory=set)
    expired: set[PrefillRequestId] = field(default_factory=set)
    moved: list[tuple[int, int, float]] = field(default_factory=list)
    revoked: Counter[int] = field(default_factory=Counter)
    spared: set[int] = field(default_factory=set)
    claimed: set[int] = field(default_factory=set)
    known: set[int] = field(default_factory=set)
    moved_bytes: int = 0
    slab: SlabUse | None = None
    slab_waits: int = 0
    timelines: list[Reported] = field(default_factory=list)


TELL_AGAIN_SECONDS = 1.0
"""How often a wake-up is repeated: one to a sleeping engine may get lost, and its blocks would then not be freed before
the next request."""


class OutcomeQueue:
    """Passes what has ended from the transfer thread to the engine's thread. Once per worker.

    Threads: the engine's thread calls `take`, the transfer thread everything else.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._outcome = Outcome()
        self._tell_at_seconds: float | None = None
        self._slab: SlabUse | None = None
        self._num_waits = 0

    def failed(self, spec: FetchSpec, failure: HandOverFailed) -> None:
        with self._lock:
            self._outcome.failed[spec.attempt] = Failed(spec.request_id, failure.cause, str(failure))
            self._has_news()

    def finished(self, spec: FetchSpec) -> None:
        with self._lock:
            self._outcome.finished.add(spec.attempt)
            self._has_news()

    def done(self, request_id: PrefillRequestId) -> None:
        with self._lock:
            self._outcome.done.add(request_id)
            self._has_news()

    def hold_idle(self, hold: int) -> None:
        with self._lock:
            self._outcome.idle_holds.add(hold)
            self._has_news()

    def expired(self, request_id: PrefillRequestId) -> None:
        with self._lock:
            self._outcome.expired.add(request_id)

    def moved(self, tally: TransferTally) -> None:
        """A hand-over has succeeded whose bytes this rank has moved."""
        with self._lock:
            self._outcome.moved.append((tally.num_bytes, tally.descriptors, tally.seconds))

    def timed(self, timeline: Reported) -> None:
        """A hand-over has ended on this rank: its timeline, before its end is reported.

        An offer that is traced wakes the engine: where KV is staged, its blocks were given back long before.
        """
        with self._lock:
            self._outcome.timelines.append(timeline)
            if timeline[1]:
                self._has_news()

    def revoked(self, cause: RevocationCause) -> None:
        with self._lock:
            self._outcome.revoked[cause] += 1

    def spared(self, number: int) -> None:
        with self._lock:
            self._outcome.spared.add(number)
            self._has_news()

    def claimed(self, number: int) -> None:
        with self._lock:
            self._outcome.claimed.add(number)
            self._has_news()

    def known(self, attempt: int) -> None:
        with self._lock:
            self._outcome.known.add(attempt)
            self._has_news()

    def moved_bytes(self, num_bytes: int) -> None:
        """A transfer of KV has succeeded."""
        with self._lock:
            self._outcome.moved_bytes += num_bytes

    def slab(self, use: SlabUse, num_waits: int) -> None:
        """The slab's use now, and how often a hand-over has waited for slots since the start."""
        if use == self._slab and num_waits == self._num_waits:
            return
        with self._lock:
            self._outcome.slab = use
            self._outcome.slab_waits += num_waits - self._num_waits
            if use.is_idle and self._slab is not None:
                # An engine that is idle, too, would go on showing slots that are free.
                self._has_news()
        self._slab, self._num_waits = use, num_waits

    def take_news(self) -> bool:
        """Returns whether to wake the engine now: for the first end since `take`, then every TELL_AGAIN_SECONDS until
        `take` is called."""
        with self._lock:
            now = self._clock.now_seconds()
            if self._tell_at_seconds is None or now < self._tell_at_seconds:
                return False
            self._tell_at_seconds = now + TELL_AGAIN_SECONDS
            return True

    def take(self) -> Outcome:
        """Returns what has ended since the last call."""
        with self._lock:
            outcome, self._outcome = self._outcome, Outcome()
            self._tell_at_seconds = None
            return outcome

    def _has_news(self) -> None:
        if self._tell_at_seconds is None:
            self._tell_at_seconds = self._clock.now_seconds()
