# SPDX-License-Identifier: Apache-2.0
"""`kvcached_nixl.scheduler.timelines`: from a request's arrival to its first token, for the metrics and for traces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_nixl.deadlines import ManualClock
from kvcached_nixl.scheduler.timelines import Timelines
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.timeline import Reported, State, Timeline

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


class Kept:
    def __init__(self) -> None:
        self.added: list[tuple[str, list[tuple[str, float]], dict[str, str]]] = []

    def trace_of(self, request: Any) -> str:
        return str(request.trace_headers)

    def add(self, trace: str, timeline: Timeline, attributes: dict[str, str]) -> None:
        spans = [(one.state.label, one.end_seconds - one.begin_seconds) for one in timeline.intervals()]
        self.added.append((trace, spans, attributes))


class Followed:
    def __init__(self, *, is_traced: bool = True, is_push: bool = False) -> None:
        self.clock, self.spans = ManualClock(100.0), Kept()
        self.timelines = Timelines(self.clock, self.spans if is_traced else None, is_push=is_push)

    def begin(self, request_id: str, state: State, trace: str = TRACE) -> None:
        request: Any = SimpleNamespace(request_id=request_id, trace_headers=trace)
        self.timelines.begin(request, state)

    def rank(self, attempt: int, begin: float, end: float, trace: str = "") -> Reported:
        made = Timeline()
        made.enter(State.DECODE_ALLOCATED if attempt else State.PREFILL_OFFERED, begin)
        made.enter(State.DECODE_MOVING if attempt else State.PREFILL_SENDING, begin + 0.25)
        made.end(end)
        return made.reported(attempt, trace)

    def received(self) -> None:
        """A request of decode has been given blocks, and two ranks have the KV, the second one last."""
        self.begin("d", State.DECODE_QUEUED)
        self.clock.advance(1.0)
        self.timelines.enter("d", State.DECODE_REPORTING)
        self.clock.advance(3.0)
        self.timelines.take([("d", self.rank(7, 101.5, 103.0))])
        self.timelines.take([("d", self.rank(7, 101.25, 103.5))])
        self.timelines.take([("d", self.rank(7, 101.5, 102.0))])
        self.timelines.arrived("d")


def test_a_request_of_decode_is_followed_to_its_first_token() -> None:
    """Of its ranks the slowest counts; and what the scheduler does not know is time without a report."""
    one = Followed()
    one.received()
    one.clock.advance(0.5)
    one.timelines.computed(["other", "d"])
    assert one.timelines.awaits_tokens
    one.clock.advance(0.25)
    one.timelines.computed(["d"])
    one.timelines.answered(["other", "d"])
    spans = [
        ("decode_queued", 1.0),
        ("decode_allocated", 0.5),
        ("decode_moving", 2.0),
        ("decode_reporting", 0.5),
        ("decode_resuming", 0.5),
        ("decode_first_token", 0.25),
    ]
    expected = {"kvcached_nixl.request_id": "d", "kvcached_nixl.direction": "pull"}
    assert one.spans.added == [(TRACE, spans, expected)]
    assert one.timelines.take_lasted() == [(State[name.upper()], False, seconds) for name, seconds in spans]
    assert not len(one.timelines) and not one.timelines.awaits_tokens and one.timelines.take_lasted() == []


@pytest.mark.parametrize("is_push", [False, True])
def test_an_offer_that_has_ended_belongs_to_the_trace_that_it_names(is_push: bool) -> None:
    """Its request has ended long before, so nothing is remembered of it."""
    one = Followed(is_push=is_push)
    one.begin("p", State.PREFILL_QUEUED)
    one.timelines.enter("p", State.PREFILL_COMPUTING)
    one.clock.advance(2.0)
    assert one.timelines.trace_of("p") == TRACE
    one.timelines.end("p")
    assert one.timelines.trace_of("p") == "" and not len(one.timelines)
    one.timelines.take([("", one.rank(0, 102.0, 103.0, TRACE))])
    assert [spans for _, spans, _ in one.spans.added] == [
        [("prefill_queued", 0.0), ("prefill_computing", 2.0)],
        [("prefill_offered", 0.25), ("prefill_sending", 0.75)],
    ]
    assert {push for _, push, _ in one.timelines.take_lasted()} == {is_push}


def test_what_is_not_followed_is_passed_by() -> None:
    """The request has ended, or hands nothing over."""
    one = Followed()
    one.timelines.enter("x", State.DECODE_RESUMING)
    one.timelines.failed("x", FailureCause.LOST)
    one.timelines.arrived("x")
    one.timelines.end("x")
    one.timelines.take([("", one.rank(7, 1.0, 2.0))])
    assert one.timelines.take_lasted() == [] and one.spans.added == []
