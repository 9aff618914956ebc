# SPDX-License-Identifier: Apache-2.0
"""A clock for tests."""

from __future__ import annotations

from kvcached_nixl.deadlines import Clock


class ManualClock(Clock):
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
