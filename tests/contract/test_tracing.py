# SPDX-License-Identifier: Apache-2.0
"""What this package relies on of vLLM's tracing: its helpers, its switch, what travels with a request, its times."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.config import VllmConfig
from vllm.config.observability import ObservabilityConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import Request

from kvcached_nixl.vllm.adapter.requests import RequestReader
from kvcached_nixl.vllm.adapter.tracing import EngineSpans, spans_of
from kvcached_nixl.wire.timeline import State, Timeline

TRACE_ID, PARENT_ID = "a" * 32, "b" * 16
TRACE = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    made, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    trace.set_tracer_provider(provider)
    return made


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[InMemorySpanExporter]:
    exporter.clear()
    yield exporter


def named(exporter: InMemorySpanExporter) -> dict[str, Any]:
    found = exporter.get_finished_spans()
    assert all(f"{one.context.trace_id:032x}" == TRACE_ID for one in found)
    assert all(f"{one.parent.span_id:016x}" == PARENT_ID for one in found)
    return {one.name: one for one in found}


def test_a_span_has_the_times_and_the_parent_that_it_is_given(spans: InMemorySpanExporter) -> None:
    timeline, now = Timeline(), time.perf_counter()
    timeline.enter(State.DECODE_HANDSHAKE, now - 2.0)
    timeline.enter(State.DECODE_MOVING, now - 1.5)
    timeline.end(now - 0.5)
    EngineSpans().add(TRACE, timeline, {"kvcached_nixl.direction": "pull"})
    found = spans.get_finished_spans()
    assert [one.name for one in found] == ["decode_handshake", "decode_moving"]
    assert [round((one.end_time - one.start_time) / 1e9, 6) for one in found] == [0.5, 1.0]
    assert found[-1].end_time == pytest.approx(time.time_ns() - 0.5e9, abs=0.2e9)
    assert dict(found[1].attributes) == {"kvcached_nixl.direction": "pull"}
    assert named(spans)


def test_the_switch_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without OpenTelemetry it is refused in words, where it is set."""
    assert spans_of(SimpleNamespace(observability_config=ObservabilityConfig())) is None
    traced = ObservabilityConfig(otlp_traces_endpoint="http://127.0.0.1:4317")
    assert spans_of(SimpleNamespace(observability_config=traced)) == EngineSpans()
    assert "observability_config" in inspect.signature(VllmConfig).parameters
    monkeypatch.setattr("vllm.tracing.is_tracing_available", lambda: False)
    with pytest.raises(Exception, match="OpenTelemetry is not available"):
        ObservabilityConfig(otlp_traces_endpoint="http://127.0.0.1:4317")


def test_the_engine_core_sets_tracing_up_before_the_connector() -> None:
    """With its own exporter, which sends on a thread of its own."""
    source = inspect.getsource(EngineCoreProc.run_engine_core)
    assert source.index("maybe_init_worker_tracer(") < source.index("EngineCoreProc(")
    from vllm.tracing import otel

    assert "BatchSpanProcessor(" in inspect.getsource(otel.init_otel_tracer)


def test_a_request_carries_what_its_client_has_sent() -> None:
    """Unchecked, from the API server to the engine; nothing where vLLM traces nothing."""
    assert {"trace_headers"} <= set(EngineCoreRequest.__struct_fields__) & set(EngineCoreOutput.__struct_fields__)
    assert inspect.signature(Request).parameters["trace_headers"].default is None
    reader = object.__new__(RequestReader)
    assert EngineSpans().trace_of(reader(SimpleNamespace(trace_headers={"traceparent": TRACE}))) == TRACE
    assert EngineSpans().trace_of(reader(SimpleNamespace(trace_headers=None))) == ""
