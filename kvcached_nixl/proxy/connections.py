# SPDX-License-Identifier: Apache-2.0
"""HTTP to one server: connections that are kept, a request, its answer in pieces. Once per server.

httpcore, the library under httpx, does the protocol. Its pool looks at every connection for every request; here the one
that was used last is taken, which is all that a single server needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import httpcore

from kvcached_nixl.proxy.failure import Cause, LegFailed
from kvcached_nixl.proxy.network import Network

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

    def __init__(
        self, owner: Connections, connection: httpcore.AsyncHTTPConnection, response: httpcore.Response
    ) -> None:
        self._owner = owner
        self._connection = connection
        self._response = response
        self.status = response.status
        headers = {name.lower(): value for name, value in response.headers}
        self.content_type = headers.get(b"content-type", b"")
        self.is_plain = headers.get(b"content-encoding", b"identity").lower() == b"identity"

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events."""
        return self.content_type.lower().startswith(b"text/event-stream")

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body, as it comes. No more than one piece is read ahead.

        Raises:
            LegFailed: the connection ended before the body did.
        """
        try:
            async for piece in self._response.aiter_stream():
                yield piece
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as cause:
            raise self._owner.broken(cause) from cause

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
                raise LegFailed(
                    Cause.ANSWER, self._owner.name, f"its answer is longer than {limit_bytes} bytes", is_retriable=False
                )
            parts.append(piece)
        return b"".join(parts)

    async def close(self) -> None:
        """Give the connection back, or end it where the answer has not ended."""
        await self._response.aclose()
        await self._owner.take_back(self._connection)


class Connections:
    """See the module.

    Args:
        name: of the server, for errors.
        url: its scheme, host and port.
    """

    def __init__(self, name: str, url: str, connect_seconds: float) -> None:
        self.name = name
        self._origin = httpcore.URL(url)
        self._host = self._host_header()
        self._kept: deque[httpcore.AsyncHTTPConnection] = deque()
        self._is_closed = False
        self._timeouts = {"connect": connect_seconds}
        self._network = Network()

    async def ask(self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes = b"") -> Reply:
        """Send a request and wait for the head of the answer; the caller limits the time.

        Args:
            path: of the router's own making, never a client's.

        Raises:
            LegFailed: there is no connection, or it ended.
        """
        url = httpcore.URL(
            scheme=self._origin.scheme, host=self._origin.host, port=self._origin.port, target=path.encode("ascii")
        )
        request = httpcore.Request(
            method,
            url,
            headers=[
                (b"Host", self._host),
                (b"Accept-Encoding", b"identity"),
                (b"Content-Length", str(len(body)).encode()),
                *headers,
            ],
            content=body,
            extensions={"timeout": self._timeouts},
        )
        connection = await self._take()
        try:
            response = await connection.handle_async_request(request)
        except (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.UnsupportedProtocol, OSError) as cause:
            raise LegFailed(Cause.UNREACHABLE, self.name, f"no connection: {_words(cause)}", status=502) from cause
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as cause:
            raise self.broken(cause) from cause
        return Reply(self, connection, response)

    def broken(self, cause: Exception) -> LegFailed:
        """What a connection that ended is."""
        return LegFailed(Cause.BROKEN, self.name, f"the connection ended: {_words(cause)}")

    async def take_back(self, connection: httpcore.AsyncHTTPConnection) -> None:
        """Keep a connection whose answer was read to the end."""
        if connection.is_idle() and not self._is_closed and len(self._kept) < MOST_KEPT:
            self._kept.append(connection)
        else:
            await connection.aclose()

    async def close(self) -> None:
        """End the connections that are kept; those in use end with their answers."""
        self._is_closed = True
        while self._kept:
            await self._kept.pop().aclose()

    async def _take(self) -> httpcore.AsyncHTTPConnection:
        while self._kept:
            connection = self._kept.pop()
            if connection.is_idle() and not connection.has_expired():
                return connection
            await connection.aclose()
        return httpcore.AsyncHTTPConnection(
            self._origin.origin, keepalive_expiry=KEPT_SECONDS, network_backend=self._network
        )

    def _host_header(self) -> bytes:
        host, port = self._origin.host, self._origin.port
        shown = b"[" + host + b"]" if b":" in host else host
        return shown if port is None else shown + b":" + str(port).encode()


def _words(cause: Any) -> str:
    return f"{type(cause).__name__} {cause}".strip()[:200]
