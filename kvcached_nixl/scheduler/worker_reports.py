# SPDX-License-Identifier: Apache-2.0
"""Takes what an engine's workers report to those whom it concerns. One per engine, on its thread.

Reports come in vLLM's own sets, in which this package's strings and numbers stand for attempts, holds, offers and
claims (`wire.step`). They are taken out, and the requests that they mean are put in.
"""

from __future__ import annotations

from kvcached_nixl.ids import DecodeRequestId
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.scheduler.engine import BlockPool
from kvcached_nixl.scheduler.giving_way import GivingWay
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.scheduler.start_gate import StartGate
from kvcached_nixl.scheduler.timelines import Timelines
from kvcached_nixl.wire.causes import HandOverFailed
from kvcached_nixl.wire.step import (
    FAILING,
    Mark,
    Reports,
    Step,
    failure_of,
    finished_attempts_of,
    idle_holds_of,
    take_marked,
)
from kvcached_nixl.wire.timeline import attempt_of

__all__ = ["WorkerReports"]

NO_REASON = "the worker did not say why"


class WorkerReports:
    """See the module."""

    def __init__(
        self,
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

    def take(self, reports: Reports, blocks: BlockPool, step: Step) -> set[DecodeRequestId]:
        """Takes what all ranks have reported: replaces this package's ids and marks by the requests that they mean.

        Returns: requests whose KV has failed to arrive.
        """
        self._take_timelines(reports)
        if self._kept.spared(take_marked(Mark.SPARED, reports.invalid)):
            # Others may give way instead.
            self._giving_way.look_soon()
        self._gate.claimed(take_marked(Mark.CLAIMED, reports.invalid))
        # Before it is looked what is late.
        self._attempts.known(take_marked(Mark.KNOWN, reports.invalid))
        failed = self._take_of_decode(reports, blocks, step)
        self._take_of_prefill(reports, blocks)
        return failed

    def _take_of_decode(self, reports: Reports, blocks: BlockPool, step: Step) -> set[DecodeRequestId]:
        marked = [found for mark in reports.invalid if (found := failure_of(mark)) is not None]
        failures = [(number, HandOverFailed(cause, reports.reasons.get(number, NO_REASON))) for number, cause in marked]
        reports.invalid = {block_id for block_id in reports.invalid if failure_of(block_id) is None}
        finished = finished_attempts_of(reports.received)
        # Other connectors have released the blocks of these requests.
        self._attempts.let_go(map(DecodeRequestId, reports.sent), blocks)
        received, failed = self._fetching.collect(failures, finished, blocks, step)
        # A load that another connector reports as ended must not free blocks that decode may be reading.
        reports.received = {one for one in reports.received if not self._kept.keeps(one)} | received
        if failed:
            reports.invalid.add(FAILING)
        return failed

    def _take_of_prefill(self, reports: Reports, blocks: BlockPool) -> None:
        self._offering.drained(idle_holds_of(reports.sent), blocks)
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
