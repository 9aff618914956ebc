# SPDX-License-Identifier: Apache-2.0
"""GET of ``/metrics``: bounded in time, in bytes read and in bytes kept. Keys and cookies are never sent."""

from __future__ import annotations

import asyncio
import errno
import os
import time

import aiohttp

from kvcached_nixl.cli.top.columns import ROUTER, wanted_lines
from kvcached_nixl.cli.top.look import Look, read_series
from kvcached_nixl.cli.top.target import printable

__all__ = ["TIMEOUT_SECONDS", "Scraper", "Unanswered"]

TIMEOUT_SECONDS = 5.0
MOST_BODY_BYTES = 16 << 20
MOST_LINE_BYTES = 4 << 10
MOST_KEPT_BYTES = 1 << 20
"""Of the lines of one answer that are parsed, which can take a microsecond a byte. 1024 servers of a router need 300
kB."""
MOST_CONNECTIONS = 512
_PIECE_BYTES = 64 << 10
_WANTED = wanted_lines()
_HEADERS = (("Accept", "text/plain"), ("Accept-Encoding", "identity"), ("User-Agent", "kvcached-nixl-top"))


class Unanswered(Exception):
    """A server did not answer with metrics; the text says what happened instead."""


class Scraper:
    """Asks servers, any number at once. Use it as an async context manager.

    Args:
        timeout_seconds: for one whole answer.
    """

    def __init__(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds

    async def __aenter__(self) -> Scraper:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MOST_CONNECTIONS),
            timeout=aiohttp.ClientTimeout(total=self._timeout_seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def look(self, url: str) -> Look:
        """Ask one server.

        Raises:
            Unanswered: no connection, no answer in time, or an answer that is not metrics of an engine or a router.
        """
        try:
            async with self._session.get(url, allow_redirects=False) as answer:
                if answer.status != 200:
                    where = answer.headers.get("Location")
                    more = f", to {printable(where)[:80]}" if where else ""
                    raise Unanswered(f"HTTP status {answer.status}{more}")
                encoding = answer.headers.get("Content-Encoding", "identity")
                if encoding != "identity":
                    raise Unanswered(f"encoded as {printable(encoding)[:40]}, which was not asked for")
                kept = await self._read(answer.content)
                kind = printable(answer.content_type)[:40]
        except asyncio.TimeoutError as error:
            raise Unanswered(f"no whole answer within {self._timeout_seconds:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unanswered(_why(error)) from error
        lines, unread = kept.lines()
        series, unreadable = read_series(lines)
        if not series:
            raise Unanswered(f"the answer ({kind}) has no metrics of vLLM or of this router")
        is_router = any(name.startswith(ROUTER) for name in series)
        return Look(time.monotonic(), series, is_router, unread + unreadable)

    @staticmethod
    async def _read(content: aiohttp.StreamReader) -> _Kept:
        kept, read_bytes = _Kept(), 0
        while piece := await content.read(_PIECE_BYTES):
            read_bytes += len(piece)
            if read_bytes > MOST_BODY_BYTES:
                raise Unanswered(f"the answer is larger than {MOST_BODY_BYTES >> 20} MiB")
            kept.feed(piece)
        kept.feed(b"\n")
        return kept


class _Kept:
    """The wanted lines of an answer that comes in pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []
        self._kept_bytes = 0
        self._dropped = 0

    def feed(self, piece: bytes) -> None:
        whole, newline, rest = (self._rest + piece).rpartition(b"\n")
        # The beginning of a line that is too long suffices to see that it is.
        self._rest = rest[: MOST_LINE_BYTES + 1]
        if not newline:
            return
        for line in _WANTED.findall(whole):
            if len(line) > MOST_LINE_BYTES or self._kept_bytes + len(line) > MOST_KEPT_BYTES:
                self._dropped += 1
            else:
                self._lines.append(line)
                self._kept_bytes += len(line)

    def lines(self) -> tuple[list[str], int]:
        """The lines, and how many were dropped."""
        return [line.decode("utf-8", "replace") for line in self._lines], self._dropped


def _why(error: Exception) -> str:
    """What went wrong, in a few words."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "no such host"
    if isinstance(error, (aiohttp.ClientConnectorCertificateError, aiohttp.ClientSSLError)):
        return f"TLS: {printable(str(error.args[-1]))[:120]}"
    if isinstance(error, OSError) and error.errno is not None:
        known = errno.errorcode.get(error.errno)
        return os.strerror(error.errno).lower() if known else printable(str(error))[:120]
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the connection was closed without an answer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the answer ended too early"
    if isinstance(error, aiohttp.ClientResponseError):
        return "the answer is not HTTP"
    return f"{type(error).__name__}: {printable(str(error))[:120]}"
