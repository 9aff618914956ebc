# SPDX-License-Identifier: Apache-2.0
"""Sends raw bytes over one connection: no HTTP client library sends data that is not HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

from experiments.common.servers import HOST
from experiments.fuzzed_router.messages import Case

__all__ = ["exchange", "idling"]

IDLE_PAUSE_SECONDS = 0.1


SLOW_BUFFER_BYTES, SLOW_BYTES, SLOW_SECONDS = 2048, 64, 0.002


@contextlib.asynccontextmanager
async def idling(ports: Sequence[int], count: int) -> AsyncIterator[None]:
    """Hold ``count`` connections to each port on which nothing, or half a head, is sent. A closed one is renewed."""

    async def idle(port: int, number: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(HOST, port)
                try:
                    writer.write(b"POST /v1/completions HTTP/1.1\r\nHo"[: 3 * (number % 12)])
                    await reader.read()
                finally:
                    writer.close()
            await asyncio.sleep(IDLE_PAUSE_SECONDS)

    tasks = [asyncio.create_task(idle(port, number)) for port in ports for number in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
        if case.reads_slowly:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
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
            while piece := await loop.sock_recv(connection, SLOW_BYTES if case.reads_slowly else 1 << 16):
                heard += piece
                await asyncio.sleep(SLOW_SECONDS if case.reads_slowly else 0)
    return bytes(heard)
