# SPDX-License-Identifier: Apache-2.0
"""What httpcore sends and receives by, on asyncio itself. Once per connection.

httpcore's own goes through anyio, which loses a connection that is made while its request is given up. And it asks the
kernel whether anything has come on a connection that is kept; here that is known without asking.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable
from typing import Any, cast

import httpcore

from kvcached_nixl.proxy.guard import Guard

__all__ = ["Network"]

MOST_AHEAD_BYTES = 256 << 10
"""Of an answer that nobody has asked for yet; behind that the server has to wait."""


class Line(asyncio.Protocol, httpcore.AsyncNetworkStream):
    """One connection. One task reads, one writes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._heard = bytearray()
        self._is_over = False
        self._lost: Exception | None = None
        self._is_paused = False
        self._reading: asyncio.Future[None] | None = None
        self._may_write: asyncio.Future[None] | None = None

    # --------------------------------------------------------------------------------------------- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no asyncio.Transport by name.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._heard += data
        if len(self._heard) > MOST_AHEAD_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self._is_over = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        self._lost = exc
        self._wake()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._may_write = self._loop.create_future()

    def resume_writing(self) -> None:
        waiting, self._may_write = self._may_write, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    # -------------------------------------------------------------------------------------------- what httpcore calls

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """What has come; b"" at the end. Time limits are the caller's."""
        while not self._heard:
            if self._lost is not None:
                raise httpcore.ReadError(str(self._lost))
            if self._is_over:
                return b""
            self._reading = self._loop.create_future()
            try:
                await self._reading
            finally:
                self._reading = None
        found = bytes(self._heard[:max_bytes])
        del self._heard[:max_bytes]
        if self._is_paused and len(self._heard) <= MOST_AHEAD_BYTES and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return found

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._is_over or self._transport is None or self._transport.is_closing():
            raise httpcore.WriteError("the connection has ended")
        if buffer:
            self._transport.write(buffer)
        if self._may_write is not None:
            await self._may_write

    async def aclose(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        assert self._transport is not None
        with Guard() as guard:
            if timeout is not None:
                guard.limit(timeout, httpcore.ConnectTimeout())
            try:
                made = await self._loop.start_tls(self._transport, self, ssl_context, server_hostname=server_hostname)
            except (OSError, ssl.SSLError) as cause:
                raise httpcore.ConnectError(str(cause)) from cause
        assert made is not None
        self._transport = made
        return self

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            # Anything that comes unasked, or the end: whoever kept the connection must not use it.
            return bool(self._heard) or self._is_over
        return None if self._transport is None else self._transport.get_extra_info(info)

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)


class Network(httpcore.AsyncNetworkBackend):
    """Opens connections."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises `httpcore.ConnectError` or `httpcore.ConnectTimeout`."""
        line = Line()
        with Guard() as guard:
            if timeout is not None:
                guard.limit(timeout, httpcore.ConnectTimeout(f"not within {timeout:g} s"))
            try:
                transport, _ = await asyncio.get_running_loop().create_connection(lambda: line, host, port)
            except OSError as cause:
                raise httpcore.ConnectError(str(cause)) from cause
        found = transport.get_extra_info("socket")
        if found is not None:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return line

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
