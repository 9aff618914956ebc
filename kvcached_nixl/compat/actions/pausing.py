# SPDX-License-Identifier: Apache-2.0
"""Pausing an engine, clearing its prefix cache and shutting it down; errors are returned to the caller.

Sources: ``v1/engine/core.py``, ``v1/core/sched/scheduler.py``, ``v1/core/sched/interface.py``.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvcached_nixl.compat.actions.engine import bound_sides, core_of, due_in_seconds, wait_for_input, wake_of
from kvcached_nixl.compat.attached_state import sides
from kvcached_nixl.compat.private import private

__all__ = ["cleared", "drains", "ends_at_once", "go_on_unless_paused", "held_back", "tell_who_waits", "wait_until_due"]

_LOOK_SECONDS = 0.01
"""While requests wait in the queue, words of workers are found behind them."""


def ends_at_once(core: Any) -> bool:
    """Whether an engine is asked to shut down now, and has no time to let others fetch what it keeps."""
    return bool(private(core, "shutdown_state").name == "REQUESTED" and not core.vllm_config.shutdown_timeout)


def drains(engine_scheduler: Any) -> bool:
    """Whether an engine shuts down, and has time to let others fetch what it keeps."""
    core = core_of(engine_scheduler)
    if core is None or not core.vllm_config.shutdown_timeout:
        return False
    return bool(private(core, "shutdown_state").name == "SHUTTING_DOWN")


def go_on_unless_paused(core: Any) -> None:
    """A pause that vLLM refuses, as one in no mode that it knows, pauses nothing."""
    if not private(core.scheduler, "pause_state"):
        for side in bound_sides(core.scheduler):
            side.resumed()


def wait_until_due(core: Any) -> None:
    """Wait, on the engine's thread, until something enters an engine that is idle, or the next thing is due in it.

    vLLM is about to block on the input queue without a timeout. A paused engine counts as idle there, though hand-overs
    with deadlines may be waiting in it.
    """
    if not private(core, "process_input_queue_block"):
        # Elastic expert parallelism: it does not wait while ranks come or go.
        return
    due = due_in_seconds(sides(private(core.scheduler, "connector")))
    if math.isfinite(due) and not wait_for_input(core, due):
        wake_of(core)()


def held_back(core: Any) -> bool:
    """Wait, on the engine's thread, for what may still be in flight when a pause is all but complete.

    Returns: whether there is something else to do first, after which this is asked again.
    """
    if not private(core, "_idle_state_callbacks"):
        return False
    found = list(sides(private(core.scheduler, "connector")))
    seconds = _quiet_in_seconds(core)
    if seconds <= 0:
        return False
    if wait_for_input(core, min(seconds, due_in_seconds(found))):
        return True
    if _quiet_in_seconds(core) <= 0:
        return False
    # vLLM is about to wait for whatever enters the engine, without an end.
    wake_of(core)()
    return True


def cleared(engine_scheduler: Any, reset: Callable[[], bool], *, is_forced: bool) -> bool:
    """Clear the prefix cache: no block is kept for others meanwhile, and none is filled by them later.

    Args:
        reset: vLLM's own way; with ``is_forced`` it raises where blocks are held, and may be called again.
        is_forced: running requests start over.
    """
    found = list(bound_sides(engine_scheduler))
    if not is_forced:
        # kvcached says that everything was cleared, whatever is held.
        return not any(side.has_blocks for side in found) and reset()
    for side in found:
        side.clear()
    try:
        is_clear = reset()
    except RuntimeError:
        core = core_of(engine_scheduler)
        if not found or core is None or not _drained(core):
            raise
        is_clear = reset()
    for side in found:
        side.freshen()
    return is_clear


def _drained(core: Any) -> bool:
    """Step, computing nothing, until nothing is in flight of what was revoked. Returns whether that is so."""
    scheduler = core.scheduler
    before = scheduler.pause_state
    scheduler.set_pause_state(type(before).PAUSED_ALL)
    try:
        while _quiet_in_seconds(core) > 0:
            private(core, "_process_engine_step")()
            if (seconds := _quiet_in_seconds(core)) > 0 and not any(
                side.pending for side in sides(scheduler.connector)
            ):
                wait_for_input(core, min(seconds, _LOOK_SECONDS))
    finally:
        scheduler.set_pause_state(before)
    return not any(side.has_blocks for side in sides(scheduler.connector))


def _quiet_in_seconds(core: Any) -> float:
    return max((side.quiet_in_seconds for side in sides(private(core.scheduler, "connector"))), default=0.0)


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
        except Exception as error:
            future = self.callback.keywords.get("future") if isinstance(self.callback, functools.partial) else None
            if not isinstance(future, Future) or future.done():
                raise
            self.logger.warning("An engine that was paused goes on, and whoever paused it is told: %s", error)
            future.set_exception(error)
