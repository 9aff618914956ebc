# SPDX-License-Identifier: Apache-2.0
"""What an engine and its API server say to Prometheus and to tracing, through vLLM's own classes."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.config.observability import ObservabilityConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.request import Request

from kvcached_nixl.ids import EngineId
from kvcached_nixl.vllm.adapter import metrics
from kvcached_nixl.vllm.adapter.requests import RequestReader
from kvcached_nixl.vllm.adapter.tracing import EngineSpans, spans_of
from kvcached_nixl.wire.handshake import Answer, Kind, Process, RankHandshake, Tensors, Weights
from kvcached_nixl.wire.headroom import Headroom, encode_headroom
from kvcached_nixl.wire.planes import GroupMemory, Planes
from kvcached_nixl.wire.timeline import State, Timeline

WEIGHTS = Weights(Tensors("a" * 32, "b" * 32), files="c" * 32)


def made() -> Any:
    unregister_vllm_metrics()
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    return metrics.prom_metrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})


def answer() -> tuple[str, bytes]:
    groups = (GroupMemory((Planes((0, 4096), (1, 2), 512, 128, 64, 64, 8, 4, 2, first_head=2),), 2),)
    rank = RankHandshake(EngineId("e"), 1, 0, b"", 0, groups, 0, "DRAM", False, WEIGHTS, Process(), 1, 0)
    return "tag", msgspec.msgpack.encode(Answer("0" * 16, msgspec.msgpack.encode(rank)))


def said(*names: str) -> list[float | None]:
    return [REGISTRY.get_sample_value(f"kvcached_nixl:{one}", {"model_name": "m", "engine": "0"}) for one in names]


KINDS = ("compatibility_id", "checkpoint_id", "weights_id")


def test_an_engine_says_what_its_handshake_compares() -> None:
    one = made()
    assert said(*KINDS) == [None, None, None]
    one.of_engines.say_kind(0, [answer()])
    assert said(*KINDS) == [*Kind.of([answer()])]
    one.of_engines.say_kind(0, [("tag", b"\xc1")])
    assert said(*KINDS) == [*Kind.of([answer()])]


def test_an_engine_says_what_it_could_take() -> None:
    one = made()
    one.of_engines.say_headroom(0, encode_headroom(Headroom(10, 20, 30, 1, 5, 2**40, 7, 9, 2, 3, 1.5, 0.0)))
    one.of_engines.say_headroom(0, b"\xc1")
    assert said("free_tokens", "used_tokens", "queued_tokens") == [10, 20, 30]
    assert said("kept_offers", "kept_tokens", "free_bytes") == [1, 5, 2**40]


def test_the_logger_may_be_made_anew() -> None:
    """As vLLM does it when data parallelism is scaled; it removes its own metrics only."""
    made().of_engines.say_kind(0, [answer()])
    made()
    assert said(*KINDS) == [None, None, None]


def test_what_the_dashboard_and_the_alerts_ask_vllm_for_is_there() -> None:
    """Prometheus returns nothing for a metric that was renamed, and no alert on it fires."""
    from importlib.util import find_spec

    root = Path(__file__).parents[2] / "docs" / "deploy" / "prometheus"
    asked = {
        re.sub("_bucket$", "", name)
        for file in ("dashboard.json", "alerts.yaml")
        for name in re.findall(r"vllm:[a-z_]+", (root / file).read_text())
    }
    spec = find_spec("vllm")
    assert len(asked) >= 3 and spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    sources = [folder / "v1/metrics/loggers.py", *(folder / "distributed/kv_transfer").rglob("*.py")]
    known = {name for path in sources for name in re.findall(r"\"(vllm:[a-z_]+)\"", path.read_text())}
    assert asked - known == set()


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
    for headers, expected in (({"traceparent": TRACE}, TRACE), (None, "")):
        one = Request("r", [1], SamplingParams(max_tokens=1), None, trace_headers=headers)
        assert EngineSpans().trace_of(reader(one)) == expected
