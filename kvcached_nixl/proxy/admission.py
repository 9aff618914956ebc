# SPDX-License-Identifier: Apache-2.0
"""Which requests may start: prefill computes nothing that decode has no room for. Once per process.

A request waits here, in the order of arrival, while decode servers together have as much to do as
``--decode-fill`` times what they can hold. What they have to do is what they said last (`kind.Capacity`), corrected by
the prompts that this router has sent to them and seen end since, and by those on their way through prefill. Where a
server does not say it, there is no limit.

Who would wait longer than ``--queue-timeout`` is refused at once, with the time after which it is worth trying again,
by the rate at which prompts have ended lately.
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
from kvcached_nixl.proxy.kind import Capacity

__all__ = ["Admission"]

RATE_SECONDS = 30.0
"""Over how long the rate is measured at which prompts end."""
MOST_RETRY_SECONDS = 600
_FULL = "Decode has no room for this prompt: {ahead} tokens wait before it. Try again."


class Admission:
    """See the module's docstring. Used on the event loop only.

    Args:
        fill: how much decode servers may have to do at most, relative to what they can hold; 0: no limit.
        most_wait_seconds: longest time that a request waits.
        said: returns what all usable decode servers have to do and can hold, together; None if one does not say it.

    Attributes:
        pending_tokens: of prompts that have started and are not at decode yet.
    """

    def __init__(self, fill: float, most_wait_seconds: float, said: Callable[[], Capacity | None]) -> None:
        self._fill = fill
        self._most_wait_seconds = most_wait_seconds
        self._said = said
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._ended: deque[tuple[float, int]] = deque()
        self._admitted = 0
        self.pending_tokens = 0

    @property
    def waiting_tokens(self) -> int:
        """Of the prompts that wait."""
        return sum(tokens for tokens, _ in self._waiting)

    @asynccontextmanager
    async def admitted(self, tokens: int, *, waits: bool = True) -> AsyncIterator[None]:
        """Waits until a prompt of so many tokens may start, and counts it until the block is left.

        Args:
            waits: whether it waits at all.

        Raises:
            Refusal: 503; it would wait too long.
        """
        if waits:
            await self._enter(tokens)
        self._admitted += 1
        self.pending_tokens += tokens
        try:
            yield
        finally:
            self._admitted -= 1
            self.pending_tokens -= tokens
            self._ended.append((time.monotonic(), tokens))
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
        while self._waiting and self._has_room(self._waiting[0][0]):
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                # It counts itself only when its task runs.
                return

    def _has_room(self, tokens: int) -> bool:
        said = self._said() if self._fill else None
        # One request alone may be larger than everything.
        if said is None or not self._admitted:
            return True
        return said.demand_tokens + self.pending_tokens + tokens <= self._fill * said.tokens

    async def _enter(self, tokens: int) -> None:
        if not self._waiting and self._has_room(tokens):
            return
        wait_seconds = self._wait_seconds(tokens)
        if wait_seconds > self._most_wait_seconds:
            raise self._refusal(wait_seconds)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (tokens, future)
        self._waiting.append(place)
        try:
            with anyio.move_on_after(self._most_wait_seconds):
                await future
                return
            raise self._refusal(self._wait_seconds(tokens))
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
            # The next one may be smaller, or this one has taken no place after all.
            asyncio.get_running_loop().call_soon(self.look)

    def _wait_seconds(self, tokens: int) -> float:
        """How long a prompt would wait at the end of the queue; 0 if that is not known."""
        now = time.monotonic()
        while self._ended and self._ended[0][0] < now - RATE_SECONDS:
            self._ended.popleft()
        ended_tokens = sum(count for _, count in self._ended)
        if not ended_tokens:
            return 0.0
        rate = ended_tokens / max(1.0, now - self._ended[0][0])
        return (self.waiting_tokens + tokens) / rate

    def _refusal(self, wait_seconds: float) -> Refusal:
        seconds = min(MOST_RETRY_SECONDS, max(1, math.ceil(wait_seconds)))
        message = _FULL.format(ahead=self.waiting_tokens)
        return Refusal(503, RouterFailure.FULL, message, retry_after_seconds=seconds)
