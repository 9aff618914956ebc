# SPDX-License-Identifier: Apache-2.0
"""Time as an argument, so that tests need not wait for it."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "MonotonicClock"]


class Clock(Protocol):
    """Seconds that never go back. Their origin is local to one process: send others remaining seconds, never a time."""

    def now_seconds(self) -> float: ...


class MonotonicClock:
    """The clock vLLM itself stamps its deadlines with (``time.perf_counter``)."""

    def now_seconds(self) -> float:
        return time.perf_counter()


class ManualClock:
    """A clock that stands still until it is told to advance."""

    def __init__(self, start_seconds: float = 0.0) -> None:
        self._now_seconds = start_seconds

    def now_seconds(self) -> float:
        return self._now_seconds

    def advance(self, seconds: float) -> None:
        """Move forward.

        Raises:
            ValueError: ``seconds`` is negative; a monotonic clock cannot go back.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} seconds")
        self._now_seconds += seconds
