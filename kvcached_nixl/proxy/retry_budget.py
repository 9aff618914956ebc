# SPDX-License-Identifier: Apache-2.0
"""Bounds the rate of retries, as Finagle and Envoy do, so that retries cannot multiply the load of an outage."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["RetryBudget"]

PER_REQUEST = 0.2
PER_SECOND = 10.0
MOST = 100.0


class RetryBudget:
    """A fifth of the requests may be retried, and ten a second besides, saved up to a hundred.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = MOST
        self._at_seconds = clock()

    def asked(self) -> None:
        """A request has come."""
        self._left = min(MOST, self._left + PER_REQUEST)

    def take(self) -> bool:
        """Whether a retry may be made now, which takes it out of the budget."""
        now = self._clock()
        self._left = min(MOST, self._left + PER_SECOND * (now - self._at_seconds))
        self._at_seconds = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
