# SPDX-License-Identifier: Apache-2.0
"""How long an engine waits in a step that computes nothing."""

from __future__ import annotations

__all__ = ["LONGEST_IDLE_STEP_SECONDS", "SHORTEST_IDLE_STEP_SECONDS", "idle_step_seconds"]

SHORTEST_IDLE_STEP_SECONDS = 0.001
LONGEST_IDLE_STEP_SECONDS = 0.01


def idle_step_seconds(steps: int) -> float:
    """For the last of so many such steps in a row; 0 for none.

    vLLM repeats them a thousand times a second, and each goes on to the API server, which with few cores may then do
    nothing but take them in: an answer waited a minute, until the lease that prefill stepped for had ended. But a new
    request that comes meanwhile waits for this step. So the first is short, and each that follows is as much longer.
    """
    return min(steps * SHORTEST_IDLE_STEP_SECONDS, LONGEST_IDLE_STEP_SECONDS)
