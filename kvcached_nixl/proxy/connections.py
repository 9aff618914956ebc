# SPDX-License-Identifier: Apache-2.0
"""HTTP client for one server: a connection pool, requests, responses in pieces. Once per server.

The pool reuses the most recently used connection first, so that the connections of a burst expire after the burst.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator
from urllib.parse import urlsplit

from kvcached_nixl.proxy.cancel_scope import Guard
from kvcached_nixl.proxy.failure import LegFailed, RouterFailure
from kvcached_nixl.proxy.http_connection import Line, LineEnded

__all__ = ["Connections", "Reply"]

KEPT_SECONDS = 2.0
"""How long an idle connection is kept. Less than the 5 s of uvicorn and vLLM: sending a request on a connection that
the server is about to close would cost an attempt."""
MOST_KEPT = 1024


class Reply:
    """A server's response. Always `close` it; closing before the end of the body makes the server abort the request.

    Attributes:
        status: HTTP status.
        content_type: the header's value, unchanged; empty if there was none.
        is_plain: the body is not compressed. The router never asks for compression.
    """

    def __init__(self, owner: Connections, line: Line) -> None:
        self._owner = owner
        self._line = line
        self.status = line.status
        self.content_type = line.headers.get(b"content-type", b"")
        self.is_plain = line.headers.get(b"content-encoding", b"identity").lower() == b"identity"

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of server-sent events."""
        return self.content_type.lower().startswith(b"text/event-stream")

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yields the body as it arrives, with backpressure: no more is buffered than `http_connection` allows.

        Raises:
            LegFailed: the connection ended before the body did.
        """
        try:
            while piece := await self._line.piece():
                yield piece
        except LineEnded as error:
            raise self._owner.broken(error) from error

    async def body(self, limit_bytes: int) -> bytes:
        """Returns the whole body.

        Raises:
            LegFailed: the body is longer than the limit, or the connection ended before its end.
        """
        parts: list[bytes] = []
        size = 0
        async for piece in self.pieces():
            size += len(piece)
            if size > limit_bytes:
                reason = f"its response is longer than {limit_bytes} bytes"
                raise LegFailed(RouterFailure.ANSWER, self._owner.name, reason, is_retriable=False)
            parts.append(piece)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Return the connection to the pool, or abort it if the response is incomplete or has an error status.

        vLLM 0.19 raises an exception in its web server after it has sent an error response, which closes the
        connection. The next request on that connection would be lost.
        """
        if self.status < 400:
            self._owner.take_back(self._line)
        else:
            self._line.abort()


class Connections:
    """See the module.

    Args:
        name: of the server, for the Host header and error texts.
        url: scheme, host and port of the server.
    """

    def __init__(self, name: str, url: str, connect_timeout_seconds: float) -> None:
        parts = urlsplit(url)
        self.name = name
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._head = f"Host: {name}\r\nAccept-Encoding: identity\r\nContent-Length: ".encode()
        self._connect_seconds = connect_timeout_seconds
        self._kept: deque[tuple[float, Line]] = deque()
        self._is_closed = False

    async def ask(self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes = b"") -> Reply:
        """Send a request and wait for the head of the response. The caller limits the time.

        Args:
            path: chosen by the router, never by a client; it is sent without escaping.
            headers: must not contain line ends; they are sent without a check.

        Raises:
            LegFailed: no connection could be opened, or the connection ended.
        """
        lines = b"".join(b"%s: %s\r\n" % one for one in headers)
        head = f"{method} {path} HTTP/1.1\r\n".encode("ascii") + self._head
        request = b"%s%d\r\n%s\r\n%s" % (head, len(body), lines, body)
        line = self._take() or await self._connect()
        try:
            line.send(request)
            await line.head()
        except LineEnded as error:
            raise self.broken(error) from error
        except BaseException:
            line.abort()
            raise
        return Reply(self, line)

    def broken(self, cause: LineEnded) -> LegFailed:
        """Returns the failure of a leg whose connection ended."""
        return LegFailed(RouterFailure.BROKEN, self.name, f"the connection ended: {cause}"[:200])

    def take_back(self, line: Line) -> None:
        """Keep a connection whose response was read to the end; abort any other."""
        if line.is_idle and not self._is_closed and len(self._kept) < MOST_KEPT:
            self._kept.append((time.monotonic(), line))
            self._end_old()
        else:
            line.abort()

    def close(self) -> None:
        """Close the idle connections; those in use are closed when their responses are."""
        self._is_closed = True
        while self._kept:
            self._kept.pop()[1].abort()

    def _end_old(self) -> None:
        """Close expired connections. The deque is sorted by age, oldest first, so only the expired ones are visited."""
        limit = time.monotonic() - KEPT_SECONDS
        while self._kept and self._kept[0][0] < limit:
            self._kept.popleft()[1].abort()

    def _take(self) -> Line | None:
        self._end_old()
        while self._kept:
            line = self._kept.pop()[1]
            if line.is_idle:
                return line
            line.abort()
        return None

    async def _connect(self) -> Line:
        late = LegFailed(RouterFailure.UNREACHABLE, self.name, f"no connection within {self._connect_seconds:g} s")
        line = Line()
        with Guard() as guard:
            guard.limit(self._connect_seconds, late)
            try:
                await asyncio.get_running_loop().create_connection(lambda: line, self._host, self._port, ssl=self._ssl)
            except OSError as error:
                reason = f"no connection: {type(error).__name__} {error.errno or ''}".rstrip()
                raise LegFailed(RouterFailure.UNREACHABLE, self.name, reason) from error
        return line
