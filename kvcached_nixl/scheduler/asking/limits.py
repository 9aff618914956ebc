# SPDX-License-Identifier: Apache-2.0
"""Limits of asking: how much is asked for at a time, and how long requests wait for that. Used on the engine's thread
only.
"""

from __future__ import annotations

import math

from kvcached_nixl.deadlines import Clock, Deadlines
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed

__all__ = ["QueueLimit", "Window"]

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
