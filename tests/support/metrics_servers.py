# SPDX-License-Identifier: Apache-2.0
"""Servers that answer ``/metrics`` on real sockets, with what a test chooses; and texts as vLLM has them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST = "127.0.0.1"
MODEL = "model"


def engine_text(engine: str = "0", **figures: float) -> str:
    """``/metrics`` of an engine. Figures by name without prefix; causes as ``failed_lease``, and how
    often a state has ended as ``state_prefill_queued``."""
    labels = f'engine="{engine}",model_name="{MODEL}"'
    known = {
        "free_tokens": 48_000.0,
        "used_tokens": 16_000.0,
        "queued_tokens": 0.0,
        "free_bytes": 3.0 * 2**30,
        **figures,
    }
    stock = {"running": "num_requests_running", "waiting": "num_requests_waiting"}
    stock["handovers"] = "nixl_xfer_time_seconds_count"
    lines = [f"vllm:{name}{{{labels}}} {known.pop(key, 0.0)}" for key, name in stock.items()]
    for key, value in known.items():
        kind, _, rest = key.partition("_")
        if kind == "failed":
            lines.append(f'kvcached_nixl:handover_failures_total{{{labels},cause="{rest}"}} {value}')
        elif kind == "state":
            of_state = f'{{{labels},direction="pull",state="{rest}"}}'
            lines.append(f"kvcached_nixl:handover_state_seconds_count{of_state} {value}")
        else:
            lines.append(f"kvcached_nixl:{key}{{{labels}}} {value}")
    return "\n".join([*lines, ""])


class MetricsServer:
    """One server on a port of loopback.

    Attributes:
        text: what it answers.
        status, headers: of its answers.
        asked: paths, in order.
        behave: takes the place of the answer; gets the handler, whose ``wfile`` goes to the client.
    """

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.status = 200
        self.headers = {"Content-Type": "text/plain; version=0.0.4"}
        self.asked: list[str] = []
        self.sent_headers: list[Mapping[str, str]] = []
        self.behave: Callable[[BaseHTTPRequestHandler], None] | None = None
        self.closing = threading.Event()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @contextmanager
    def running(self) -> Iterator[MetricsServer]:
        """Serves while the block runs."""
        said = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                said.asked.append(self.path)
                said.sent_headers.append(dict(self.headers))
                self.close_connection = True
                with contextlib.suppress(ConnectionError):
                    if said.behave is not None:
                        said.behave(self)
                        return
                    body = said.text.encode()
                    self.send_response(said.status)
                    for name, value in said.headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing: the test looks at ``asked``."""

        class Http(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """A client that goes is part of a test."""

        server = Http((HOST, self.port), Handler)
        self.port = server.server_address[1]
        self.closing.clear()
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.closing.set()
            server.shutdown()
            server.server_close()
            thread.join()

    def stand_still(self, handler: BaseHTTPRequestHandler) -> None:
        """Behaviour: the request is read, and nothing is answered until the server ends."""
        self.closing.wait(60.0)

    def flood(self, handler: BaseHTTPRequestHandler) -> None:
        """Behaviour: an answer without an end, as fast as it is read."""
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        while not self.closing.is_set():
            handler.wfile.write(b"x" * (1 << 20))
