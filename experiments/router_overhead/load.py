# SPDX-License-Identifier: Apache-2.0
"""Streams of requests with little cost of their own: raw sockets, and answers are read only to find their end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles

HOST = "127.0.0.1"
_BODY = json.dumps({"model": "m", "prompt": "some words " * 200, "max_tokens": 16, "stream": True}).encode()


def request(body: bytes = _BODY) -> bytes:
    """Return a request of about 2 KB."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@dataclass
class Seen:
    """Times of one arm with one number of streams, in seconds."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    failed: int = 0
    wall_seconds: float = 0.0

    def summary(self) -> dict[str, float]:
        """Return counts, requests a second, and percentiles in milliseconds."""

        def at(times: Sequence[float], percent: int) -> float:
            return 1000 * (quantiles(times, n=100)[percent - 1] if len(times) > 1 else (times or [0.0])[0])

        return {
            "requests": len(self.whole),
            "failed": self.failed,
            "per_second": len(self.whole) / self.wall_seconds,
            **{f"first_p{p}_ms": at(self.first, p) for p in (50, 99)},
            **{f"whole_p{p}_ms": at(self.whole, p) for p in (50, 99)},
        }


class Connection:
    """One keep-alive connection, opened on first use."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, sent: bytes) -> float:
        """Send a request and read the whole answer. Returns when the body began; with a Content-Length, when it ended.

        Raises:
            ConnectionError: the status is not 200, or the answer is incomplete.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(HOST, self._port)
        reader, writer = self._streams
        writer.write(sent)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            await self.close()
            raise ConnectionError(head[:80])
        lower = head.lower()
        if b"content-length:" in lower:
            length = int(lower.partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            return time.perf_counter()
        began, last = 0.0, b""
        while not last.endswith(b"\r\n0\r\n\r\n"):
            piece = await reader.read(65536)
            if not piece:
                raise ConnectionError("the connection ended before the answer was complete")
            began = began or time.perf_counter()
            last = (last + piece)[-512:]
        if b"[DONE]" not in last:
            raise ConnectionError("the stream ended without [DONE]")
        return began

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def stream(ports: Sequence[int], seen: Seen, ends_at: float, period_seconds: float, late: float) -> None:
    """Send requests one after another until ``ends_at``: at once after each answer, or every ``period_seconds``.

    Args:
        ports: each request goes to all ports in turn; times are from the first port's request to the last one's answer.
    """
    connections = [Connection(port) for port in ports]
    sent = request()
    await asyncio.sleep(late)
    due = time.perf_counter()
    while time.perf_counter() < ends_at:
        begun = time.perf_counter()
        try:
            for one in connections:
                began = await one.ask(sent)
        except (ConnectionError, asyncio.IncompleteReadError):
            seen.failed += 1
            await asyncio.gather(*(one.close() for one in connections))
        else:
            now = time.perf_counter()
            seen.first.append(began - begun)
            seen.whole.append(now - begun)
        if period_seconds:
            due = max(due + period_seconds, time.perf_counter() - period_seconds)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
    await asyncio.gather(*(one.close() for one in connections))


async def load(ports: Sequence[int], streams: int, seconds: float, per_second: float = 0.0) -> Seen:
    """Run ``streams`` streams for ``seconds``. With ``per_second``, all together send that many requests, evenly."""
    seen = Seen()
    period = streams / per_second if per_second else 0.0
    begun = time.perf_counter()
    await asyncio.gather(
        *(stream(ports, seen, begun + seconds, period, period * place / streams) for place in range(streams))
    )
    seen.wall_seconds = time.perf_counter() - begun
    return seen
