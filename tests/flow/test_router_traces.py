# SPDX-License-Identifier: Apache-2.0
"""The router's traces, with stub servers and a collector: one trace over all legs, and nothing where it is off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.router_under_test import HELLO, UnderTest, learn, right, serving

pytest.importorskip("opentelemetry.sdk", reason="the extra `traces` is not installed")

from experiments.common.otlp import ENVIRONMENT, Collector, Span, collecting
from kvcached_nixl.errors import SettingsError
from kvcached_nixl.proxy.tracing import CLOSE_SECONDS, MOST_STATE_CHARACTERS, tracing_to

TRACE, PARENT = "a" * 32, "b" * 16
CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "x=y"}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with collecting() as found:
        yield found


def has_ended(spans: list[Span]) -> bool:
    return any(span.name.startswith("POST ") for span in spans)


async def spans_of(collector: Collector, trace_id: str = TRACE) -> list[Span]:
    return await asyncio.to_thread(collector.of_trace, trace_id, has_ended)


def legs(at: UnderTest) -> list[str]:
    """The context that each leg carried, in the order of the legs."""
    asked = [one for server in (*at.prefills, *at.decodes) for one in server.asked]
    asked.sort(key=lambda one: one.headers["x-request-id"])
    return [one.headers.get("traceparent", "") for one in asked]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])
def test_a_request_is_one_trace_over_its_legs(pushes: bool, stream: bool, collector: Collector) -> None:
    """Each leg carries its own span, which hangs below the client's. The parts before the first token follow each
    other."""

    async def run() -> None:
        async with serving(pushes=pushes, otlp_traces_endpoint=collector.endpoint) as at:
            await learn(at)
            answer = await at.complete(headers=CONTEXT, stream=stream, max_tokens=4)
            assert answer.status_code == 200
            spans = await spans_of(collector)
            named = {span.name: span for span in spans}
            root = named["POST /v1/completions"]
            assert root.parent_id == PARENT and not root.is_error
            assert root.attributes["kvcached_nixl.direction"] == ("push" if pushes else "pull")
            assert root.resource["service.name"] == "kvcached-nixl-router"
            assert {"read", "admission", "queue", "prefill", "decode", "answer"} <= named.keys()
            assert {span.parent_id for span in spans if span is not root} == {root.span_id, named["prefill"].span_id}
            assert sorted(leg for leg in legs(at) if TRACE in leg) == sorted(
                f"00-{TRACE}-{named[name].span_id}-01" for name in ("prefill", "decode")
            )
            assert all(one.headers["tracestate"] == "x=y" for one in at.decodes[0].asked[-1:])
            assert named["decode"].end <= named["answer"].begin + 1e-6
            on_path = [span for span in spans if span.parent_id == root.span_id and span.name != "answer"]
            if pushes:
                assert named["prefill"].begin < named["decode"].end
                on_path.remove(named["prefill"])
            for one, following in zip(on_path, on_path[1:], strict=False):
                assert one.end <= following.begin + 1e-6, f"{one.name} overlaps {following.name}"

    asyncio.run(run())


@pytest.mark.parametrize(
    "context",
    [
        {},
        {"traceparent": "00-aa-bb-01", "tracestate": "x=y"},
        {"traceparent": "x" * 5000},
        {"traceparent": f"00-{'0' * 32}-{PARENT}-01"},
        {"tracestate": "x=y"},
    ],
    ids=str,
)
def test_a_request_without_a_usable_context_begins_a_trace(context: dict[str, str], collector: Collector) -> None:
    """A client's malformed context reaches no server."""

    async def run() -> None:
        async with serving(otlp_traces_endpoint=collector.endpoint) as at:
            assert right(await at.complete(headers=context, **{"max_tokens": 4}))
            (trace_id,) = {leg.split("-")[1] for leg in legs(at)}
            root = next(span for span in await spans_of(collector, trace_id) if span.name.startswith("POST "))
            assert root.parent_id == ""
            assert not any("tracestate" in one.headers for one in at.decodes[0].asked)

    asyncio.run(run())


@pytest.mark.parametrize("state", ["x=" + "y" * MOST_STATE_CHARACTERS, "no members", ",,,=", "x=y,x=z"])
def test_a_hostile_state_costs_the_state_only(state: str, collector: Collector) -> None:
    async def run() -> None:
        async with serving(otlp_traces_endpoint=collector.endpoint) as at:
            assert right(await at.complete(headers={**CONTEXT, "tracestate": state}, max_tokens=4))
            assert {leg.split("-")[1] for leg in legs(at)} == {TRACE}

    asyncio.run(run())


def test_a_client_decides_whether_it_is_sampled(collector: Collector) -> None:
    """Nothing is sent then, and the servers are told the same."""

    async def run() -> None:
        async with serving(otlp_traces_endpoint=collector.endpoint) as at:
            unsampled = {"traceparent": f"00-{'c' * 32}-{PARENT}-00"}
            assert right(await at.complete(headers=unsampled, max_tokens=4))
            assert {leg[-3:] for leg in legs(at)} == {"-00"} and {leg.split("-")[1] for leg in legs(at)} == {"c" * 32}
            assert right(await at.complete(headers=CONTEXT, max_tokens=4))
            assert await spans_of(collector)
            assert {span.trace_id for span in collector.spans} == {TRACE}

    asyncio.run(run())


def test_a_retry_is_seen_with_the_cause_of_the_first_attempt(collector: Collector) -> None:
    async def run() -> None:
        async with serving(2, 2, otlp_traces_endpoint=collector.endpoint) as at:
            for decode in at.decodes:
                decode.faults.append("500")
            at.decodes[1].faults.clear()
            answers = [await at.complete(headers=CONTEXT, max_tokens=4) for _ in range(2)]
            assert all(right(one) for one in answers)
            await asyncio.sleep(0)
            spans = [span for span in await spans_of(collector) if span.name in ("decode", "pause")]
            failed = [span for span in spans if span.is_error]
            assert [span.attributes["kvcached_nixl.outcome"] for span in failed] == ["server"]
            assert "pause" in {span.name for span in spans} and failed[0].attributes["server"] == at.decodes[0].name

    asyncio.run(run())


def test_a_refused_request_says_why(collector: Collector) -> None:
    async def run() -> None:
        async with serving(otlp_traces_endpoint=collector.endpoint) as at:
            answer = await at.http.post(f"{at.url}/v1/completions", content=b"no JSON", headers=CONTEXT)
            assert answer.status_code == 415
            named = {span.name: span for span in await spans_of(collector)}
            assert named["read"].is_error and named["POST /v1/completions"].is_error
            assert named["read"].attributes["kvcached_nixl.outcome"] == "body"

    asyncio.run(run())


def test_sequences_have_a_part_each(collector: Collector) -> None:
    async def run() -> None:
        async with serving(otlp_traces_endpoint=collector.endpoint) as at:
            assert (await at.complete(headers=CONTEXT, n=2, max_tokens=4)).status_code == 200
            spans = await spans_of(collector)
            named = {span.span_id: span.name for span in spans}
            parents = [named[span.parent_id] for span in spans if span.name == "decode"]
            assert sorted(parents) == ["sequence 0", "sequence 1"]

    asyncio.run(run())


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_is_down_costs_no_request_and_no_time_at_the_end(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)

    async def run() -> float:
        async with serving(otlp_traces_endpoint="http://127.0.0.1:9") as at:
            for _ in range(3):
                assert right(await at.complete(headers=CONTEXT, max_tokens=4))
            begun = time.monotonic()
        return time.monotonic() - begun

    assert asyncio.run(run()) < CLOSE_SECONDS + 4.0


def test_where_it_is_off_nothing_of_opentelemetry_is_imported() -> None:
    """And nothing has to be installed."""
    code = "import sys, kvcached_nixl.proxy.command; print([name for name in sys.modules if 'opentelemetry' in name])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_where_it_is_off_a_clients_context_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)

    async def run() -> None:
        async with serving() as at:
            assert right(await at.complete(headers=CONTEXT, max_tokens=4))
            assert legs(at) == [CONTEXT["traceparent"]] * 2

    asyncio.run(run())


@pytest.mark.parametrize("is_on", [False, True])
def test_a_state_in_several_headers_is_one(is_on: bool, collector: Collector) -> None:
    """As W3C asks."""
    headers = [("traceparent", CONTEXT["traceparent"]), ("tracestate", "a=1"), ("tracestate", "b=2")]

    async def run() -> None:
        options = {"otlp_traces_endpoint": collector.endpoint} if is_on else {}
        async with serving(**options) as at:
            answer = await at.http.post(f"{at.url}/v1/completions", json=HELLO, headers=headers)
            assert answer.status_code == 200
            states = {leg.headers.get("tracestate") for one in (*at.prefills, *at.decodes) for leg in one.asked}
            assert states == {"a=1,b=2"}

    asyncio.run(run())


@pytest.mark.parametrize("missing", ["sdk.trace", "exporter.otlp.proto.grpc.trace_exporter"])
def test_missing_packages_are_said_at_the_start(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"opentelemetry.{missing}", None)
    with pytest.raises(SettingsError, match="traces") as refused:
        tracing_to("http://127.0.0.1:9", {})
    assert "--otlp-traces-endpoint" in str(refused.value) and "pip install" in str(refused.value)


def test_an_unknown_protocol_is_said_at_the_start() -> None:
    with pytest.raises(SettingsError, match="http/protobuf"):
        tracing_to("http://127.0.0.1:9", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, "kvcached-nixl-router"), ({"OTEL_SERVICE_NAME": "mine"}, "mine")],
)
def test_the_service_has_the_name_of_the_environment(
    environ: dict[str, str], expected: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    async def run() -> Any:
        async with serving(otlp_traces_endpoint=collector.endpoint) as at:
            await at.complete(headers=CONTEXT, **{**HELLO, "prompt": "hello"})
            return await spans_of(collector)

    assert {span.resource["service.name"] for span in asyncio.run(run())} == {expected}
