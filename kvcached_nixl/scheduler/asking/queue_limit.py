# SPDX-License-Identifier: Apache-2.0
"""How long requests may wait to be asked for (``queue_timeout``), and when those that are refused may try again.

What counts is the time in which nobody is asked for a request, also between two questions. A client is told to come
again after as long as requests wait now: as the last one that was asked for has waited, or longer, if nobody was asked
for since.
"""

from __future__ import annotations

import math

from kvcached_nixl.clock import Clock
from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed

__all__ = ["QueueLimit"]

LONGEST_RETRY_SECONDS = 60


class QueueLimit:
    """See the module. Used on the engine's thread only.

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
