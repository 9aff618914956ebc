# SPDX-License-Identifier: Apache-2.0
"""One HTTP connection to a server: one request and its response at a time. Parsed by httptools, as in uvicorn.

Data that arrives while the caller is busy is joined into one piece, so a slow reader costs less per event.
Data that arrives when no response is expected makes the connection unusable: it would be taken for the next response.
"""

from __future__ import annotations

import asyncio
from typing import cast

import httptools

__all__ = ["Line", "LineEnded"]

MOST_AHEAD_BYTES = 256 << 10
"""Of a response body that the caller has not read. Above it the connection stops reading, so the server has to wait."""
MOST_HEAD_BYTES = 64 << 10


class LineEnded(Exception):
    """The connection ended before the response was complete, or the data is not HTTP."""


class Line(asyncio.Protocol):
    """See the module. Use it from one task at a time.

    Attributes:
        status: of the response, once `head` has returned.
        headers: of the response, names in lower case; if a name is repeated, its last value.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._body = bytearray()
        self._head_bytes = 0
        self._has_head = self._is_done = self._is_paused = self._ends_with_line = False
        self._keeps_alive = False
        self._failure = ""
        self.status = 0
        self.headers: dict[bytes, bytes] = {}

    # ------------------------------------------------------------------------------------------------ for the caller

    @property
    def is_idle(self) -> bool:
        """Whether another request can be sent on this connection."""
        transport = self._transport
        is_open = transport is not None and not transport.is_closing() and not self._failure
        return is_open and (self._parser is None or (self._is_done and self._keeps_alive and not self._body))

    def send(self, request: bytes) -> None:
        """Send a whole request. Does not wait: a server may respond before it has read all of it."""
        assert self.is_idle and self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._has_head = self._is_done = self._ends_with_line = False
        self._head_bytes = self.status = 0
        self.headers = {}
        self._transport.write(request)

    async def head(self) -> None:
        """Wait for status and headers.

        Raises:
            LineEnded: the connection ended before them.
        """
        while not self._has_head:
            await self._wait()

    async def piece(self) -> bytes:
        """Returns the part of the body received since the last call, waiting for at least a byte; b"" at the end.

        Raises:
            LineEnded: the connection ended before the body did.
        """
        while not self._body:
            if self._is_done:
                return b""
            await self._wait()
        found, self._body = bytes(self._body), bytearray()
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return found

    def abort(self) -> None:
        """Close the connection at once, without sending what is still buffered."""
        self._fail("the router closed it")

    async def _wait(self) -> None:
        if self._failure:
            raise LineEnded(self._failure)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # ----------------------------------------------------------------------------------------------------- of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._is_done:
            self._fail("the server sent data that does not belong to a response")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server sent data that is not HTTP: {type(error).__name__}")
            return
        if not self._has_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._fail("the head of the response is too large")
        if len(self._body) > MOST_AHEAD_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self._over("the server closed it")

    def connection_lost(self, exc: Exception | None) -> None:
        self._over("the server closed it" if exc is None else f"{type(exc).__name__}: {exc}")

    def _over(self, reason: str) -> None:
        if self._has_head and self._ends_with_line and not self._is_done:
            self._is_done = True
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._keeps_alive = False
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --------------------------------------------------------------------------------------------------- of httptools

    def on_message_begin(self) -> None:
        if self._is_done:
            # A second response in the same read as the end of the first one.
            self._failure = self._failure or "the server sent data that does not belong to a response"

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_done:
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._is_done or self._parser is None:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self.headers = {}
            return
        self.status = status
        self._has_head = True
        self._keeps_alive = self._parser.should_keep_alive()
        # A response without a length ends when the connection does.
        self._ends_with_line = not (b"content-length" in self.headers or b"transfer-encoding" in self.headers)

    def on_body(self, body: bytes) -> None:
        if not self._is_done:
            self._body += body

    def on_message_complete(self) -> None:
        self._is_done = self._has_head
