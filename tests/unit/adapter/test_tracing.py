# SPDX-License-Identifier: Apache-2.0
"""`vllm.adapter.tracing`: what a client may send, and which spans vLLM is told to make."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvcached_nixl.vllm.adapter.tracing import EngineSpans, add_server_spans, traceparent_of
from kvcached_nixl.wire.timeline import State, Timeline

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"
VLLM = """
made = []


def extract_trace_context(headers):
    return dict(headers)


def instrument_manual(span_name, start_time, end_time=None, attributes=None, context=None, kind=None):
    made.append((span_name, start_time, end_time, attributes, context))
"""


@pytest.fixture
def vllm(make_module: Callable[..., ModuleType]) -> ModuleType:
    return make_module("vllm.tracing", VLLM)


@pytest.mark.parametrize(
    "sent",
    [
        None,
        "no mapping",
        {},
        {"tracestate": "a=b"},
        {"traceparent": None},
        {"traceparent": b"00"},
        {"traceparent": ""},
        {"traceparent": TRACE.upper()},
        {"traceparent": TRACE + "\n"},
        {"traceparent": " " + TRACE},
        {"traceparent": TRACE + "-more"},
        {"traceparent": "ff" + TRACE[2:]},
        {"traceparent": f"00-{'0' * 32}-{'b' * 16}-01"},
        {"traceparent": f"00-{'a' * 32}-{'0' * 16}-01"},
        {"traceparent": "00-" + "\u0663" * 32 + TRACE[35:]},
        {"traceparent": TRACE * 100_000},
    ],
    ids=str,
)
def test_a_hostile_context_is_none(sent: Any) -> None:
    assert traceparent_of(sent) == ""


def test_a_tracer_that_raises_ends_no_engine(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a sampler or a processor of somebody else."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no span")

    monkeypatch.setattr(vllm, "instrument_manual", fail)
    timeline = Timeline()
    timeline.enter(State.DECODE_QUEUED, 0.0)
    timeline.end(1.0)
    EngineSpans().add(TRACE, timeline, {})
    add_server_spans(SimpleNamespace(trace_headers={"traceparent": TRACE}), state_of())
    assert "could not be made" in caplog.text


def state_of(**changed: Any) -> Any:
    mono = time.monotonic()
    found = {"arrival_time": time.time() - 2.0, "queued_ts": mono - 1.5, "first_token_ts": mono - 0.5}
    return SimpleNamespace(stats=SimpleNamespace(**found, first_token_latency=1.75, **changed))


def test_the_api_servers_share_is_shown(vllm: ModuleType) -> None:
    """Until the engine has the request, and from its first token on."""
    add_server_spans(SimpleNamespace(trace_headers={"traceparent": TRACE}), state_of())
    seconds = {name: (end - begin) / 1e9 for name, begin, end, _, _ in vllm.made}
    assert seconds == pytest.approx({"server_received": 0.5, "server_answering": 0.25}, abs=0.1)


@pytest.mark.parametrize(
    ("headers", "stats"),
    [(None, state_of().stats), ({"traceparent": "x"}, state_of().stats), ({"traceparent": TRACE}, None)],
)
def test_without_a_trace_or_statistics_nothing_is_shown(vllm: ModuleType, headers: Any, stats: Any) -> None:
    add_server_spans(SimpleNamespace(trace_headers=headers), SimpleNamespace(stats=stats))
    assert vllm.made == []


def test_what_never_began_is_not_shown(vllm: ModuleType) -> None:
    """A request that was aborted before the engine had it, or before its first token."""
    state = state_of()
    state.stats.queued_ts = state.stats.first_token_ts = 0.0
    add_server_spans(SimpleNamespace(trace_headers={"traceparent": TRACE}), state)
    assert vllm.made == []
