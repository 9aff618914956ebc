# SPDX-License-Identifier: Apache-2.0
"""The router's spans of a request: OpenTelemetry, with ``--otlp-traces-endpoint``. Without that flag nothing of
OpenTelemetry is imported, and a client's trace context is passed on to both legs unchanged.

Spans are sent on a thread of the SDK. What it cannot send it drops, after a line in the log. The sampler, the protocol
and the limits are those of the SDK's own environment variables; the protocol is chosen as vLLM chooses it, so one
endpoint serves router and servers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from kvcached_nixl.errors import SettingsError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

__all__ = ["NOT_TRACED", "NotTraced", "Part", "Tracing", "tracing_to"]

SERVICE = "kvcached-nixl-router"
CLOSE_SECONDS = 2.0
"""How long the end of the process waits for spans to be sent."""
MOST_STATE_CHARACTERS = 512
"""Of a ``tracestate``: what W3C asks everybody to pass on. A longer one is dropped."""
PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_CONTEXT = ("traceparent", "tracestate")


class Part(Protocol):
    """A request, or a part of one, with a span if it is traced."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The trace context for a leg."""
        ...

    def without_context(self, headers: dict[str, str]) -> dict[str, str]:
        """Headers for each leg, without a client's trace context where `headers` takes its place."""
        ...

    def part(self, name: str, **attributes: str) -> AbstractContextManager[Part]:
        """A part within this one, for as long as the block lasts. An exception is its outcome."""
        ...

    def follow(self, name: str) -> None:
        """This part ends, and another one beside it follows until the end of the block."""
        ...

    def end(self, outcome: str, **attributes: str) -> None:
        """The request has ended; "ok" is a success."""
        ...


class NotTraced:
    """Does nothing."""

    headers: Mapping[str, str] = {}

    def without_context(self, headers: dict[str, str]) -> dict[str, str]:
        return headers

    def part(self, name: str, **attributes: str) -> AbstractContextManager[Part]:
        return nullcontext(self)

    def follow(self, name: str) -> None:
        """Nothing to end."""

    def end(self, outcome: str, **attributes: str) -> None:
        """Nothing to end."""


NOT_TRACED = NotTraced()


class Tracing:
    """What makes spans. Once per process.

    Args:
        provider: OpenTelemetry's; closed by `close`.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("kvcached_nixl.proxy")

    def request(self, name: str, context: Mapping[str, str], at_seconds: float, **attributes: str) -> Part:
        """A request that has arrived.

        Args:
            context: the client's ``traceparent`` and ``tracestate``, if it sent them; malformed ones are ignored.
            at_seconds: when it has arrived, by ``time.time``.
        """
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        usable = {key: value for key, value in context.items() if len(value) <= MOST_STATE_CHARACTERS}
        span = self._tracer.start_span(
            name,
            TraceContextTextMapPropagator().extract(usable),
            SpanKind.SERVER,
            attributes,
            start_time=int(at_seconds * 1e9),
        )
        return _Traced(self._tracer, span)

    def close(self) -> None:
        """Send what is left, for CLOSE_SECONDS at most."""
        ending = threading.Thread(target=self._provider.shutdown, name="kvcached-nixl-traces", daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)


class _Traced:
    """A part with a span."""

    def __init__(self, tracer: Tracer, span: Span, within: Span | None = None) -> None:
        self._tracer = tracer
        self._span = span
        self._within = within

    @property
    def headers(self) -> Mapping[str, str]:
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        found: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(found, set_span_in_context(self._span))
        return found

    def without_context(self, headers: dict[str, str]) -> dict[str, str]:
        return {name: value for name, value in headers.items() if name not in _CONTEXT}

    @contextmanager
    def part(self, name: str, **attributes: str) -> Iterator[Part]:
        made = _Traced(self._tracer, self._child(self._span, name, attributes), self._span)
        try:
            yield made
        except BaseException as error:
            # A text may contain parts of the prompt: only the cause is told.
            cause = getattr(getattr(error, "cause", None), "value", None) or type(error).__name__
            made.end(cause)
            raise
        made.end("ok")

    def follow(self, name: str) -> None:
        if self._within is not None:
            self.end("ok")
            self._span = self._child(self._within, name, {})

    def end(self, outcome: str, **attributes: str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attributes({"kvcached_nixl.outcome": outcome, **attributes})
        if outcome != "ok":
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _child(self, within: Span, name: str, attributes: Mapping[str, str]) -> Span:
        from opentelemetry.trace import SpanKind, set_span_in_context

        kind = SpanKind.CLIENT if "server" in attributes else SpanKind.INTERNAL
        return self._tracer.start_span(name, set_span_in_context(within), kind, dict(attributes))


def tracing_to(endpoint: str, environ: Mapping[str, str]) -> Tracing:
    """Sets up the sending of spans to an OTLP endpoint.

    Raises:
        SettingsError: OpenTelemetry is not installed, or the protocol is none that it sends.
    """
    protocol = environ.get(PROTOCOL, "grpc")
    if protocol not in ("grpc", "http/protobuf"):
        raise SettingsError(
            found=f"{PROTOCOL}={protocol!r}",
            expected='"grpc" (the default, as in vLLM) or "http/protobuf"',
            consequence="Spans could not be sent to --otlp-traces-endpoint. The router does not start.",
            remedy=f"Correct or unset {PROTOCOL}.",
        )
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(protocol, endpoint)
    except ImportError as error:
        raise SettingsError(
            found=f"--otlp-traces-endpoint {endpoint}, and no OpenTelemetry: {error}",
            expected="opentelemetry-sdk and the exporter for OTLP",
            consequence="No span could be sent. The router does not start.",
            remedy="pip install 'kvcached-nixl[proxy,traces]', or leave --otlp-traces-endpoint out.",
        ) from error
    is_named = "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    # Closed by `Tracing.close`, which does not wait as long.
    provider = TracerProvider(
        resource=Resource.create({} if is_named else {"service.name": SERVICE}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


def _exporter(protocol: str, endpoint: str) -> Any:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=endpoint, insecure=True)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http(endpoint=endpoint)
