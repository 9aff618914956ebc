# SPDX-License-Identifier: Apache-2.0
"""Waiting for what nothing announces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["until"]


def until(found: Callable[[], Any], otherwise: Any = "it takes too long", seconds: float = 20.0) -> Any:
    """Polls ``found``, and returns its first true result.

    Raises:
        TimeoutError: there was none in so many seconds; it says ``otherwise``, or what that returns then.
    """
    pause, deadline = 0.001, time.monotonic() + seconds
    while not (answer := found()):
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise() if callable(otherwise) else otherwise)
        time.sleep(pause)
        pause = min(1.5 * pause, 0.05)
    return answer
