# SPDX-License-Identifier: Apache-2.0
"""Where the time of a hand-over goes, on both sides: its states, without gaps; and the traces made of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support.flow_engine import Status
from support.flow_pair import DIRECTIONS, PROMPT, PULL, PUSH, Pair, kind

from kvcached_nixl.settings import TransferMode
from kvcached_nixl.wire.step import FetchSpec, OfferUpdate, Step
from kvcached_nixl.wire.timeline import State, Timeline

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"
CONTEXT = {"traceparent": TRACE}
_PREFILL = {State.PREFILL_QUEUED, State.PREFILL_COMPUTING, State.PREFILL_SENDING}
_DECODE = {
    *(State.DECODE_QUEUED, State.DECODE_ALLOCATED, State.DECODE_HANDSHAKE, State.DECODE_MOVING),
    *(State.DECODE_VERIFYING, State.DECODE_RESUMING, State.DECODE_FIRST_TOKEN),
}


def traced(pair: Pair, context: Any = CONTEXT, *, at_once: bool = False) -> None:
    """Runs a hand-over whose requests came with a trace context."""
    upstream = pair.ask_prefill(trace_headers=context)
    if not at_once:
        pair.settle()
    params = pair.meet() if at_once else upstream.answer
    found = pair.ask_decode(params, trace_headers=context)
    pair.settle()
    assert (found.status, found.num_external) == (Status.STOPPED, len(PROMPT))
    # Prefill hears in a later step that decode has it.
    pair.pass_time(1.0)
    pair.settle()


def kept(pair: Pair) -> list[tuple[str, Timeline, dict[str, str]]]:
    assert pair.cluster.spans is not None
    return pair.cluster.spans.kept


def states_of(pair: Pair) -> set[State]:
    return {state for _, timeline, _ in kept(pair) for state, _ in timeline.marks}


@pytest.mark.parametrize("is_staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize(("mode", "at_once"), [(PULL, False), (PUSH, False), (PUSH, True)], ids=["pull", "push", "met"])
def test_every_state_of_a_hand_over_is_in_its_trace(mode: TransferMode, at_once: bool, is_staged: bool) -> None:
    made = kind(slots=(24, 6)) if is_staged else kind()
    pair = Pair(mode, made, made, is_traced=True)
    traced(pair, at_once=at_once)
    expected = {*_PREFILL, *_DECODE}
    if mode is PUSH or is_staged:
        expected.add(State.DECODE_WAITING)
    if is_staged:
        expected.add(State.DECODE_COPYING)
    if not at_once:
        expected.add(State.PREFILL_OFFERED)
    assert expected <= states_of(pair), f"{expected - states_of(pair)} are missing"
    assert {trace for trace, _, _ in kept(pair)} == {TRACE}
    assert {attributes["kvcached_nixl.direction"] for _, _, attributes in kept(pair)} == {mode.value}
    # Prefill's request, its offer, and decode's request.
    assert len(kept(pair)) == 3


def test_times_in_states_add_up_to_the_hand_over() -> None:
    """On decode from its request's arrival to its first token. Nothing is traced."""
    pair = Pair(PULL)
    begun = pair.clock.now_seconds()
    offered = pair.offered()
    pair.clock.advance(2.0)
    arrived = pair.clock.now_seconds()
    found = pair.ask_decode(offered)
    for _ in range(6):
        pair.clock.advance(0.25)
        pair.round()
    pair.until_posted()
    pair.clock.advance(0.5)
    while found.num_outputs < 1:
        pair.settle_wire()
        pair.clock.advance(0.125)
        pair.round()
    first_token = pair.clock.now_seconds()
    pair.settle()
    pair.pass_time(1.0)
    pair.settle()
    lasted: Counter[State] = Counter()
    for state, is_push, seconds in (*pair.prefill.lasted, *pair.decode.lasted):
        assert not is_push and seconds >= 0
        lasted[State(state)] += seconds  # type: ignore[assignment]
    of_decode = sum(seconds for state, seconds in lasted.items() if state.label.startswith("decode_"))
    assert of_decode == pytest.approx(first_token - arrived)
    assert lasted[State.DECODE_MOVING] >= 0.5 and lasted[State.PREFILL_OFFERED] >= 2.0
    of_prefill = sum(seconds for state, seconds in lasted.items() if state.label.startswith("prefill_"))
    assert 2.0 <= of_prefill <= pair.clock.now_seconds() - begun


def steps_of(pair: Pair) -> list[Step]:
    """Every step that the workers are told of from now on."""
    told: list[Step] = []
    for engine in (pair.prefill, pair.decode):
        for worker in engine.workers:
            before = worker.side.begin_step

            def begin(step: Step, before: Any = before) -> None:
                told.append(step)
                before(step)

            worker.side.begin_step = begin  # type: ignore[method-assign]
    return told


@DIRECTIONS
def test_without_tracing_no_message_has_a_context(mode: TransferMode) -> None:
    pair = Pair(mode)
    told = steps_of(pair)
    traced(pair)
    assert any(step.of(FetchSpec) for step in told) and any(step.of(OfferUpdate) for step in told)
    assert not any(one.trace for step in told for one in step.of(OfferUpdate))
    assert pair.cluster.spans is None and pair.decode.lasted and pair.prefill.lasted


def test_a_failed_hand_over_shows_its_cause_and_where_it_was() -> None:
    """Decode computes the prompt itself; its trace goes on to its first token."""
    pair = Pair(PULL, is_traced=True)
    pair.acquaint()
    found = pair.ask_decode(pair.offered(trace_headers=CONTEXT), trace_headers=CONTEXT)
    (posted,) = pair.until_posted()
    pair.clock.advance(1.0)
    pair.wire.fail(posted)
    pair.settle()
    assert found.status is Status.STOPPED and not found.num_external
    of_decode = [
        (timeline, attributes) for _, timeline, attributes in kept(pair) if "kvcached_nixl.cause" in attributes
    ]
    ((timeline, attributes),) = of_decode
    assert attributes["kvcached_nixl.cause"] == "lost"
    assert timeline.lasted()[State.DECODE_MOVING] == 1.0
    assert timeline.marks[-1][0] is State.DECODE_FAILED
