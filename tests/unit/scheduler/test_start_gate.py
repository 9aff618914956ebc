# SPDX-License-Identifier: Apache-2.0
"""scheduler/start_gate.py, and the facade's use of it: which prompts of a push begin before decode has registered."""

from __future__ import annotations

from typing import Any

import pytest
from support.engine_fakes import (
    MOST_UNCLAIMED_TOKENS,
    OWN,
    OWN_START,
    TOKENS,
    WAKE,
    Asked,
    Pool,
    Reads,
    of_prefill,
    terms,
)
from support.engine_fakes import reports as reported
from support.internals import leftovers

from kvcached_nixl.deadlines import ManualClock
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.scheduler.engine import Progress
from kvcached_nixl.scheduler.facade import SchedulerFacade
from kvcached_nixl.scheduler.kept_offers import UNCLAIMED_SECONDS
from kvcached_nixl.scheduler.start_gate import StartGate
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.step import AwaitClaim, Mark, Step, mark

LONGEST_SECONDS = 30.0
START, WAIT = (0, False), (None, False)


class Prefill:
    """An engine that pushes, with ``kept`` prompts that decode leaves waiting."""

    def __init__(
        self,
        kept: int = MOST_UNCLAIMED_TOKENS // TOKENS,
        mode: TransferMode = TransferMode.PUSH,
        seconds: float = 2 * UNCLAIMED_SECONDS,
    ) -> None:
        self.clock = ManualClock()
        self.side = SchedulerFacade(
            *(OWN, OWN_START, WAKE, terms(mode=mode, allocation_seconds=LONGEST_SECONDS), self.clock, Reads())
        )
        self.side.bind(Pool())
        self.blocks: dict[str, Any] = {}
        for number in range(kept):
            request, blocks = of_prefill(f"kept{number}"), ([3 * number + 1, 3 * number + 2, 3 * number + 3],)
            self.side.arrived(request)
            self.side.take_step([Progress(request.request_id, blocks, True, TOKENS)])
            assert self.side.finished(request, True, blocks)[0]
        self.side.take_step([])
        self.clock.advance(seconds)

    def new(self, name: str = "new") -> Asked:
        request = of_prefill(name)
        self.side.arrived(request)
        return request

    def step(self, *begun: str) -> Step:
        return self.side.take_step([Progress(one, ([90, 91, 92],), True, TOKENS) for one in begun])

    def hear(self, *numbers: int, sent: tuple[str, ...] = ()) -> None:
        self.side.collect(reported(set(sent), set(), {mark(Mark.CLAIMED, one) for one in numbers}))


def test_a_prompt_begins_at_once_while_decode_takes_what_it_gets() -> None:
    prefill = Prefill(kept=MOST_UNCLAIMED_TOKENS // TOKENS - 1)
    assert prefill.side.matched(prefill.new(), 0) == START
    assert not prefill.step("new").of(AwaitClaim)


def test_what_is_being_written_does_not_count() -> None:
    """KV that was computed a moment ago may be in flight."""
    prefill = Prefill(seconds=UNCLAIMED_SECONDS / 2)
    assert prefill.side.matched(prefill.new(), 0) == START


def test_workers_are_asked_again_from_time_to_time_and_the_engine_is_not_kept_awake() -> None:
    """Decode may want it and lack blocks, or may have gone: workers hear which."""
    prefill = Prefill()
    request = prefill.new()
    assert prefill.side.matched(request, 0) == WAIT
    asked = prefill.step().of(AwaitClaim)
    for _ in range(3):
        assert prefill.side.due_in_seconds == LONGEST_SECONDS and not prefill.side.pending
        prefill.clock.advance(LONGEST_SECONDS)
        assert prefill.side.pending
        # It is behind others in vLLM's queue, so that vLLM does not ask.
        assert prefill.step().of(AwaitClaim) == asked
        assert prefill.side.matched(request, 0) == WAIT
    prefill.hear(asked[0].number)
    assert prefill.side.due_in_seconds is None and not prefill.side.pending
    assert prefill.side.matched(request, 0) == START
    prefill.step("new")


@pytest.mark.parametrize("ends", ["begins", "aborted", "claimed", "asked again"])
def test_nothing_is_left_of_a_prompt_that_has_waited(ends: str) -> None:
    clock, step, one = ManualClock(), Step("h", 1, WAKE, "s"), PrefillRequestId("one")
    gate = StartGate(clock, LONGEST_SECONDS)
    assert not gate.may_start(one, step, needs_claim=True)
    if ends == "aborted":
        gate.gone([one])
    if ends == "claimed":
        gate.claimed([one.number for one in step.of(AwaitClaim)])
    if ends == "asked again":
        clock.advance(LONGEST_SECONDS)
        gate.turn([], step)
    if ends != "aborted":
        assert gate.may_start(one, step, needs_claim=ends == "claimed")
        gate.turn([one], step)
    gate.claimed([one.number for one in step.of(AwaitClaim)])
    assert not leftovers(gate) and gate.due_at_seconds is None
