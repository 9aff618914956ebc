# SPDX-License-Identifier: Apache-2.0
"""proxy/upstream.py: answers that are complete, truncated, late, unsolicited or not HTTP; slow names."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import resource
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver

from kvcached_nixl.proxy.failure import LegFailed, RouterFailure
from kvcached_nixl.proxy.upstream import RememberingResolver, Reply, Upstream

HOST = "127.0.0.1"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Type: a/b\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"


class Server:
    """One server as the router sees it."""

    def __init__(self, upstream: Upstream, url: str) -> None:
        self._upstream = upstream
        self._url = url

    def asking(self) -> AbstractAsyncContextManager[Reply]:
        return self._upstream.ask("POST", f"{self._url}/x", "the-server", {"A": "b"})

    async def ask(self) -> tuple[int, bytes]:
        """Returns status and body of a whole answer."""
        async with self.asking() as reply:
            return reply.status, await reply.body(1 << 20)


@asynccontextmanager
async def before(url: str, connect_seconds: float = 1.0) -> AsyncIterator[Server]:
    upstream = Upstream(connect_seconds, 60.0)
    try:
        yield Server(upstream, url)
    finally:
        await upstream.close()


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[Server]:
    """Whatever ``handler`` does, once per connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, HOST, 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        async with before(f"http://{HOST}:{port}") as found:
            yield found
    finally:
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


@pytest.mark.parametrize("answer", [WHOLE, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE])
def test_a_connection_serves_one_request_after_the_other(answer: bytes) -> None:
    opened = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await saying(*[answer] * 5)(reader, writer)

    async def run() -> None:
        async with server(handler) as it:
            for _ in range(5):
                found = await it.ask()
                assert found == (200, b"hello")
            assert opened == 1
            # The sixth finds it closed, and opens another.
            await asyncio.sleep(0.05)
            assert (await it.ask())[1] == b"hello" and opened == 2

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
        async with server(handler) as it:
            for _ in range(100):
                assert (await it.ask())[1] == b"hello"

    asyncio.run(run())


def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    async def run() -> None:
        async with server(saying(b"HTTP/1.0 200 OK\r\nContent-Type: a/b\r\n\r\nhello")) as it:
            for _ in range(2):
                assert (await it.ask())[1] == b"hello"

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
        async with server(saying(answer)) as it:
            with pytest.raises(LegFailed) as failed:
                await asyncio.wait_for(it.ask(), 10)
            assert failed.value.cause is RouterFailure.BROKEN

    asyncio.run(run())


@pytest.mark.parametrize(
    "more",
    [
        WHOLE,
        b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx",
        b"x" + WHOLE,
    ],
    ids=["another answer", "an error", "half an answer", "an answer behind a byte"],
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
        async with server(handler) as it:
            for turn in (1, 2, 3):
                may_go_on.clear()
                has_said.clear()
                # What cannot be told from the answer itself may cost it, but is never the next one's.
                with contextlib.suppress(LegFailed) if at_once and more.startswith(b"x") else contextlib.nullcontext():
                    assert await it.ask() == (200, f"say-{turn}".encode())
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
        async with server(handler) as it, it.asking() as reply:
            assert await reply.piece()
            before = -1
            while written != before:
                before = written
                await asyncio.sleep(0.2)
            assert written < 64 << 20
            assert len(await reply.piece()) < 2 << 20

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
        async with server(handler) as it:
            for _ in range(4):
                asking = asyncio.create_task(it.ask())
                await arrived.get()
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                assert await seen.get() == b""

    asyncio.run(run())


def test_nobody_there_is_not_delivered() -> None:
    async def run() -> None:
        async with before(f"http://{HOST}:1") as it:
            with pytest.raises(LegFailed) as failed:
                await it.ask()
            assert failed.value.cause is RouterFailure.UNREACHABLE and not failed.value.is_delivered

    asyncio.run(run())


def test_a_server_whose_queue_is_full_may_only_be_slow() -> None:
    """The kernel drops what its backlog has no room for, so no connection is made, and none is refused."""

    async def run() -> None:
        with socket.socket() as full:
            full.bind((HOST, 0))
            full.listen(0)
            url = f"http://{HOST}:{full.getsockname()[1]}"
            waiting = [asyncio.ensure_future(asyncio.open_connection(*full.getsockname())) for _ in range(4)]
            await asyncio.sleep(0.2)
            async with before(url, 0.3) as it:
                with pytest.raises(LegFailed) as failed:
                    await it.ask()
            assert failed.value.cause is RouterFailure.CONNECT and not failed.value.is_delivered
            for one in waiting:
                one.cancel()
            for made in await asyncio.gather(*waiting, return_exceptions=True):
                if not isinstance(made, BaseException):
                    made[1].close()

    asyncio.run(run())


def test_that_this_host_has_no_descriptors_left_is_not_the_server_s_fault() -> None:
    async def run() -> None:
        async with server(saying(WHOLE)) as it:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            taken = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
            try:
                with contextlib.suppress(OSError):
                    while True:
                        taken.append(os.open("/dev/null", os.O_RDONLY))
                with pytest.raises(LegFailed) as failed:
                    await it.ask()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for one in taken:
                    os.close(one)
            assert failed.value.cause is RouterFailure.LOCAL
            assert await it.ask() == (200, b"hello")

    asyncio.run(run())


@pytest.mark.parametrize("at_once", [True, False], ids=["in one piece", "in two"])
def test_the_connection_of_an_error_is_not_used_again(at_once: bool) -> None:
    """A server may close it after the answer, and the next request would be lost."""
    opened = 0
    head, body = b"HTTP/1.1 400 No\r\nContent-Length: 2\r\n\r\n", b"no"

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head + body if at_once else head)
            if not at_once:
                await asyncio.sleep(0.05)
                writer.write(body)

    async def run() -> None:
        async with server(handler) as it:
            for turn in range(1, 4):
                assert await it.ask() == (400, b"no") and opened == turn

    asyncio.run(run())


class SlowNames(ThreadedResolver):
    """Names that are looked up as a test wants it."""

    def __init__(self) -> None:
        self.answers: list[list[ResolveResult] | OSError | None] = []

    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> list[ResolveResult]:
        answer = self.answers.pop(0)
        if answer is None:
            await asyncio.sleep(3600)
        if isinstance(answer, OSError):
            raise answer
        return answer or []


def test_a_name_that_was_known_is_known_where_lookups_fail_or_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcached_nixl.proxy.upstream.LOOKUP_SECONDS", 0.05)

    async def run() -> None:
        names = SlowNames()
        resolver = RememberingResolver(names)
        names.answers.append(OSError("no such name"))
        with pytest.raises(OSError, match="no such"):
            await resolver.resolve("a", 1)
        one, other = address("10.0.0.1"), address("10.0.0.2")
        names.answers += [one, OSError("temporary failure"), other, None]
        assert await resolver.resolve("a", 1) == one
        assert await resolver.resolve("a", 1) == one
        assert await resolver.resolve("a", 1) == other
        assert await resolver.resolve("a", 1) == other
        # The lookup that stands still is the only one that runs.
        assert await resolver.resolve("a", 1) == other and not names.answers
        await resolver.close()

    asyncio.run(run())


def test_a_name_that_is_gone_for_long_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server may have its address by then: it would get prompts, and the router's key."""

    async def run() -> None:
        names = SlowNames()
        resolver = RememberingResolver(names)
        gone, one = socket.gaierror(socket.EAI_NONAME, "no such name"), address("10.0.0.1")
        busy = socket.gaierror(socket.EAI_AGAIN, "temporary failure")
        monkeypatch.setattr("kvcached_nixl.proxy.upstream.FORGET_SECONDS", 0.2)
        names.answers += [one, gone, one, gone, busy]
        for _ in range(3):
            assert await resolver.resolve("a", 1) == one
        await asyncio.sleep(0.25)
        assert await resolver.resolve("a", 1) == one, "it was there in between"
        await asyncio.sleep(0.25)
        assert await resolver.resolve("a", 1) == one, "nobody has said that it is gone"
        names.answers += [gone, one]
        with pytest.raises(OSError, match="no such"):
            await resolver.resolve("a", 1)
        assert await resolver.resolve("a", 1) == one
        await resolver.close()

    asyncio.run(run())


def address(host: str) -> list[ResolveResult]:
    return [ResolveResult(hostname="a", host=host, port=1, family=socket.AF_INET, proto=0, flags=0)]


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
            async with before(f"https://localhost:{port}", 5.0) as it:
                if is_trusted:
                    assert [(await it.ask())[1] for _ in range(2)] == [b"hello"] * 2
                else:
                    with pytest.raises(LegFailed) as failed:
                        await it.ask()
                    assert failed.value.cause is RouterFailure.UNREACHABLE
        listening.close()

    asyncio.run(run())
