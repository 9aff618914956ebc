# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP protocol with two more limits, and a workaround for a fault of its parser.

The limits are on the size of a request's head, and on the time it may take. uvicorn has neither with httptools, and it
keeps a connection open on which nothing is ever sent.

The fault: httptools skips the body of a request that offers another protocol (``Connection: Upgrade``), as if the rest
were of that protocol. Java's HTTP client offers HTTP/2 with each request, unless it is configured otherwise. A server
that does not accept the offer has to answer the request as HTTP/1.1.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["BoundedHttp"]

MOST_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30.0
_SAY_HOW_LONG = (b"content-length", b"transfer-encoding")


class BoundedHttp(HttpToolsProtocol):
    """See the module. A connection whose head breaks a limit is closed without an answer."""

    _head_bytes = 0
    _is_head = True
    _is_repeated = False
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.parser = _Parser(self)
        # Same setting as in uvicorn: answer a request with "Connection: close" even if more data follows it.
        with contextlib.suppress(AttributeError):
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    @property
    def passed_over(self) -> list[tuple[bytes, bytes]]:
        """The headers with the length of the body that the parser skipped; empty if it skipped none."""
        if not self.parser.should_upgrade():
            return []
        return [(name, value) for name, value in self.headers if name in _SAY_HOW_LONG]

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Within the block, ignore the parser's callbacks for the head: it is parsed a second time."""
        self._is_repeated = True
        try:
            yield
        finally:
            self._is_repeated = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._is_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_head and self._head_bytes > MOST_HEAD_BYTES:
            self.transport.close()

    def on_message_begin(self) -> None:
        if self._is_repeated:
            return
        super().on_message_begin()
        self._is_head, self._head_bytes = True, 0
        # abort, because close would wait for a client that does not read.
        self.scope["state"]["abort"] = self.transport.abort
        self.scope["state"]["is_closing"] = self.transport.is_closing
        self._wait_for_head()

    def on_url(self, url: bytes) -> None:
        if not self._is_repeated:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_repeated:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_repeated:
            return
        self._is_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.passed_over:
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Parser(httptools.HttpRequestParser):
    """Ignores offers of another protocol: parses the body of such a request, then the next request."""

    def __init__(self, protocol: BoundedHttp) -> None:
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        while True:
            try:
                super().feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                if headers := self._protocol.passed_over:
                    # Parse again with a minimal head that has only the length, so that the body is not skipped.
                    lines = b"".join(b"%s: %s\r\n" % one for one in headers)
                    with self._protocol.repeated():
                        super().feed_data(b"POST / HTTP/1.1\r\n" + lines + b"\r\n")
