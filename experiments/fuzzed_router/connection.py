# SPDX-License-Identifier: Apache-2.0
"""Sends raw bytes over one connection: no HTTP client library sends data that is not HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from experiments.common.servers import HOST
from experiments.fuzzed_router.messages import Case

__all__ = ["exchange"]


async def exchange(port: int, case: Case, seconds: float) -> bytes:
    """Send a case over a new connection, and return all bytes received until the connection ends.

    Raises:
        asyncio.TimeoutError: the connection does not end in time.
        OSError: no connection could be made.
    """
    return await asyncio.wait_for(_exchange(port, case), seconds)


async def _exchange(port: int, case: Case) -> bytes:
    loop = asyncio.get_running_loop()
    heard = bytearray()
    with socket.socket() as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, (HOST, port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A server that refuses early may stop reading, so sending may fail; its answer is received even so.
        with contextlib.suppress(ConnectionError):
            for piece in case.pieces:
                await loop.sock_sendall(connection, piece)
                await asyncio.sleep(0)
            if case.half_closes:
                connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while piece := await loop.sock_recv(connection, 1 << 16):
                heard += piece
    return bytes(heard)
