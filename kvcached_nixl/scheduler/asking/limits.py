# SPDX-License-Identifier: Apache-2.0
"""Limits of asking: how much is asked for at a time, how long requests wait for that, and how much is computed here
meanwhile. Used on the engine's thread only.
"""

from __future__ import annotations

import heapq
import math

from kvcached_nixl.deadlines import Clock, Deadlines
from kvcached_nixl.scheduler.engine import BlockPool, Request
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed

__all__ = ["LocalPrefills", "QueueLimit", "Window"]

AHEAD = 0.5
"""Fraction of all blocks that prefill computes ahead of what is free."""


class Window:
    """How much decode asks for at a time: prompts that will find room when their KV can be fetched.

    Prompts are asked for as long as those that have no blocks yet fit into what is free, and half of all blocks more:
    while prefill computes them, others end here. With what is free alone, prefill stands still in the meantime. At
    least one prompt is always asked for.

    Attributes:
        num_promised: blocks that those need which were asked for and have none yet.
    """

    def __init__(self) -> None:
        self._promised: dict[str, int] = {}
        self.num_promised = 0

    def has_room(self, num_blocks: int, num_free: int, num_used: int, most_requests: int) -> bool:
        """Whether a prompt of so many blocks may be asked for.

        Args:
            num_free, num_used: blocks.
            most_requests: of those that were asked for and have no blocks yet.
        """
        if not self._promised:
            return True
        room = num_free + AHEAD * (num_free + num_used)
        return len(self._promised) < most_requests and self.num_promised + num_blocks <= room

    def promise(self, request_id: str, num_blocks: int) -> None:
        """A request is asked for that will need so many blocks."""
        self.settle(request_id)
        self._promised[request_id] = num_blocks
        self.num_promised += num_blocks

    def settle(self, request_id: str) -> None:
        """A request has its blocks, or will not get what was asked for."""
        self.num_promised -= self._promised.pop(request_id, 0)


LONGEST_RETRY_SECONDS = 60


class QueueLimit:
    """How long requests may wait to be asked for (``queue_timeout``), and when those that are refused may try again.

    What counts is the time in which nobody is asked for a request, also between two questions. A client is told to come
    again after as long as requests wait now: as the last one that was asked for has waited, or longer, if nobody was
    asked for since.

    Args:
        timeout_seconds: infinity for no limit.
    """

    def __init__(self, clock: Clock, timeout_seconds: float) -> None:
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._deadlines = Deadlines[str]()
        # How long those that are asked for have waited, or were asked for.
        self._waited_seconds: dict[str, float] = {}
        self._last_wait_seconds = 0.0
        # Since then somebody waits, and nobody was asked for.
        self._since_seconds = 0.0

    @property
    def due_at_seconds(self) -> float | None:
        """When the next request has waited for too long; None if none waits."""
        return self._deadlines.first_seconds

    def waits(self, request_id: str) -> None:
        """A request begins to wait."""
        if self._timeout_seconds < math.inf:
            now = self._clock.now_seconds()
            if not self._deadlines:
                self._since_seconds = now
            self._deadlines[request_id] = now + self._timeout_seconds - self._waited_seconds.pop(request_id, 0.0)

    def asked(self, request_id: str) -> None:
        """It is asked for."""
        deadline_seconds = self._deadlines.pop(request_id, None)
        if deadline_seconds is not None:
            self._since_seconds = self._clock.now_seconds()
            self._last_wait_seconds = self._since_seconds - (deadline_seconds - self._timeout_seconds)
            self._waited_seconds[request_id] = self._last_wait_seconds

    def gone(self, request_id: str) -> None:
        """It has ended."""
        self._deadlines.pop(request_id, None)
        self._waited_seconds.pop(request_id, None)

    def take_late(self) -> list[str]:
        """Returns those that have waited for too long."""
        return self._deadlines.take_due(self._clock.now_seconds())

    def refusal(self) -> HandOverFailed:
        """What they are refused with."""
        waits_seconds = max(self._last_wait_seconds, self._clock.now_seconds() - self._since_seconds)
        return HandOverFailed(
            FailureCause.QUEUE_TIMEOUT,
            f"no prefill server could be asked for it within {self._timeout_seconds:g} s (queue_timeout)",
            retry_after_seconds=min(max(1, math.ceil(waits_seconds)), LONGEST_RETRY_SECONDS),
        )


class LocalPrefills:
    """Prompts that decode computes because no prefill server gives their KV, or because that is sooner.

    Few begin at a time, so that running streams keep their pace: together they have at most as many tokens as a step
    computes of one of them while others run; one prompt may have more.

    Args:
        most_tokens: of such prompts that a step computes while other requests run.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        # Requests that wait, with those that have ended meanwhile.
        self._queue: list[tuple[tuple[int, int], str]] = []
        # Requests that wait -> tokens to compute; and those that may begin, with their prompts' tokens.
        self._waiting: dict[str, tuple[int, int]] = {}
        self._begun: dict[str, tuple[int, int]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether any prompt is computed or waits."""
        return bool(self._begun or self._waiting)

    @property
    def num_tokens(self) -> int:
        """Tokens that are to be computed."""
        return sum(num_tokens for of in (self._waiting, self._begun) for num_tokens, _ in of.values())

    def add(self, request: Request, order: tuple[int, int], num_tokens: int) -> None:
        """A held request is to be computed here, or to fail.

        Args:
            order: its place among all that were ever held.
            num_tokens: to compute.
        """
        self._waiting[request.request_id] = num_tokens, request.num_prompt_tokens
        heapq.heappush(self._queue, (order, request.request_id))

    def computed(self, request_id: str, num_computed_tokens: int) -> None:
        """A step computes a request up to this token."""
        if request_id in self._begun and num_computed_tokens >= self._begun[request_id][1]:
            del self._begun[request_id]

    def gone(self, request_id: str) -> None:
        """A request has ended."""
        self._begun.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def turn(self, blocks: BlockPool) -> bool:
        """Lets the next ones begin. Called before each step. Returns whether there are any."""
        num_begun = len(self._begun)
        while self._queue:
            _, request_id = self._queue[0]
            num_tokens, _ = self._waiting.get(request_id, (0, 0))
            num_begun_tokens = sum(one for one, _ in self._begun.values())
            if num_tokens and self._begun and num_begun_tokens + num_tokens > self._most_tokens:
                break
            heapq.heappop(self._queue)
            if num_tokens:
                self._begun[request_id] = self._waiting.pop(request_id)
                blocks.release(request_id, None)
        blocks.limit_chunks(self._most_tokens if self._begun else 0)
        return len(self._begun) > num_begun
