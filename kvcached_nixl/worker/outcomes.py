# SPDX-License-Identifier: Apache-2.0
"""What has ended, from the transfer thread to the engine's thread. Once per worker."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed, RevocationCause
from kvcached_nixl.wire.step import FetchSpec, Report, Step
from kvcached_nixl.wire.timeline import Lasted, Reported
from kvcached_nixl.worker.transfer.slab import SlabUse
from kvcached_nixl.worker.transfer.transfer_queue import TransferTally

logger = logging.getLogger(SERVER_LOGGER)

MOST_REASON = 1000
"""Characters."""


@dataclass
class WorkerCounters:
    """Counts for the metrics since they were last taken.

    Attributes:
        moved: (bytes, descriptors, seconds) of each hand-over whose bytes this rank has moved.
        expired: prefill's requests whose lease expired.
        failures: hand-overs that brought no KV, by `FailureCause`; counted by the scheduler, reported by rank 0.
        quarantined_blocks: blocks held because a transfer may still touch them; None if the number has not changed.
        revoked: offers that were taken back, by `RevocationCause`; reported by rank 0.
        route: transfer mode and memory path of this rank.
        moved_bytes: of KV, also for hand-overs that fail; None if none were moved.
        slab: this rank, and the use of its slab; None if that has not changed.
        slab_waits: how often a hand-over has begun to wait for slots.
        timelines: of hand-overs that have ended on this rank, for the scheduler.
        lasted: times in states of hand-overs; from the scheduler, reported by rank 0.
    """

    moved: list[tuple[int, int, float]] = field(default_factory=list)
    failures: Counter[int] = field(default_factory=Counter)
    expired: int = 0
    quarantined_blocks: int | None = None
    revoked: Counter[int] = field(default_factory=Counter)
    route: tuple[str, str] = ("pull", "direct")
    moved_bytes: int | None = None
    slab: tuple[int, SlabUse] | None = None
    slab_waits: int = 0
    timelines: list[Reported] = field(default_factory=list)
    lasted: list[Lasted] = field(default_factory=list)


TELL_AGAIN_SECONDS = 1.0
"""How often a wake-up is repeated: one to a sleeping engine may get lost, and its blocks would then not be freed before
the next request."""


class OutcomeQueue:
    """See the module. ``rank``: of this worker among all of its engine; ``route``: transfer mode and memory path.

    Threads: the engine's thread calls `take`, `take_counted` and `computed`, the transfer thread everything else.
    """

    def __init__(self, clock: Clock, rank: int = 0, route: tuple[str, str] = ("pull", "direct")) -> None:
        self._clock = clock
        self._rank = rank
        self._lock = threading.Lock()
        self._sent, self._report = set[str](), Report()
        # Shown from the start, so that the first bytes are a rise.
        self._counted = WorkerCounters(route=route, moved_bytes=0)
        self._tell_at_seconds: float | None = None
        self._slab: SlabUse | None = None
        self._num_waits = 0

    def failed(self, spec: FetchSpec, failure: HandOverFailed) -> None:
        # The scheduler logs what the first rank says. What distrusts an engine from then on is said by each.
        is_grave = failure.cause in (FailureCause.CHECKSUM, FailureCause.DEFECT)
        tags = HandOverFailed(failure.cause, "").tags(spec.request_id, attempt=spec.attempt)
        logger.log(logging.WARNING if is_grave else logging.DEBUG, "%s: %s", tags, failure)
        with self._news() as report:
            report.failed.setdefault(spec.attempt, (failure.cause, str(failure)[:MOST_REASON]))

    def finished(self, attempt: int) -> None:
        with self._news() as report:
            report.ended.add((attempt, self._rank))

    def done(self, request_id: PrefillRequestId) -> None:
        with self._news():
            self._sent.add(request_id)

    def hold_idle(self, hold: int) -> None:
        with self._news() as report:
            report.idle.add((hold, self._rank))

    def fetched(self) -> None:
        """A rank of decode has fetched an offer; wakes no engine: the offer's end does."""
        with self._lock:
            self._report.has_fetched = True

    def expired(self, request_id: PrefillRequestId) -> None:
        tags = HandOverFailed(FailureCause.LEASE, "").tags(prefill_request_id=request_id)
        logger.warning("KV was not fetched: %s: its lease expired", tags)
        with self._lock:
            self._counted.expired += 1

    def moved(self, tally: TransferTally) -> None:
        """A hand-over has succeeded whose bytes this rank has moved."""
        with self._lock:
            self._counted.moved.append((tally.num_bytes, tally.descriptors, tally.seconds))

    def timed(self, timeline: Reported) -> None:
        """A hand-over has ended on this rank: its timeline, before its end is reported.

        An offer that is traced wakes the engine: where KV is staged, its blocks were given back long before.
        """
        with self._lock:
            self._counted.timelines.append(timeline)
            if timeline[1]:
                self._has_news()

    def revoked(self, cause: RevocationCause) -> None:
        if not self._rank:
            with self._lock:
                self._counted.revoked[cause] += 1

    def spared(self, number: int) -> None:
        with self._news() as report:
            report.spared.add(number)

    def claimed(self, number: int) -> None:
        with self._news() as report:
            report.claimed.add(number)

    def known(self, attempt: int) -> None:
        with self._news() as report:
            report.known.add(attempt)

    def stuck(self, request_id: PrefillRequestId) -> None:
        """Called again until it has ended; wakes no engine."""
        with self._lock:
            self._report.stuck.add(request_id)

    def moved_bytes(self, num_bytes: int) -> None:
        """A transfer of KV has succeeded."""
        with self._lock:
            self._counted.moved_bytes = (self._counted.moved_bytes or 0) + num_bytes

    def slab(self, use: SlabUse, num_waits: int) -> None:
        """The slab's use now, and how often a hand-over has waited for slots since the start."""
        if use == self._slab and num_waits == self._num_waits:
            return
        with self._lock:
            self._counted.slab = self._rank, use
            self._counted.slab_waits += num_waits - self._num_waits
            if use.is_idle and self._slab is not None:
                # An engine that is idle, too, would go on showing slots that are free.
                self._has_news()
        self._slab, self._num_waits = use, num_waits

    def computed(self, step: Step) -> None:
        """The first rank reports what the scheduler has counted."""
        if self._rank:
            return
        with self._lock:
            self._counted.failures.update(step.counts)
            self._counted.lasted += step.lasted
            if step.quarantined_blocks is not None:
                self._counted.quarantined_blocks = step.quarantined_blocks

    def take_counted(self) -> WorkerCounters:
        with self._lock:
            counted, self._counted = self._counted, WorkerCounters(route=self._counted.route)
            return counted

    def take_news(self) -> bool:
        """Returns whether to wake the engine now: for the first end since `take`, then every TELL_AGAIN_SECONDS until
        `take` is called."""
        with self._lock:
            now = self._clock.now_seconds()
            if self._tell_at_seconds is None or now < self._tell_at_seconds:
                return False
            self._tell_at_seconds = now + TELL_AGAIN_SECONDS
            return True

    def take(self) -> tuple[set[str], Report]:
        """Returns what has ended since the last call: prefill's requests whose blocks are not needed any more, and the
        rest. Each attempt, request and hold is named once."""
        with self._lock:
            found, self._sent, self._report = (self._sent, self._report), set(), Report()
            self._tell_at_seconds = None
            return found

    @contextlib.contextmanager
    def _news(self) -> Iterator[Report]:
        """What is added wakes the engine."""
        with self._lock:
            yield self._report
            self._has_news()

    def _has_news(self) -> None:
        if self._tell_at_seconds is None:
            self._tell_at_seconds = self._clock.now_seconds()
