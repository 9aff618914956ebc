# SPDX-License-Identifier: Apache-2.0
"""experiments/traces: what counts towards the time to first token, and its targets can be missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("rich", reason="reports need it")

from experiments.common.otlp import Span
from experiments.traces.measure import ARMS, SUMMARY, WEB_FRAMEWORK, Traced
from experiments.traces.measure import ROUTER as ROUTER_SCOPE
from experiments.traces.report import PROCESSES, judge, states_of

PULL, PUSH = ARMS[:2]
ROUTER, PREFILL, DECODE = PROCESSES


def span(span_id: str, parent: str, name: str, begin: float, end: float, process: str = ROUTER, **more: str) -> Span:
    scope = ROUTER_SCOPE if process == ROUTER else "vllm.tracing.otel"
    return Span("t", span_id, parent, name, scope, begin, end, False, more, {"service.name": process})


def request(direction: str, *more: Span) -> Traced:
    """A second of prefill, a half of decode; the first token is there after 1.5 s."""
    spans = [
        span("r", "client", "POST /v1/completions", 0.0, 4.0, **{"kvcached_nixl.direction": direction}),
        span("p", "r", "prefill", 0.0, 1.0),
        span("d", "r", "decode", 1.0 if direction == "pull" else 0.0, 1.5),
        span("a", "r", "answer", 1.5, 4.0),
        span("p1", "p", "prefill_computing", 0.0, 1.0, PREFILL),
        span("ps", "p", SUMMARY, 0.0, 1.0, PREFILL),
        span("d1", "d", "decode_moving", 1.0 if direction == "pull" else 0.0, 1.5, DECODE),
        span("ds", "d", SUMMARY, 1.0, 4.0, DECODE),
        *more,
    ]
    return Traced("t", spans, 1.5)


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_what_runs_beside_is_not_counted(direction: str) -> None:
    """Prefill's leg in a push; in a pull what prefill keeps after its answer; and vLLM's summary."""
    kept = span("p2", "p", "prefill_offered", 0.9, 1.2, PREFILL)
    one = request(direction, kept)
    expected = ["prefill_computing", "decode_moving"] if direction == "pull" else ["decode_moving"]
    assert [each.name for each in one.leaves] == expected
    assert one.share == 1.0


def test_spans_that_the_web_framework_makes_by_itself_are_not_counted_twice() -> None:
    own = [
        replace(span("pf", "p", "POST /v1/completions", 0.0, 1.0, PREFILL), scope=WEB_FRAMEWORK),
        replace(span("pe", "pf", "fastapi.endpoint", 0.1, 0.9, PREFILL), scope=WEB_FRAMEWORK),
        replace(span("df", "d", "POST /v1/completions", 1.0, 1.5, DECODE), scope=WEB_FRAMEWORK),
    ]
    one = request("pull", *own)
    assert one.request.span_id == "r" and one.share == 1.0


def test_the_targets_can_be_missed() -> None:
    whole = request("pull")
    states = [span(name, "d", name, 1.5, 1.5, DECODE) for name in states_of(PULL)]
    whole = replace(whole, spans=[*whole.spans, *states])
    assert [verdict.reached for verdict in judge(PULL, [whole])] == [True, True, True]
    assert [verdict.reached for verdict in judge(PUSH, [whole])] == [True, False, True], "another state is missing"
    slow, slower = replace(whole, first_token_seconds=1.6), replace(whole, first_token_seconds=1.7)
    assert [verdict.reached for verdict in judge(PULL, [whole, whole, slow])] == [True, True, True]
    assert [verdict.reached for verdict in judge(PULL, [whole, slow, slow])] == [False, True, True]
    assert [verdict.reached for verdict in judge(PULL, [whole, whole, slower])] == [False, True, True]
    torn = replace(whole, spans=[each for each in whole.spans if each.resource["service.name"] != PREFILL])
    assert not judge(PULL, [torn])[2].reached
