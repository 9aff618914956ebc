# SPDX-License-Identifier: Apache-2.0
"""HTTP client for the servers: one aiohttp session, with a connection pool, per router."""

from __future__ import annotations

import asyncio
import errno
import io
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from kvcached_nixl.proxy.failure import LegFailed, RouterFailure

__all__ = ["RememberingResolver", "Reply", "Upstream"]

KEPT_SECONDS = 2.0
"""How long an idle connection is kept. Less than the 5 s of uvicorn and vLLM: sending a request on a connection that
the server is about to close would cost an attempt."""
READ_AHEAD_BYTES = 128 << 10
MOST_HEADER_BYTES = 16 << 10
LOOKUP_SECONDS = 2.0
FORGET_SECONDS = 300.0
"""How long a name may be said not to exist before its addresses are forgotten: another server may have them by then.
Before, it may be back soon, and Kubernetes says so of a pod that ends its last requests."""
_NO_SUCH_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
_UNUSABLE = re.compile(r"[^ -~]")
_NO_HOST_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
# A host that is gone without a word is found by the kernel, so that no leg waits for its own limit.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class Reply:
    """A server's response. Leaving `Upstream.ask` before the end of the body makes the server abort the request.

    Attributes:
        status: HTTP status.
        content_type: the header's value; empty if there was none. Without what no header may have: aiohttp refuses to
            send on what it has read.
        retry_after: the header's value; empty if there was none.
        is_plain: the body is not compressed. The router never asks for compression.
    """

    def __init__(self, server: str, response: aiohttp.ClientResponse) -> None:
        self._server = server
        self._content = response.content
        headers = response.headers
        self.status = response.status
        self.content_type = _UNUSABLE.sub("", headers.get("content-type", ""))
        self.retry_after = headers.get("retry-after", "")
        self.is_plain = headers.get("content-encoding", "identity").lower() == "identity"

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of server-sent events."""
        return self.content_type.lower().startswith("text/event-stream")

    async def piece(self) -> bytes:
        """Returns the part of the body received since the last call, waiting for at least a byte; b"" at the end.

        Raises:
            LegFailed: the connection ended before the body did.
        """
        try:
            return await self._content.readany()
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            # RuntimeError: the connection was lost before the reader waits.
            raise broken(self._server, error) from error

    async def body(self, limit_bytes: int, take: Callable[[int], None] = lambda size_bytes: None) -> bytes:
        """Returns the whole body.

        Args:
            take: reserves memory for each piece and its copy, and may refuse it (`Share.take`).

        Raises:
            LegFailed: the body is longer than the limit, or the connection ended before its end.
        """
        parts: list[bytes] = []
        size = 0
        while piece := await self.piece():
            size += len(piece)
            if size > limit_bytes:
                reason = f"its response is longer than {limit_bytes} bytes"
                raise LegFailed(RouterFailure.ANSWER, self._server, reason, is_retriable=False)
            # Twice, because the pieces are joined.
            take(2 * len(piece))
            parts.append(piece)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Upstream:
    """See the module. Create and close it on the event loop.

    Args:
        connect_timeout_seconds: to look a name up and to open a connection.
        unresponsive_timeout_seconds: how long a server may leave sent data without an acknowledgement.
    """

    def __init__(self, connect_timeout_seconds: float, unresponsive_timeout_seconds: float) -> None:
        self._connect_seconds = connect_timeout_seconds
        self._resolver = RememberingResolver(ThreadedResolver())
        connector = aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=KEPT_SECONDS,
            resolver=self._resolver,
            use_dns_cache=False,
            socket_factory=partial(_socket, unresponsive_timeout_seconds),
            ssl=ssl.create_default_context(),
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept"),
            headers={"Accept-Encoding": "identity"},
            read_bufsize=READ_AHEAD_BYTES,
            max_line_size=MOST_HEADER_BYTES,
            max_field_size=MOST_HEADER_BYTES,
            # The guard of a leg limits everything but the connection.
            timeout=aiohttp.ClientTimeout(
                total=None, connect=connect_timeout_seconds, sock_connect=connect_timeout_seconds
            ),
            request_class=_Request,
            response_class=_Response,
        )

    async def close(self) -> None:
        await self._session.close()
        await self._resolver.close()

    @asynccontextmanager
    async def ask(
        self, method: str, url: str, server: str, headers: Mapping[str, str], body: bytes = b""
    ) -> AsyncIterator[Reply]:
        """Send a request and wait for the head of the response. The caller limits the time.

        Args:
            url: scheme, host, port and path.
            server: its name, for errors.

        Raises:
            LegFailed: no connection could be opened, or the connection ended.
        """
        try:
            response = await self._send(method, url, headers, body)
        except aiohttp.ConnectionTimeoutError as error:
            reason = f"no connection within {self._connect_seconds:g} s"
            raise LegFailed(RouterFailure.CONNECT, server, reason, status=503) from error
        except aiohttp.ClientConnectorError as error:
            raise _unreachable(server, error.os_error) from error
        except (aiohttp.ClientError, OSError) as error:
            raise broken(server, error) from error
        try:
            yield Reply(server, response)
        finally:
            _end(response)

    async def _send(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> aiohttp.ClientResponse:
        while True:
            # Of a BytesIO aiohttp writes a piece at a time, so that a large body does not hold the event loop.
            data = io.BytesIO(body) if body else None
            try:
                return await self._session.request(method, url, data=data, headers=headers, allow_redirects=False)
            except _StaleConnection:
                # Closed now, and nothing was sent on it.
                continue


class _StaleConnection(Exception):
    """A connection of the pool on which the server has sent something that nobody asked for."""


class _Request(aiohttp.ClientRequest):
    """Never sent on a connection that has data: aiohttp 3.14 would take it for the response, which may be another's."""

    async def send(self, conn: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
        if conn.protocol is None or conn.protocol.should_close:
            raise _StaleConnection
        return await super().send(conn)


class _Response(aiohttp.ClientResponse):
    """Never reuses the connection of an error response.

    A web server may raise an exception after it has sent an error response, and close the connection. The next request
    on that connection would be lost.
    """

    async def start(self, connection: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
        protocol = connection.protocol
        await super().start(connection)
        if protocol is not None:
            _end_with(protocol, self.content)
        if self.status >= 400 and protocol is not None:
            protocol.force_close()
            if self.connection is None:
                # It is in the pool already, because head and body came at once.
                protocol.close()
        return self


def _end_with(protocol: aiohttp.client_proto.ResponseHandler, content: aiohttp.StreamReader) -> None:
    """End a body with its connection: aiohttp 3.14 does not wake the reader of one whose chunks are malformed."""
    closed = protocol.closed
    if closed is None or content.is_eof():
        return

    def end(done: asyncio.Future[None]) -> None:
        if not done.cancelled():
            done.exception()
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the connection was closed in the middle of the response"))

    closed.add_done_callback(end)

    def has_ended() -> None:
        closed.remove_done_callback(end)

    content.on_eof(has_ended)


def _end(response: aiohttp.ClientResponse) -> None:
    """Return the connection to the pool if the response was read to its end; abort it otherwise."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        # close() would wait until a server that does not read has read all of the request.
        connection.transport.abort()
    response.close()


def broken(server: str, error: Exception) -> LegFailed:
    """Returns the failure of a leg whose connection ended."""
    return LegFailed(RouterFailure.BROKEN, server, f"the connection ended: {type(error).__name__} {error}"[:200])


def _unreachable(server: str, error: OSError) -> LegFailed:
    if error.errno in _NO_HOST_LEFT:
        reason = f"this host has no room for another connection: {errno.errorcode[error.errno or 0]}"
        return LegFailed(RouterFailure.LOCAL, server, reason, status=503)
    reason = f"no connection: {type(error).__name__} {error.errno or ''}".rstrip()
    return LegFailed(RouterFailure.UNREACHABLE, server, reason)


def _socket(unresponsive_timeout_seconds: float, address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*_KEEP_ALIVE, ("TCP_USER_TIMEOUT", int(1000 * unresponsive_timeout_seconds))):
        if (option := getattr(socket, name, None)) is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


class RememberingResolver(AbstractResolver):
    """Looks names up, and uses the last addresses where a lookup fails or takes long.

    A resolver that stands still must not cost requests to servers whose address is known.
    """

    def __init__(self, resolver: AbstractResolver) -> None:
        self._resolver = resolver
        self._known: dict[tuple[str, int, int], list[ResolveResult]] = {}
        self._gone_since_seconds: dict[tuple[str, int, int], float] = {}
        self._lookups: dict[tuple[str, int, int], asyncio.Task[list[ResolveResult]]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Returns the addresses of a host. One lookup of a name runs at a time.

        Raises:
            OSError: the name has no address, and never had one, or has had none for `FORGET_SECONDS`.
        """
        key = (host, port, int(family))
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = asyncio.ensure_future(self._lookup(host, port, family))
            lookup.add_done_callback(lambda done: self._ended(key, done))
        known = self._known.get(key)
        await asyncio.wait({lookup}, timeout=LOOKUP_SECONDS if known else None)
        known = self._known.get(key)
        if lookup.done() and (known is None or lookup.exception() is None):
            return lookup.result()
        return known or []

    async def _lookup(self, host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
        try:
            return await self._resolver.resolve(host, port, family)
        except UnicodeError as error:
            raise OSError(f"{host!r} is no name: {error}") from error

    def _ended(self, key: tuple[str, int, int], lookup: asyncio.Task[list[ResolveResult]]) -> None:
        del self._lookups[key]
        if lookup.cancelled():
            return
        error = lookup.exception()
        if error is None:
            self._known[key] = lookup.result()
            self._gone_since_seconds.pop(key, None)
        elif isinstance(error, socket.gaierror) and error.errno in _NO_SUCH_NAME:
            since_seconds = self._gone_since_seconds.setdefault(key, time.monotonic())
            if time.monotonic() - since_seconds >= FORGET_SECONDS:
                self._known.pop(key, None)

    async def close(self) -> None:
        for lookup in tuple(self._lookups.values()):
            lookup.cancel()
