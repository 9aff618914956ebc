# SPDX-License-Identifier: Apache-2.0
"""aiohttp's HTTP server, with a limit on connections. Once per process.

aiohttp closes connections on which no whole head arrives in time, and limits the number and size of headers and
trailers. Added here: the number and the memory of connections, and that a client's leaving is seen behind pipelined
requests.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from kvcached_nixl.proxy.account import Account
from kvcached_nixl.proxy.failure import error_body
from kvcached_nixl.proxy.options import Options

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

    def __init__(self, handler: Handler, account: Account, options: Options) -> None:
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
        self._most = options.max_connections
        self._closing_seconds = options.client_timeout_seconds
        self._transports: dict[Any, asyncio.Transport] = {}
        self._idle: OrderedDict[web.RequestHandler, None] = OrderedDict()
        self.connected = 0

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._transports[handler] = transport
        self.connected += 1
        self._account.hold(MOST_HEAD_BYTES)
        is_local = transport.get_extra_info("socket").family == socket.AF_UNIX
        if not is_local and (self.connected > self._most or self._account.is_overdrawn):
            if not self._idle:
                transport.write(_NO_ROOM)
                handler.force_close()
                return
            self._idle.popitem(last=False)[0].force_close()
        self._idle[handler] = None

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._transports.pop(handler, None)
        self.connected -= 1
        self._account.hold(-MOST_HEAD_BYTES)
        self._idle.pop(handler, None)

    def closing(self, handler: Any) -> None:
        """Give a client some time to read what is sent, then close its connection in any case."""
        transport = self._transports.get(handler)
        if transport is not None and transport.get_write_buffer_size():
            self._loop.call_later(self._closing_seconds, transport.abort)

    def busy(self, handler: Any) -> None:
        """Count a connection as one that works."""
        self._idle.pop(handler, None)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = cast(_Connection, request.protocol)
        self.busy(connection)
        try:
            response = await self._handler(request)
            if not response.keep_alive:
                self.closing(connection)
            return response
        finally:
            if request.transport is not None and not connection.has_more:
                self._idle[connection] = None


class _Connection(web.RequestHandler):
    __slots__ = ("_head_bytes",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._head_bytes = 0
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        is_waiting = self._waiter is not None and not self._waiter.done()
        self._head_bytes = self._head_bytes + len(data) if is_waiting else 0
        super().data_received(data)
        if self._messages and self._manager is not None:
            self._listener.busy(self)
        # Where reading pauses behind a request that is worked on, nothing would say that the client has left.
        pipelined = len(self._messages) - (not self._request_in_progress)
        is_blind = pipelined > 0 and (self._reading_paused or self._buffer_paused)
        if is_blind or pipelined > MOST_PIPELINED or (self._head_bytes > MOST_HEAD_BYTES and not self._messages):
            self.force_close()

    @property
    def has_more(self) -> bool:
        """Whether another request waits behind the one that is worked on."""
        return bool(self._messages)

    @property
    def _listener(self) -> Listener:
        assert isinstance(self._manager, Listener)
        return self._manager

    def force_close(self) -> None:
        """Close the connection. What is not sent yet may keep it open for a while, but not for ever."""
        if self._manager is not None:
            self._listener.closing(self)
        super().force_close()

    async def _drain_helper(self) -> None:
        # aiohttp 3.14 keeps the future of a drain that was cancelled, and the next drain would end with it.
        if self._drain_waiter is not None and self._drain_waiter.done():
            self._drain_waiter = None
        await super()._drain_helper()

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
