# SPDX-License-Identifier: Apache-2.0
"""Takes what an engine's workers report to those whom it concerns. One per engine, on its thread.

What frees blocks counts when every rank has reported it, everything else as soon as one has. For vLLM, the requests
that are meant are put into its own sets.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcached_nixl.ids import DecodeRequestId
from kvcached_nixl.scheduler.context import EngineContext
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.scheduler.giving_way import GivingWay
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.wire.causes import HandOverFailed
from kvcached_nixl.wire.step import FAILING, Reports
from kvcached_nixl.wire.timeline import attempt_of

__all__ = ["WorkerReports"]


class _AllRanks:
    """Numbers that not every rank has reported yet."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks: dict[int, set[int]] = {}

    def take(self, reported: Iterable[tuple[int, int]]) -> list[int]:
        """Takes (number, rank) pairs, and returns the numbers that every rank has reported now."""
        found = []
        for number, rank in reported:
            ranks = self._ranks.setdefault(number, set())
            ranks.add(rank)
            if len(ranks) == self._num_ranks:
                del self._ranks[number]
                found.append(number)
        return found


class WorkerReports:
    """See the module."""

    def __init__(
        self, engine: EngineContext, fetching: DecodeFetches, offering: PrefillOffers, giving_way: GivingWay
    ) -> None:
        self._engine = engine
        self._fetching = fetching
        self._offering = offering
        self._giving_way = giving_way
        self._ended, self._idle = _AllRanks(engine.own.tp_size), _AllRanks(engine.own.tp_size)

    def take(self, reports: Reports) -> set[DecodeRequestId]:
        """Takes what has been reported after a step, and adds to it the requests that are meant.

        Returns: requests whose KV has failed to arrive.
        """
        self._take_timelines(reports)
        report = reports.report
        if self._offering.kept.spared(report.spared):
            # Others may give way instead.
            self._giving_way.look_soon()
        self._offering.gate.claimed(report.claimed)
        # Before it is looked what is late.
        self._fetching.attempts.known(report.known)
        failures = [(number, HandOverFailed(*why)) for number, why in report.failed.items()]
        finished = self._ended.take(report.ended)
        # Other connectors have released the blocks of these requests.
        self._fetching.attempts.let_go(reports.sent)
        received, failed = self._fetching.collect(failures, finished)
        # A load that another connector reports as ended must not free blocks that decode may be reading.
        reports.received = {one for one in reports.received if not self._offering.kept.keeps(one)} | received
        if failed:
            reports.invalid.add(FAILING)
        self._offering.drained(self._idle.take(report.idle))
        self._giving_way.ended(*self._offering.kept.ended(reports.sent))
        reports.sent |= self._offering.kept.let_go()
        return failed

    def _take_timelines(self, reports: Reports) -> None:
        found, others = [], []
        for one in reports.timelines:
            attempt = attempt_of(one)
            fetch = self._fetching.attempts.find_waiting(attempt) if attempt else None
            if attempt and fetch is None:
                others.append(one)
            else:
                found.append(("" if fetch is None else fetch.request_id, one))
        if found:
            self._engine.timelines.take(found)
            # They came with statistics, which take these along.
            reports.lasted += self._engine.timelines.take_lasted()
        reports.timelines = others
