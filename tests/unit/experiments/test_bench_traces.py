# SPDX-License-Identifier: Apache-2.0
"""experiments/bench/traces.py: what counts towards the time to first token, and its targets can be missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("rich", reason="reports need it")

from experiments.bench.traces import ARMS, SUMMARY, WEB_FRAMEWORK, Span, Traced, judge, states_of

PULL, PUSH = ARMS[:2]
PREFILL, DECODE = "prefill", "decode"


def span(name: str, begin: float, end: float, process: str, scope: str = "vllm.tracing.otel") -> Span:
    return Span("t", name, "client", name, scope, begin, end, process)


def request(*more: Span) -> Traced:
    """A second of prefill, a half of decode; the first token is there after 1.5 s."""
    spans = [
        span("decode_asking", 0.0, 1.0, DECODE),
        span("prefill_computing", 0.0, 1.0, PREFILL),
        span(SUMMARY, 0.0, 1.0, PREFILL),
        span("decode_moving", 1.0, 1.4, DECODE),
        span("server_answering", 1.4, 1.5, DECODE),
        span(SUMMARY, 0.0, 4.0, DECODE),
        *more,
    ]
    return Traced("t", spans, 1.5)


def test_what_runs_beside_is_not_counted() -> None:
    """What prefill keeps or sends after its answer; vLLM's summary; and what the web framework makes by itself."""
    one = request(
        span("prefill_offered", 0.9, 1.2, PREFILL),
        span("prefill_sending", 1.0, 1.3, PREFILL),
        span("POST /v1/completions", 0.0, 1.0, PREFILL, WEB_FRAMEWORK),
    )
    assert [each.name for each in one.leaves] == ["prefill_computing", "decode_moving", "server_answering"]
    assert one.share == pytest.approx(1.0)


def test_the_targets_can_be_missed() -> None:
    whole = request()
    known = {each.name for each in whole.spans}
    states = [span(name, 1.5, 1.5, DECODE) for name in states_of(PULL) - known]
    whole = replace(whole, spans=[*whole.spans, *states])
    assert [verdict.reached for verdict in judge(PULL, [whole])] == [True, True, True]
    assert [verdict.reached for verdict in judge(PUSH, [whole])] == [True, False, True], "another state is missing"
    slow, slower = replace(whole, first_token_seconds=1.6), replace(whole, first_token_seconds=1.7)
    assert [verdict.reached for verdict in judge(PULL, [whole, whole, slow])] == [True, True, True]
    assert [verdict.reached for verdict in judge(PULL, [whole, slow, slow])] == [False, True, True]
    assert [verdict.reached for verdict in judge(PULL, [whole, whole, slower])] == [False, True, True]
    torn = replace(whole, spans=[each for each in whole.spans if each.process != PREFILL])
    assert not judge(PULL, [torn])[2].reached
