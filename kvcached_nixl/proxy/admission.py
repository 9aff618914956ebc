# SPDX-License-Identifier: Apache-2.0
"""Which requests may start: prefill computes nothing that decode has no room for. Once per process.

A request waits here, in the order of arrival, while the decode servers have no room for it beside the prompts that are
on their way through prefill. A server has room while it has less to do than ``--decode-fill`` times what it can hold
(`Instance.room_tokens`). Where one does not say it, there is no limit.

Who would wait longer than ``--queue-timeout`` is refused at once, with the time after which it is worth trying again,
by the rate at which prompts have ended lately while others waited. What ends while nobody waits only says how much was
asked for.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio

from kvcached_nixl.proxy.failure import Refusal, RouterFailure
from kvcached_nixl.proxy.instance import Instance

__all__ = ["Admission"]

RATE_SECONDS = 30.0
"""Over how long the rate is measured at which prompts end. After as long without a queue it is not known any more."""
MOST_RETRY_SECONDS = 600
_FULL = "Decode has no room for this prompt: {ahead} tokens wait before it. Try again."


class Admission:
    """See the module's docstring. Used on the event loop only.

    Args:
        most_wait_seconds: longest time that a request waits.
        room_tokens: returns how many tokens of prompts the usable decode servers may still get, together.

    Attributes:
        pending_tokens: of prompts that have started and are not at decode yet.
        waiting_tokens: of the prompts that wait.
    """

    def __init__(self, most_wait_seconds: float, room_tokens: Callable[[], float]) -> None:
        self._most_wait_seconds = most_wait_seconds
        self._room_tokens = room_tokens
        # In the order of arrival; the tokens of each.
        self._waiting: dict[asyncio.Future[None], int] = {}
        self._ended: deque[tuple[float, int]] = deque()
        # How long anybody has waited, in all, and since when it is so now.
        self._queued_seconds = self._measured_from_seconds = 0.0
        self._queued_since_seconds: float | None = None
        self._queued_until_seconds = -math.inf
        self._admitted = 0
        self.pending_tokens = 0
        self.waiting_tokens = 0

    @property
    def waiting_requests(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def admitted(self, tokens: int, *, waits: bool = True, follows: bool = False) -> AsyncIterator[None]:
        """Waits until a prompt of so many tokens may start, and counts it until the block is left.

        Args:
            waits: whether it waits at all.
            follows: another one of the same request came before it, and was not refused. It waits for as long as it
                takes: to end after a part of the request has been computed would waste that, each time it is tried.

        Raises:
            Refusal: 503; it would wait too long.
        """
        if waits:
            await self._enter(tokens, math.inf if follows else self._most_wait_seconds)
        else:
            self._count(1, tokens)
        try:
            yield
        finally:
            self._count(-1, tokens)
            if self._waiting:
                self._ended.append((self._queue_clock(), tokens))
            self.look()

    @contextmanager
    def at_decode(self, server: Instance, tokens: int) -> Iterator[None]:
        """Counts a prompt as one that a decode server has, until the block is left."""
        self.pending_tokens -= tokens
        server.sent_tokens += tokens
        try:
            yield
        finally:
            server.sent_tokens -= tokens
            self.pending_tokens += tokens

    def look(self) -> None:
        """Lets those start for whom there is room."""
        while self._waiting:
            future = next(iter(self._waiting))
            tokens = self._waiting[future]
            if not self._has_room(tokens):
                return
            self._left(future)
            if not future.done():
                # Now, not when its task runs: others may end before that.
                self._count(1, tokens)
                future.set_result(None)

    def _count(self, sign: int, tokens: int) -> None:
        self._admitted += sign
        self.pending_tokens += sign * tokens

    def _has_room(self, tokens: int) -> bool:
        # One request alone may be larger than everything.
        return not self._admitted or self.pending_tokens + tokens <= self._room_tokens()

    def _joined(self, future: asyncio.Future[None], tokens: int) -> None:
        if not self._waiting:
            now = self._queued_since_seconds = time.monotonic()
            if now - self._queued_until_seconds > RATE_SECONDS:
                self._ended.clear()
                self._measured_from_seconds = self._queued_seconds
        self._waiting[future] = tokens
        self.waiting_tokens += tokens

    def _left(self, future: asyncio.Future[None]) -> None:
        if future not in self._waiting:
            return
        self.waiting_tokens -= self._waiting.pop(future)
        if not self._waiting:
            self._queued_seconds = self._queue_clock()
            self._queued_since_seconds, self._queued_until_seconds = None, time.monotonic()

    def _queue_clock(self) -> float:
        """Seconds in which anybody has waited."""
        since = self._queued_since_seconds
        return self._queued_seconds + (0.0 if since is None else time.monotonic() - since)

    async def _enter(self, tokens: int, most_seconds: float) -> None:
        """Returns when the prompt is let in, and counted."""
        if not self._waiting and self._has_room(tokens):
            self._count(1, tokens)
            return
        wait_seconds = self._wait_seconds(tokens)
        if wait_seconds > most_seconds:
            raise self._refusal(wait_seconds)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._joined(future, tokens)
        try:
            with anyio.move_on_after(most_seconds):
                await future
                return
            self._left(future)
            # Nothing has ended: it takes at least as long as this.
            raise self._refusal(self._wait_seconds(tokens) or most_seconds)
        except BaseException:
            if future.done() and not future.cancelled():
                # It was let in as it left.
                self._count(-1, tokens)
            raise
        finally:
            self._left(future)
            # The next one may be smaller, or this one has taken no place after all.
            asyncio.get_running_loop().call_soon(self.look)

    def _wait_seconds(self, tokens: int) -> float:
        """How long a prompt would wait at the end of the queue; 0 if that is not known."""
        now = self._queue_clock()
        begin_seconds = max(now - RATE_SECONDS, self._measured_from_seconds)
        while self._ended and self._ended[0][0] < begin_seconds:
            self._ended.popleft()
        ended_tokens = sum(count for _, count in self._ended)
        if not ended_tokens:
            return 0.0
        rate = ended_tokens / max(1.0, now - begin_seconds)
        return (self.waiting_tokens + tokens) / rate

    def _refusal(self, wait_seconds: float) -> Refusal:
        seconds = min(MOST_RETRY_SECONDS, max(1, math.ceil(wait_seconds)))
        message = _FULL.format(ahead=self.waiting_tokens)
        return Refusal(503, RouterFailure.FULL, message, retry_after_seconds=seconds)
