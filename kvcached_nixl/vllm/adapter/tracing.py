# SPDX-License-Identifier: Apache-2.0
"""Spans of an engine's hand-overs, where vLLM traces requests (``--otlp-traces-endpoint``).

vLLM has set OpenTelemetry up in the engine's process by then: its exporter, which sends on a thread of its own, and the
sampler of ``OTEL_TRACES_SAMPLER``. Each state of a timeline becomes a span below the context that the request came
with, beside vLLM's own ``llm_request``. So do two times of the API server, which vLLM measures.

Sources: ``tracing/__init__.py``, ``tracing/otel.py``, ``v1/engine/core.py`` (``maybe_init_worker_tracer``),
``v1/engine/output_processor.py`` (``do_tracing``), ``v1/metrics/stats.py``; the same in vLLM 0.26 to 0.33.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.attributes import private
from kvcached_nixl.wire.timeline import Timeline

logger = logging.getLogger(SERVER_LOGGER)

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
"""Of version 00. A later one has more behind these fields, which nobody here could use."""


def spans_of(config: Any) -> EngineSpans | None:
    """What makes an engine's spans; None where nothing is traced."""
    return None if private(config.observability_config, "otlp_traces_endpoint") is None else EngineSpans()


def traceparent_of(headers: Any) -> str:
    """The ``traceparent`` among a request's trace headers; "" if there is none that can be used.

    They are what a client has sent. A malformed one would begin a trace of its own for each span.
    """
    found = headers.get("traceparent") if isinstance(headers, Mapping) else None
    return found if isinstance(found, str) and _TRACEPARENT.fullmatch(found) else ""


def add_server_spans(output: Any, state: Any) -> None:
    """Make the spans of a request that has ended in the API server.

    Args:
        output: vLLM's last ``EngineCoreOutput`` of it.
        state: vLLM's ``RequestState``, whose statistics have wall-clock time of the API server, and CLOCK_MONOTONIC of
            its engine on the same host.
    """
    stats, trace = private(state, "stats"), traceparent_of(private(output, "trace_headers"))
    if stats is None or not trace:
        return
    arrival_ns, offset_ns = int(private(stats, "arrival_time") * 1e9), time.time_ns() - time.perf_counter_ns()
    queued, first = private(stats, "queued_ts"), private(stats, "first_token_ts")
    answered_ns = arrival_ns + int(private(stats, "first_token_latency") * 1e9)
    if queued:
        _add("server_received", trace, arrival_ns, offset_ns + int(queued * 1e9), {})
    if first:
        _add("server_answering", trace, offset_ns + int(first * 1e9), answered_ns, {})


def _add(name: str, trace: str, begin_ns: int, end_ns: int, attributes: Mapping[str, str]) -> None:
    from vllm.tracing import extract_trace_context, instrument_manual

    try:
        context = extract_trace_context({"traceparent": trace})
        # A wall clock that was set meanwhile must not make a span end before it begins.
        instrument_manual(name, begin_ns, max(begin_ns, end_ns), dict(attributes), context)
    except Exception:
        # On the engine's thread, or that of all answers: an error in a sampler or a processor would end every request.
        logger.exception("A span could not be made, so a trace is not complete")


@dataclass(frozen=True)
class EngineSpans:
    def trace_of(self, request: Any) -> str:
        """The ``traceparent`` of a request, "" without one."""
        return traceparent_of(request.trace_headers)

    def add(self, trace: str, timeline: Timeline, attributes: Mapping[str, str]) -> None:
        """Make a span of each interval. Its begin and end are converted from `Clock` to time since the epoch."""
        offset_ns = time.time_ns() - time.perf_counter_ns()
        for state, begin_seconds, end_seconds in timeline.intervals():
            begin_ns, end_ns = offset_ns + int(begin_seconds * 1e9), offset_ns + int(end_seconds * 1e9)
            _add(state.label, trace, begin_ns, end_ns, attributes)
