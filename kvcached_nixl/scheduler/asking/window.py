# SPDX-License-Identifier: Apache-2.0
"""How much decode asks for at a time: prompts that will find room when their KV can be fetched.

Room is what is free now, without what was promised to those that were asked for and have no blocks yet, and what
requests that end have freed of late, in the time from asking until the answer. At least one prompt is always asked for.
"""

from __future__ import annotations

import math

from kvcached_nixl.clock import Clock

__all__ = ["Window"]

SPAN_SECONDS = 10.0
"""What was freed so long ago counts e times less than what was freed now."""
FIRST_LATENCY_SECONDS = 0.5
"""Assumed until the first answer."""
WEIGHT = 1 / 8
"""Of the last answer in the average latency."""


class Window:
    """See the module. Used on the engine's thread only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._promised: dict[str, int] = {}
        self._num_promised = 0
        self._freed = 0.0
        self._freed_at_seconds = clock.now_seconds()
        self._latency_seconds = FIRST_LATENCY_SECONDS

    def has_room(self, num_blocks: int, num_free: int, most_requests: int) -> bool:
        """Whether a prompt of so many blocks may be asked for.

        Args:
            num_free: blocks.
            most_requests: of those that were asked for and have no blocks yet.
        """
        if not self._promised:
            return True
        coming = self._recently_freed() / SPAN_SECONDS * self._latency_seconds
        return len(self._promised) < most_requests and num_blocks <= num_free - self._num_promised + coming

    def promise(self, request_id: str, num_blocks: int) -> None:
        """A request is asked for that will need so many blocks."""
        self.settle(request_id)
        self._promised[request_id] = num_blocks
        self._num_promised += num_blocks

    def settle(self, request_id: str) -> None:
        """A request has its blocks, or will not get what was asked for."""
        self._num_promised -= self._promised.pop(request_id, 0)

    def freed(self, num_blocks: int) -> None:
        """A request has ended."""
        self._freed = self._recently_freed() + num_blocks
        self._freed_at_seconds = self._clock.now_seconds()

    def answered(self, seconds: float) -> None:
        """A server has answered after so long."""
        self._latency_seconds += (seconds - self._latency_seconds) * WEIGHT

    def _recently_freed(self) -> float:
        return self._freed * math.exp((self._freed_at_seconds - self._clock.now_seconds()) / SPAN_SECONDS)
