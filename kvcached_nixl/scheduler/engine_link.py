# SPDX-License-Identifier: Apache-2.0
"""What the parts of this folder share of their engine: its blocks, the step that is being built for its workers, and
how to wake it. One per engine, used on its thread only, except `EngineLink.woken`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from kvcached_nixl.ids import DecodeRequestId
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.scheduler.engine import BlockPool
from kvcached_nixl.scheduler.giving_way import GivingWay
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.scheduler.start_gate import StartGate
from kvcached_nixl.scheduler.timelines import Timelines
from kvcached_nixl.wire.causes import HandOverFailed
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import (
    FAILING,
    Reports,
    Step,
    WakeAddress,
    failure_of,
    finished_attempts_of,
    idle_holds_of,
    take_claimed,
    take_known,
    take_spared,
)
from kvcached_nixl.wire.timeline import attempt_of

__all__ = ["EngineLink", "WorkerReports"]

NO_REASON = "the worker did not say why"


class WorkerReports:
    """Takes what an engine's workers report to those whom it concerns. One per engine, on its thread.

    Reports come in vLLM's own sets, in which this package's strings and numbers stand for attempts, holds, offers and
    claims (`wire.step`). They are taken out, and the requests that they mean are put in.
    """

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
        if self._kept.spared(take_spared(reports.invalid)):
            # Others may give way instead.
            self._giving_way.look_soon()
        self._gate.claimed(take_claimed(reports.invalid))
        # Before it is looked what is late.
        self._attempts.known(take_known(reports.invalid))
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


class EngineLink:
    """See the module.

    Args:
        own: what a peer needs to find this engine's ranks.
        incarnation: 16 hexadecimal digits, drawn when this engine starts.

    Attributes:
        blocks: None before its first request.
        step: being built. It is told to the workers with the next step of the engine.
        has_news: the engine has to step soon, whatever ``step`` holds.
        incarnation: as above; drawn again when its weights change.
        wake_address: where the side channel listens for this engine's own workers, and the key that they send.
    """

    def __init__(self, own: RemotePrefill, incarnation: str, wake_address: WakeAddress) -> None:
        self._own = own
        self.incarnation = incarnation
        self.wake_address = wake_address
        self.blocks: BlockPool | None = None
        self.has_news = False
        self.step = self._new_step()
        self._wake: Callable[[], None] | None = None

    def bind(self, blocks: BlockPool) -> None:
        """Sets the engine's KV-cache blocks; called before the first request. Idempotent: the first call counts."""
        if self.blocks is None:
            self.blocks = blocks

    def bound(self) -> BlockPool:
        """The engine's blocks, where there has been a request."""
        assert self.blocks is not None, "no request has entered the engine"
        return self.blocks

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """Sets the function that wakes the engine; it may be called from any thread."""
        self._wake = wake

    def woken(self) -> None:
        """A worker has something to report: makes the engine step. May be called from any thread."""
        self.has_news = True
        if self._wake is not None:
            self._wake()

    def draw_incarnation(self) -> str:
        """Returns another incarnation, which counts from the step being built on."""
        self.incarnation = self.step.incarnation = secrets.token_hex(8)
        return self.incarnation

    def take_step(self) -> Step:
        """Returns the step, and begins the next one."""
        self.has_news = False
        step, self.step = self.step, self._new_step()
        return step

    def _new_step(self) -> Step:
        return Step(self._own.host, self._own.port, self.wake_address, self.incarnation)
