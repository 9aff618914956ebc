# SPDX-License-Identifier: Apache-2.0
"""HTTP to one server: connections that are kept, a request, its answer in pieces. Once per server.

The connection that was used last is taken first, so that what is kept for a burst runs out when the burst is over.
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
"""Below uvicorn's and vLLM's five: a connection that the server is about to close would cost an attempt."""
MOST_KEPT = 1024


class Reply:
    """What a server answers. `close` it, whatever happens: before its end that makes the server stop.

    Attributes:
        status: of HTTP.
        content_type: as it came; empty if there was none.
        is_plain: the body is not compressed, which nobody has asked for.
    """

    def __init__(self, owner: Connections, line: Line) -> None:
        self._owner = owner
        self._line = line
        self.status = line.status
        self.content_type = line.headers.get(b"content-type", b"")
        self.is_plain = line.headers.get(b"content-encoding", b"identity").lower() == b"identity"

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events."""
        return self.content_type.lower().startswith(b"text/event-stream")

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body, as it comes, and no more of it than somebody takes.

        Raises:
            LegFailed: the connection ended before the body did.
        """
        try:
            while piece := await self._line.piece():
                yield piece
        except LineEnded as error:
            raise self._owner.broken(error) from error

    async def body(self, limit_bytes: int) -> bytes:
        """All of it.

        Raises:
            LegFailed: it is longer than the limit, or ended too soon.
        """
        parts: list[bytes] = []
        size = 0
        async for piece in self.pieces():
            size += len(piece)
            if size > limit_bytes:
                reason = f"its answer is longer than {limit_bytes} bytes"
                raise LegFailed(RouterFailure.ANSWER, self._owner.name, reason, is_retriable=False)
            parts.append(piece)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Give the connection back, or end it where the answer has not ended, or was an error.

        vLLM 0.19 raises through its web server after it has answered that way, and the connection is closed behind the
        answer: whoever was given it next would lose a request.
        """
        if self.status < 400:
            self._owner.take_back(self._line)
        else:
            self._line.abort()


class Connections:
    """See the module.

    Args:
        name: of the server, for errors.
        url: its scheme, host and port.
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
        """Send a request and wait for the head of the answer; the caller limits the time.

        Args:
            path: of the router's own making, never a client's.
            headers: values as a server has parsed them: without line ends.

        Raises:
            LegFailed: there is no connection, or it ended.
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
        """What a connection that ended is."""
        return LegFailed(RouterFailure.BROKEN, self.name, f"the connection has ended: {cause}"[:200])

    def take_back(self, line: Line) -> None:
        """Keep a connection whose answer was read to the end; end any other."""
        if line.is_idle and not self._is_closed and len(self._kept) < MOST_KEPT:
            self._kept.append((time.monotonic(), line))
            self._end_old()
        else:
            line.abort()

    def close(self) -> None:
        """End the connections that are kept; those in use end with their answers."""
        self._is_closed = True
        while self._kept:
            self._kept.pop()[1].abort()

    def _end_old(self) -> None:
        """The oldest lie at the other end, so each is looked at once."""
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
