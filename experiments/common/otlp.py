# SPDX-License-Identifier: Apache-2.0
"""A collector of OpenTelemetry spans: takes OTLP over HTTP on the loopback address, and keeps them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

__all__ = ["ENVIRONMENT", "Collector", "Span", "collecting"]

WAIT_SECONDS = 20.0
ENVIRONMENT = MappingProxyType(
    {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        # Otherwise a span is sent up to 5 s after its end.
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "NO_PROXY": "127.0.0.1",
    }
)
"""Of a process that sends to `Collector`."""


@dataclass(frozen=True)
class Span:
    """One span. Times are in seconds since the epoch; ``parent_id`` is "" for the first one of a trace.

    ``scope`` is OpenTelemetry's: the name of the library that made the span.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    scope: str
    begin: float
    end: float
    is_error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class Collector:
    """What has been received. Filled on the threads of its HTTP server."""

    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)
    _received: threading.Condition = field(default_factory=threading.Condition)

    def take(self, body: bytes) -> None:
        """Keep the spans of one request."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        said = ExportTraceServiceRequest.FromString(body)
        found = [
            Span(
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                name=span.name,
                scope=of_scope.scope.name,
                begin=span.start_time_unix_nano / 1e9,
                end=span.end_time_unix_nano / 1e9,
                is_error=span.status.code == 2,
                attributes=_plain(span.attributes),
                resource=_plain(of_resource.resource.attributes),
            )
            for of_resource in said.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]
        with self._received:
            self.spans += found
            self._received.notify_all()

    def of_trace(self, trace_id: str, is_whole: Callable[[list[Span]], bool]) -> list[Span]:
        """Return the spans of a trace in the order of their begin, waiting until they are whole, or for 20 s."""
        until = time.monotonic() + WAIT_SECONDS
        with self._received:
            while True:
                found = [span for span in self.spans if span.trace_id == trace_id]
                left = until - time.monotonic()
                if is_whole(found) or left <= 0:
                    return sorted(found, key=lambda span: span.begin)
                self._received.wait(left)


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value") or "string_value") for one in attributes}


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Receive spans on a free port until the block ends."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            collector.take(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: one line for each request would hide what is measured."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    collector.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        yield collector
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
