# SPDX-License-Identifier: Apache-2.0
"""Servers that answer ``/metrics`` on real sockets, with what a test chooses; and texts as vLLM and the router have."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST = "127.0.0.1"
MODEL = "model"


def engine_text(engine: str = "0", **figures: float) -> str:
    """``/metrics`` of an engine. Figures by name without prefix; causes as ``failed_lease``, ``revoked_blocks``."""
    labels = f'engine="{engine}",model_name="{MODEL}"'
    defaults = {"free_tokens": 48_000.0, "used_tokens": 16_000.0, "queued_tokens": 0.0, "kept_offers": 0.0}
    kinds = {"compatibility_id": 7.0, "checkpoint_id": 8.0, "weights_id": 9.0}
    known = {**defaults, **kinds, "quarantined_blocks": 0.0, "free_bytes": float(3 << 30), **figures}
    stock = {"running": "num_requests_running", "waiting": "num_requests_waiting"}
    moved = {"handovers": "nixl_xfer_time_seconds_count", "moved_bytes": "nixl_bytes_transferred_sum"}
    lines = [f"vllm:{name}{{{labels}}} {known.pop(key, 0.0)}" for key, name in (stock | moved).items()]
    for key, value in known.items():
        kind, _, cause = key.partition("_")
        counter = {"failed": "handover_failures_total", "revoked": "revoked_offers_total"}.get(kind)
        more = f',cause="{cause}"' if counter else ""
        lines.append(f"kvcached_nixl:{counter or key}{{{labels}{more}}} {value}")
    types = [f"# TYPE kvcached_nixl:{name} counter" for name in ("handover_failures_total", "revoked_offers_total")]
    return "\n".join([*types, *lines, ""])


def router_text(
    servers: Mapping[str, tuple[str, float]],
    outcomes: Mapping[str, float] | None = None,
    first_seconds: Mapping[str, float] | None = None,
    **counters: float,
) -> str:
    """``/metrics`` of a router.

    Args:
        servers: name -> role, and 1 if it is up.
        outcomes: of its requests.
        first_seconds: buckets of the time to the first token: upper bound -> number, cumulative.
    """
    prefix = "kvcached_nixl_router"
    lines = [f"# TYPE {prefix}_up gauge", f"# TYPE {prefix}_time_to_first_token_seconds histogram"]
    lines += [f"# TYPE {prefix}_{name}_total counter" for name in ("requests", "ejections", "retries", "handovers")]
    for name, (role, is_up) in servers.items():
        lines.append(f'{prefix}_up{{instance="{name}",role="{role}"}} {is_up}')
        lines.append(f'{prefix}_in_flight{{instance="{name}",role="{role}"}} 2.0')
    for outcome, value in (outcomes or {}).items():
        lines.append(f'{prefix}_requests_total{{outcome="{outcome}",route="/v1/completions"}} {value}')
    for bound, count in (first_seconds or {}).items():
        labels = f'le="{bound}",route="/v1/completions"'
        lines.append(f"{prefix}_time_to_first_token_seconds_bucket{{{labels}}} {count}")
    lines += [f"{prefix}_{name} {value}" for name, value in ({"waiting_requests": 0.0} | counters).items()]
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
        self.scheme = "http"
        self.host = HOST

    @property
    def name(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.name}"

    @contextmanager
    def running(self, certificate: tuple[str, str] | None = None) -> Iterator[MetricsServer]:
        """Serve while the block runs; with a certificate and its key over TLS."""
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
            address_family = socket.AF_INET6 if ":" in said.host else socket.AF_INET
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """A client that goes, or does not trust the certificate, is part of a test."""

        server = Http((self.host, self.port), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
            self.scheme = "https"
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

    def drip(self, handler: BaseHTTPRequestHandler) -> None:
        """Behaviour: a byte now and then, for ever."""
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        while not self.closing.wait(0.05):
            handler.wfile.write(b"x")
            handler.wfile.flush()

    def flood(self, handler: BaseHTTPRequestHandler) -> None:
        """Behaviour: an answer without an end, as fast as it is read."""
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        while not self.closing.is_set():
            handler.wfile.write(b"x" * (1 << 20))


def wait_until(condition: Callable[[], bool], words: str, most_seconds: float = 20.0) -> None:
    deadline = time.monotonic() + most_seconds
    while not condition():
        assert time.monotonic() < deadline, words
        time.sleep(0.01)
