# SPDX-License-Identifier: Apache-2.0
"""Takes what an engine's workers report to those whom it concerns. One per engine, on its thread.

What frees blocks counts when every rank has reported it, everything else as soon as one has. For vLLM, the requests
that are meant are put into its own sets.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcached_nixl.ids import DecodeRequestId
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.scheduler.engine import BlockPool
from kvcached_nixl.scheduler.giving_way import GivingWay
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.scheduler.start_gate import StartGate
from kvcached_nixl.scheduler.timelines import Timelines
from kvcached_nixl.wire.causes import HandOverFailed
from kvcached_nixl.wire.step import FAILING, Reports, Step
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
        self,
        num_ranks: int,
        fetching: DecodeFetches,
        offering: PrefillOffers,
        gate: StartGate,
        giving_way: GivingWay,
        timelines: Timelines,
    ) -> None:
        self._fetching = fetching
        self._attempts = fetching.attempts
        self._offering = offering
        self._kept = offering.kept
        self._gate = gate
        self._giving_way = giving_way
        self._timelines = timelines
        self._ended, self._idle = _AllRanks(num_ranks), _AllRanks(num_ranks)

    def take(self, reports: Reports, blocks: BlockPool, step: Step) -> set[DecodeRequestId]:
        """Takes what has been reported after a step, and adds to it the requests that are meant.

        Returns: requests whose KV has failed to arrive.
        """
        self._take_timelines(reports)
        report = reports.report
        if self._kept.spared(report.spared):
            # Others may give way instead.
            self._giving_way.look_soon()
        self._gate.claimed(report.claimed)
        # Before it is looked what is late.
        self._attempts.known(report.known)
        failed = self._take_of_decode(reports, blocks, step)
        self._take_of_prefill(reports, blocks)
        return failed

    def _take_of_decode(self, reports: Reports, blocks: BlockPool, step: Step) -> set[DecodeRequestId]:
        failures = [(number, HandOverFailed(*why)) for number, why in reports.report.failed.items()]
        finished = self._ended.take(reports.report.ended)
        # Other connectors have released the blocks of these requests.
        self._attempts.let_go(map(DecodeRequestId, reports.sent), blocks)
        received, failed = self._fetching.collect(failures, finished, blocks, step)
        # A load that another connector reports as ended must not free blocks that decode may be reading.
        reports.received = {one for one in reports.received if not self._kept.keeps(one)} | received
        if failed:
            reports.invalid.add(FAILING)
        return failed

    def _take_of_prefill(self, reports: Reports, blocks: BlockPool) -> None:
        self._offering.drained(self._idle.take(reports.report.idle), blocks)
        num_fetched, num_owed = self._kept.ended(reports.sent, blocks)
        self._giving_way.owe(num_owed)
        if num_fetched:
            self._giving_way.fetched()
        reports.sent |= self._kept.let_go(blocks)

    def _take_timelines(self, reports: Reports) -> None:
        found, others = [], []
        for one in reports.timelines:
            attempt = self._attempts.find_waiting(number) if (number := attempt_of(one)) else None
            if number and attempt is None:
                others.append(one)
            else:
                found.append(("" if attempt is None else attempt.request_id, one))
        if found:
            self._timelines.take(found)
            # They came with statistics, which take these along.
            reports.lasted += self._timelines.take_lasted()
        reports.timelines = others
