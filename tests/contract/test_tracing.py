# SPDX-License-Identifier: Apache-2.0
"""What this package relies on of vLLM's tracing: its helpers, its switch, what travels with a request, its times."""

from __future__ import annotations

import inspect
import subprocess
import sys
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
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import RequestStateStats
from vllm.v1.request import Request

from kvcached_nixl.vllm.adapter.requests import RequestReader
from kvcached_nixl.vllm.adapter.tracing import EngineSpans, add_server_spans, spans_of
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


def test_what_the_client_does_not_sample_makes_no_span(spans: InMemorySpanExporter) -> None:
    timeline = Timeline()
    timeline.enter(State.DECODE_QUEUED, time.perf_counter())
    timeline.end(time.perf_counter())
    EngineSpans().add(TRACE[:-1] + "0", timeline, {})
    assert spans.get_finished_spans() == ()


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


def test_the_api_servers_times_can_be_told_from_its_statistics(spans: InMemorySpanExporter) -> None:
    """As vLLM fills them in: wall-clock time of the API server, CLOCK_MONOTONIC of the engine."""
    stats = RequestStateStats(arrival_time=time.time() - 1.0)
    mono = time.monotonic()
    stats.queued_ts, stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts = (
        mono - 0.75,
        mono,
        mono - 0.25,
        mono,
    )
    stats.first_token_latency = 0.875
    state = SimpleNamespace(
        stats=stats,
        prompt_token_ids=[1],
        prompt_embeds=None,
        external_req_id="r",
        top_p=None,
        max_tokens_param=None,
        temperature=None,
        n=None,
    )
    output = EngineCoreOutput("r", [1], trace_headers={"traceparent": TRACE})
    iteration: Any = SimpleNamespace(iteration_timestamp=time.time())
    OutputProcessor.do_tracing(object.__new__(OutputProcessor), output, state, iteration)
    add_server_spans(output, state)
    found = named(spans)
    assert set(found) == {"llm_request", "server_received", "server_answering"}
    seconds = {name: (one.end_time - one.start_time) / 1e9 for name, one in found.items()}
    assert seconds["server_received"] == pytest.approx(0.25, abs=0.05)
    assert seconds["server_answering"] == pytest.approx(0.125, abs=0.05)


def test_times_of_processes_of_one_host_can_be_compared() -> None:
    """`Clock` is CLOCK_MONOTONIC, as vLLM's own timestamps are."""
    code = "import time; print(time.perf_counter(), time.monotonic())"
    before = time.perf_counter()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    there, monotonic = map(float, said.split())
    assert before < there < time.perf_counter() and abs(there - monotonic) < 0.5
