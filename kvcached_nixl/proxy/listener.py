# SPDX-License-Identifier: Apache-2.0
"""aiohttp's HTTP server, with a limit on connections. Once per process.

aiohttp closes connections on which no whole head arrives in time, and limits the number and size of headers and
trailers. Added here: the number and the memory of connections, and that a client's leaving is seen behind pipelined
requests.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from kvcached_nixl.proxy.account import Account
from kvcached_nixl.proxy.failure import error_body

__all__ = ["Listener"]

IDLE_SECONDS = 65.0
"""Longer than clients and load balancers usually keep a connection, so that they close it first."""
MOST_HEADERS = 64
MOST_HEADER_BYTES = 8 << 10
MOST_HEAD_BYTES = 64 << 10
MOST_PIPELINED = 8
LINGER_SECONDS = 1.0
"""How long the rest of a refused body is read, so that the client sees the refusal."""
_FULL = error_body(503, "All connections that the router may have are in use (--max-connections). Try again.")
_NO_ROOM = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
_NO_ROOM += b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_FULL), _FULL)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Listener(web.Server):
    """See the module. Where all connections are in use, the one that has been idle longest gives way to a new one.

    Args:
        handler: is cancelled when the client closes its connection.
        account: of the router's memory.
    """

    def __init__(self, handler: Handler, account: Account, max_connections: int) -> None:
        super().__init__(
            self._handle,
            handler_cancellation=True,
            keepalive_timeout=IDLE_SECONDS,
            access_log=None,
            max_line_size=MOST_HEADER_BYTES,
            max_field_size=MOST_HEADER_BYTES,
            max_headers=MOST_HEADERS,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,
        )
        self._handler = handler
        self._account = account
        self._most = max_connections
        self._idle: OrderedDict[web.RequestHandler, None] = OrderedDict()
        self.connected = 0

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.connected += 1
        self._account.hold(MOST_HEAD_BYTES)
        if self.connected > self._most or self._account.is_overdrawn:
            if not self._idle:
                transport.write(_NO_ROOM)
                handler.force_close()
                return
            self._idle.popitem(last=False)[0].force_close()
        self._idle[handler] = None

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.connected -= 1
        self._account.hold(-MOST_HEAD_BYTES)
        self._idle.pop(handler, None)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        self._idle.pop(connection, None)
        try:
            return await self._handler(request)
        finally:
            if request.transport is not None:
                self._idle[connection] = None


class _Connection(web.RequestHandler):
    __slots__ = ("_head_bytes",)

    def data_received(self, data: bytes) -> None:
        is_waiting = self._waiter is not None and not self._waiter.done()
        self._head_bytes = getattr(self, "_head_bytes", 0) + len(data) if is_waiting else 0
        super().data_received(data)
        # Else reading would pause, and nothing would say that the client has left.
        has_too_many = len(self._messages) > MOST_PIPELINED
        if has_too_many or (self._head_bytes > MOST_HEAD_BYTES and not self._messages):
            self.force_close()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Returns the answer to a request that is not HTTP, or whose handler failed."""
        if isinstance(exc, ConnectionError):
            # The client has left; aiohttp ends the connection.
            raise exc
        if status >= 500:
            self.log_exception("Error in the router, answering %s", request.path, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the response is sent already")
        if isinstance(exc, LineTooLong):
            status = 431
        text = "Internal error in the router." if status >= 500 else f"The request is not valid HTTP: {message}"[:200]
        response = web.Response(status=status, body=error_body(status, text), content_type="application/json")
        response.force_close()
        return response
