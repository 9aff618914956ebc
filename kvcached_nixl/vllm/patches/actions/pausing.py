# SPDX-License-Identifier: Apache-2.0
"""Pausing an engine, clearing its prefix cache, and shutting it down. Errors are returned to the caller.

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

from kvcached_nixl.vllm.adapter.attached_state import sides
from kvcached_nixl.vllm.adapter.private import private
from kvcached_nixl.vllm.adapter.versions import installed_row
from kvcached_nixl.vllm.patches.actions.engine import core_of, due_in_seconds, wait_for_input, wake_of
from kvcached_nixl.vllm.patches.actions.engine_blocks import bound_sides
from kvcached_nixl.vllm.patches.actions.resting import wait_relieving

__all__ = [
    "cleared",
    "end_at_once",
    "ends_at_once",
    "go_on_unless_paused",
    "held_back",
    "tell_who_waits",
    "wait_until_due",
]

_LOOK_SECONDS = 0.01
"""Longest wait for input: while requests wait in the input queue, messages of workers are queued behind them."""


def ends_at_once(core: Any) -> bool:
    """Whether an engine has to shut down now, without time for peers to fetch the blocks that it holds."""
    return bool(private(core, "shutdown_state").name == "REQUESTED" and not core.vllm_config.shutdown_timeout)


def end_at_once(core: Any, logger: logging.Logger) -> None:
    """End what an engine works on with an error. vLLM would send ``abort``, which not every endpoint tells its client.

    The API server does the same with what the engine aborts once it knows that it is shut down, but a signal to all
    processes may reach the engine first.
    """
    from vllm.v1.request import RequestStatus

    ended = core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    if ended:
        logger.warning("%d requests end with an error: the engine is shut down without --shutdown-timeout", len(ended))
    for one in ended:
        private(core, "_send_error_outputs_to_client")([one.request_id], one.client_index)


def go_on_unless_paused(core: Any) -> None:
    """Resume if vLLM refused the pause, for example because it does not know the mode."""
    if not private(core.scheduler, "pause_state"):
        for side in bound_sides(core.scheduler):
            side.revocations.resumed()


def wait_until_due(core: Any) -> None:
    """On the engine's thread, wait until input arrives for an idle engine, or until its next deadline.

    vLLM is about to block on the input queue without a timeout. It treats a paused engine as idle, although hand-overs
    with deadlines may be waiting.
    """
    if not private(core, "process_input_queue_block"):
        # Elastic expert parallelism: vLLM does not block here while ranks are added or removed.
        return
    found = list(sides(private(core.scheduler, "connector")))
    due = due_in_seconds(found)
    if (math.isfinite(due) or any(side.watches_memory for side in found)) and not wait_relieving(core, found, due):
        wake_of(core)()


def held_back(core: Any) -> bool:
    """On the engine's thread, before a pause completes, wait for transfers that may still be in flight.

    Returns: whether the engine has to do something else first. It then calls this again.
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
    # Wake vLLM: it is about to wait for input without a timeout.
    wake_of(core)()
    return True


def cleared(engine_scheduler: Any, reset: Callable[[], bool], *, is_forced: bool) -> bool:
    """Clear the prefix cache, with no block held for peers meanwhile, and none written by them later.

    Args:
        reset: vLLM's own reset. With ``is_forced`` it raises if blocks are held, and may be called again.
        is_forced: running requests are restarted.

    Returns: whether the cache was cleared.
    """
    found = list(bound_sides(engine_scheduler))
    if not is_forced:
        # kvcached reports success even if blocks are held.
        return not any(side.revocations.has_blocks for side in found) and reset()
    for side in found:
        side.revocations.clear()
    try:
        is_clear = reset()
    except RuntimeError:
        core = core_of(engine_scheduler)
        if not found or core is None or not _drained(core):
            raise
        is_clear = reset()
    return is_clear


def _drained(core: Any) -> bool:
    """Step without computing until no revoked transfer is in flight. Returns whether no blocks are held any more."""
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
    return not any(side.revocations.has_blocks for side in sides(scheduler.connector))


def _quiet_in_seconds(core: Any) -> float:
    return max((side.revocations.quiet_in_seconds for side in sides(private(core.scheduler, "connector"))), default=0.0)


def tell_who_waits(core: Any, logger: logging.Logger) -> None:
    """Make errors of vLLM's idle-state callbacks reach their callers instead of ending the engine.

    A pause clears the cache in such a callback, which fails while blocks are held. The engine stays paused, and the
    caller can try again. From 0.31 on vLLM's own callbacks do this.
    """
    if installed_row().shape.pause_errors_reach_callers:
        return
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
            self.logger.warning("The engine goes on after a pause failed; the caller gets the error: %s", error)
            future.set_exception(error)
