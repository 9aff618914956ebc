# SPDX-License-Identifier: Apache-2.0
"""One connection, on which anything may be said: no library for clients sends what is no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from experiments.common.servers import HOST
from experiments.fuzzed_router.messages import Case

__all__ = ["exchange"]


async def exchange(port: int, case: Case, seconds: float) -> bytes:
    """All that one connection hears until it ends.

    Raises:
        asyncio.TimeoutError: it does not end.
        OSError: there is no connection.
    """
    return await asyncio.wait_for(_exchange(port, case), seconds)


async def _exchange(port: int, case: Case) -> bytes:
    loop = asyncio.get_running_loop()
    heard = bytearray()
    with socket.socket() as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, (HOST, port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Who refuses early need not read on; what it has said is heard all the same.
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
