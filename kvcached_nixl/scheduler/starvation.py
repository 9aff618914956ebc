# SPDX-License-Identifier: Apache-2.0
"""A request that waits for blocks which only the end of a quarantine could free, or other requests that have their KV
and wait for blocks, too: the memory that was there when they were admitted may have gone since. One per engine, on its
thread.
"""

from __future__ import annotations

from kvcached_nixl.clock import Clock
from kvcached_nixl.scheduler.failures import Failures
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed

__all__ = ["Starvation"]


class Starvation:
    """Notices when the request at the head of vLLM's queue has starved (rule R4). It need not be a hand-over, and the
    requests behind it wait for it."""

    def __init__(self, clock: Clock, timeout_seconds: float, failures: Failures) -> None:
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._failures = failures
        self._stalled: tuple[str, float] | None = None

    def turn(self, request_id: str | None, num_quarantined_blocks: int) -> set[str]:
        """Called in each step with the request that waits for blocks while nothing runs, or None if there is none.

        Returns: the request, if it has waited for the whole timeout: it has to fail. It is then forgotten.
        """
        if request_id is None:
            self._stalled = None
            return set()
        now = self._clock.now_seconds()
        if self._stalled is None or self._stalled[0] != request_id:
            self._stalled = request_id, now
        if now < self._stalled[1] + self._timeout_seconds:
            return set()
        self._stalled = None
        cause = FailureCause.QUARANTINE if num_quarantined_blocks else FailureCause.NO_BLOCKS
        self._failures.not_received(request_id, HandOverFailed(cause, self._reason(num_quarantined_blocks)))
        return {request_id}

    def _reason(self, num_quarantined_blocks: int) -> str:
        """What the client of such a request is told."""
        reason = f"it has waited {self._timeout_seconds:g} s for blocks, nothing else runs, and "
        if not num_quarantined_blocks:
            return (
                f"{reason}requests that have their KV wait for more blocks, too. Raise kvcached's limit, or have other "
                "engines on this device leave more memory to this one"
            )
        return (
            f"{reason}{num_quarantined_blocks} blocks are in quarantine for peers that do not answer and may still "
            "write. Peers on other hosts are fenced within about two minutes, and their blocks are free then. If a "
            "process of a peer on this host hangs, continue or end it"
        )
