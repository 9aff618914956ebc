# SPDX-License-Identifier: Apache-2.0
"""Push: hand-overs that keep the blocks which the next request needs, and whose KV does not come (rule R4). One per
engine, on its thread.

They have blocks before prefill computes, and no time is limited while prefill says that it goes on. Two engines that
prefill for each other may so wait for each other, each full of what waits for the other one; or a prefill says so for
ever. Small requests that run meanwhile change nothing about that.
"""

from __future__ import annotations

import math

from kvcached_nixl.clock import Clock
from kvcached_nixl.scheduler.engine import BlockPool
from kvcached_nixl.scheduler.starvation import STOOD_SECONDS

__all__ = ["RING_TIMEOUTS", "VAIN_TIMEOUTS", "Impasse"]

RING_TIMEOUTS = 2
"""How long the next request waits where prompts for peers wait, too, in times of ``handover_timeout``."""
VAIN_TIMEOUTS = 10
"""The same, where no peer waits for this engine: longer than prefill's queue can be in a service that is of any use."""


class Impasse:
    """See the module."""

    def __init__(self, clock: Clock, timeout_seconds: float) -> None:
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        # The next request, the fewest blocks that it lacked, since when it lacks them, and when that was seen last.
        self._request_id = ""
        self._least_blocks = 0
        self._since_seconds = 0.0
        self._seen_seconds = -math.inf

    def turn(self, blocks: BlockPool, *, are_peers_waiting: bool) -> tuple[int, float]:
        """Returns how many blocks hand-overs have to give up now, and since when they were needed.

        Args:
            are_peers_waiting: peers may wait for a prompt that has no blocks here.
        """
        now = self._clock.now_seconds()
        request_id, num_missing = blocks.starved or ("", 0)
        is_past = now > self._seen_seconds + STOOD_SECONDS
        # Others may stand in front of it for a moment, by their priority.
        if not num_missing or (request_id != self._request_id and not is_past):
            return 0, now
        if is_past or num_missing < self._least_blocks:
            self._request_id, self._least_blocks, self._since_seconds = request_id, num_missing, now
        self._seen_seconds = now
        times = RING_TIMEOUTS if are_peers_waiting else VAIN_TIMEOUTS
        since_seconds = self._since_seconds
        if now < since_seconds + times * self._timeout_seconds:
            return 0, now
        self._since_seconds = now
        return (num_missing if num_missing > blocks.num_running_blocks else 0), since_seconds
