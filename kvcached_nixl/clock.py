# SPDX-License-Identifier: Apache-2.0
"""Clocks that are passed as arguments, so that tests need not wait."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "MonotonicClock"]


class Clock(Protocol):
    """A monotonic clock in seconds. Its origin differs between processes: send remaining seconds, never a time."""

    def now_seconds(self) -> float: ...


class MonotonicClock:
    """The clock that vLLM itself uses for its deadlines (``time.perf_counter``)."""

    def now_seconds(self) -> float:
        return time.perf_counter()


class ManualClock:
    """A clock that only `advance` moves."""

    def __init__(self, start_seconds: float = 0.0) -> None:
        self._now_seconds = start_seconds

    def now_seconds(self) -> float:
        return self._now_seconds

    def advance(self, seconds: float) -> None:
        """Moves the clock forward.

        Raises:
            ValueError: ``seconds`` is negative; a monotonic clock cannot go back.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} seconds")
        self._now_seconds += seconds
