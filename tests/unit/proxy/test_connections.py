# SPDX-License-Identifier: Apache-2.0
"""proxy/{http_connection,connections}.py: answers that are complete, truncated, late, unsolicited, or not HTTP."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvcached_nixl.proxy.connections import Connections, Reply
from kvcached_nixl.proxy.failure import LegFailed, RouterFailure

HOST = "127.0.0.1"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Type: a/b\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[Connections]:
    """Whatever ``handler`` does, once per connection; yields connections to it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, HOST, 0)
    port = listening.sockets[0].getsockname()[1]
    connections = Connections(f"{HOST}:{port}", f"http://{HOST}:{port}", 1.0)
    try:
        yield connections
    finally:
        connections.close()
        listening.close()
        await asyncio.sleep(0.01)


def saying(*answers: bytes, pause_seconds: float = 0.0) -> Handler:
    """One after the other, a piece at a time, each after a request; then the connection is closed."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            await asyncio.sleep(pause_seconds)

    return handler


async def ask(connections: Connections) -> tuple[Reply, bytes]:
    reply = await connections.ask("POST", "/x", [(b"A", b"b")])
    try:
        return reply, await reply.body(1 << 20)
    finally:
        reply.close()


@pytest.mark.parametrize("answer", [WHOLE, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE])
def test_a_connection_serves_one_request_after_the_other(answer: bytes) -> None:
    opened = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await saying(*[answer] * 5)(reader, writer)

    async def run() -> None:
        async with server(handler) as connections:
            for _ in range(5):
                reply, body = await ask(connections)
                assert (reply.status, body) == (200, b"hello")
            assert opened == 1
            # The sixth finds it closed, and opens another.
            await asyncio.sleep(0.05)
            assert (await ask(connections))[1] == b"hello" and opened == 2

    asyncio.run(run())


def test_an_answer_may_come_in_any_pieces() -> None:
    draw = random.Random(4)

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            rest = draw.choice([WHOLE, CHUNKED])
            while rest:
                size = draw.randrange(1, 40)
                writer.write(rest[:size])
                rest = rest[size:]
                await asyncio.sleep(0)

    async def run() -> None:
        async with server(handler) as connections:
            for _ in range(100):
                assert (await ask(connections))[1] == b"hello"

    asyncio.run(run())


def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    async def run() -> None:
        async with server(saying(b"HTTP/1.0 200 OK\r\nContent-Type: a/b\r\n\r\nhello")) as connections:
            for _ in range(2):
                assert (await ask(connections))[1] == b"hello"

    asyncio.run(run())


BROKEN = [
    b"",
    b"HTTP/1.1 200 OK\r\nContent-Le",
    b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello",
    CHUNKED[:-1],
    CHUNKED[:-7],
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"what is this\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000,
    b"HTTP/1.1 abc OK\r\n\r\n",
]


@pytest.mark.parametrize("answer", BROKEN, ids=lambda answer: repr(answer[:60]))
def test_an_answer_that_is_not_whole_is_none(answer: bytes) -> None:
    async def run() -> None:
        async with server(saying(answer)) as connections:
            with pytest.raises(LegFailed) as failed:
                await asyncio.wait_for(ask(connections), 10)
            assert failed.value.cause is RouterFailure.BROKEN

    asyncio.run(run())


@pytest.mark.parametrize(
    "more",
    [b"x", WHOLE, b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"],
    ids=["a byte", "another answer", "an error"],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_what_nobody_has_asked_for_is_never_the_next_one_s_answer(more: bytes, at_once: bool) -> None:
    """Else a client would have another's tokens."""
    served = 0
    may_go_on, has_said = asyncio.Event(), asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        await reader.readuntil(b"\r\n\r\n")
        served += 1
        said = WHOLE.replace(b"hello", f"say-{served}".encode())
        writer.write(said + more if at_once else said)
        await may_go_on.wait()
        if not at_once:
            writer.write(more)
            await writer.drain()
        has_said.set()
        await reader.read(1)

    async def run() -> None:
        async with server(handler) as connections:
            for turn in (1, 2, 3):
                may_go_on.clear()
                has_said.clear()
                reply, body = await ask(connections)
                assert (reply.status, body) == (200, f"say-{turn}".encode())
                may_go_on.set()
                await has_said.wait()
                # It is on this side's socket; now the loop has to look there.
                await asyncio.sleep(0.02)

    asyncio.run(run())


def test_nothing_is_read_ahead_without_bounds() -> None:
    """A server whose answer nobody takes has to wait."""
    written = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
            written += 65536

    async def run() -> None:
        async with server(handler) as connections:
            reply = await connections.ask("POST", "/x", [])
            pieces = reply.pieces()
            assert await anext(pieces)
            before = -1
            while written != before:
                before = written
                await asyncio.sleep(0.2)
            assert written < 64 << 20
            assert len(await anext(pieces)) < 2 << 20
            await pieces.aclose()
            reply.close()

    asyncio.run(run())


def test_a_request_that_is_given_up_ends_its_connection() -> None:
    """At any point of it; the server sees the end, and the connection is nobody's."""
    arrived: asyncio.Queue[None] = asyncio.Queue()
    seen: asyncio.Queue[bytes] = asyncio.Queue()
    turns = itertools.count()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if next(turns) % 2:
            writer.write(CHUNKED[:60])
        arrived.put_nowait(None)
        seen.put_nowait(await reader.read(1))

    async def run() -> None:
        async with server(handler) as connections:
            for _ in range(4):
                asking = asyncio.create_task(ask(connections))
                await arrived.get()
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                assert await seen.get() == b""

    asyncio.run(run())


def test_nobody_there_is_not_delivered() -> None:
    async def run() -> None:
        connections = Connections("x:1", f"http://{HOST}:1", 1.0)
        with pytest.raises(LegFailed) as failed:
            await connections.ask("GET", "/", [])
        assert failed.value.cause is RouterFailure.UNREACHABLE

    asyncio.run(run())


# Of a connection whose handshake fails, asyncio leaves a part open: the transport in 3.10, the writer in 3.13.
@pytest.mark.filterwarnings("ignore:.*(_SSLProtocolTransport|StreamWriter).*:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_servers_may_be_behind_tls_and_are_not_believed_without_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = str(tmp_path / "key"), str(tmp_path / "certificate")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    more = ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate]
    subprocess.run([*command, *more], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def run() -> None:
        listening = await asyncio.start_server(saying(WHOLE, CHUNKED), HOST, 0, ssl=context)
        port = listening.sockets[0].getsockname()[1]
        for is_trusted in (False, True):
            if is_trusted:
                monkeypatch.setenv("SSL_CERT_FILE", certificate)
            connections = Connections(f"localhost:{port}", f"https://localhost:{port}", 5.0)
            if is_trusted:
                assert [(await ask(connections))[1] for _ in range(2)] == [b"hello"] * 2
            else:
                with pytest.raises(LegFailed) as failed:
                    await ask(connections)
                assert failed.value.cause is RouterFailure.UNREACHABLE
            connections.close()
        listening.close()

    asyncio.run(run())
