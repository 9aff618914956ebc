# SPDX-License-Identifier: Apache-2.0
"""What an engine that is paused calls back when it is idle.

Source: ``v1/engine/core.py``, ``pause_scheduler``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvcached_nixl.compat.private import private

__all__ = ["tell_who_waits"]


def tell_who_waits(core: Any, logger: logging.Logger) -> None:
    """Let what fails when the engine is idle fail for whoever has asked for it.

    A pause clears the cache then, which fails while blocks are held. The engine goes on, paused; it can be asked again.
    """
    callbacks = private(core, "_idle_state_callbacks")
    callbacks[:] = [one if isinstance(one, _Guarded) else _Guarded(one, logger) for one in callbacks]


@dataclass(frozen=True)
class _Guarded:
    callback: Callable[[Any], None]
    logger: logging.Logger

    def __call__(self, engine: Any) -> None:
        try:
            self.callback(engine)
        except Exception as cause:
            future = self.callback.keywords.get("future") if isinstance(self.callback, functools.partial) else None
            if not isinstance(future, Future) or future.done():
                raise
            self.logger.warning("An engine that was paused goes on, and whoever paused it is told: %s", cause)
            future.set_exception(cause)
