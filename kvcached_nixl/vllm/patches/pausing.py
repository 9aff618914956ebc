# SPDX-License-Identifier: Apache-2.0
"""Pausing, resuming, clearing and shutting down an engine: its hand-overs are revoked first (rule R12), and errors are
returned to the caller.

Runs in: the engine-core process.
Sources: ``v1/engine/core.py``, ``v1/core/sched/scheduler.py``, ``v1/core/sched/interface.py``; llm-d#927.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.scheduler.kept_offers import GRACE_SECONDS
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.attributes import core_of, private, sides
from kvcached_nixl.vllm.adapter.locate import ENGINE_CORE, ENGINE_CORE_BASE, ENGINE_SCHEDULER
from kvcached_nixl.vllm.adapter.queues import wait_for_input, wake_of
from kvcached_nixl.vllm.adapter.series import BEYOND_KVCACHED
from kvcached_nixl.vllm.adapter.versions import installed_has
from kvcached_nixl.vllm.patches.engine_blocks import bound_sides
from kvcached_nixl.vllm.patches.resting import due_in_seconds, wait_relieving

logger = logging.getLogger(SERVER_LOGGER)

_REMOVE_WHEN = "vLLM tells its connector that an engine is paused, and the caller that its cache was not cleared"
_LOOK_SECONDS = 0.01
"""Longest wait for input: while requests wait in the input queue, messages of workers are queued behind them."""


@Patch(ENGINE_CORE, "pause_scheduler", "scheduler", "self mode clear_cache").because(
    "a pause (/pause, /sleep) would wait until other engines have fetched the KV kept for them, and these engines "
    "may be paused, too.",
    remove_when=_REMOVE_WHEN,
)
def pause_scheduler(call: Call) -> Any:
    scheduler = call.instance.scheduler
    grace_seconds = GRACE_SECONDS if call.argument("mode") == "wait" else 0.0
    for side in bound_sides(scheduler):
        side.revocations.paused(grace_seconds=grace_seconds, clears=call.argument("clear_cache"))
    try:
        return call.proceed()
    except Exception:
        # vLLM refuses some pauses, for example because it does not know the mode.
        if not private(scheduler, "pause_state"):
            for side in bound_sides(scheduler):
                side.revocations.resumed()
        raise


@Patch(ENGINE_CORE_BASE, "resume_scheduler", "scheduler", "self").because(
    "an engine that was paused would revoke every later offer, too.", remove_when=_REMOVE_WHEN
)
def resume_scheduler(call: Call) -> Any:
    found = call.proceed()
    for side in bound_sides(call.instance.scheduler):
        side.revocations.resumed()
    return found


@Patch(ENGINE_SCHEDULER, "reset_prefix_cache", "scheduler", "self reset_running_requests reset_connector").because(
    "KV that is in flight would enter a cache that has just been cleared, and blocks kept for decode would prevent "
    "clearing it at all.",
    remove_when=_REMOVE_WHEN,
)
def reset_prefix_cache(call: Call) -> bool:
    """Clear the prefix cache, with no block held for peers meanwhile, and none written by them later."""
    found = list(bound_sides(call.instance))
    if not call.argument("reset_running_requests"):
        # kvcached reports success even if blocks are held.
        return not any(side.revocations.has_blocks for side in found) and bool(call.proceed())
    for side in found:
        side.revocations.clear()
    try:
        return bool(call.proceed())
    except RuntimeError:
        # vLLM raises if blocks are held, and may be asked again.
        core = core_of(call.instance)
        if not found or core is None or not _drained(core):
            raise
        return bool(call.proceed())


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


@Patch(ENGINE_CORE, "_notify_idle_state_callbacks", "scheduler", "self").because(
    "a pause (/pause, /sleep) clears the cache of an idle engine; this fails while blocks are held for transfers "
    "in flight, and the error would end the engine.",
    remove_when=_REMOVE_WHEN,
)
def notify_idle_state_callbacks(call: Call) -> None:
    tell_who_waits(call.instance)
    if not held_back(call.instance):
        call.proceed()
        wait_until_due(call.instance)


def tell_who_waits(core: Any) -> None:
    """Make errors of vLLM's idle-state callbacks reach their callers instead of ending the engine.

    A pause clears the cache in such a callback, which fails while blocks are held. The engine stays paused, and the
    caller can try again. From 0.31 on vLLM's own callbacks do this.
    """
    if installed_has(BEYOND_KVCACHED):
        return
    callbacks = private(core, "_idle_state_callbacks")
    callbacks[:] = [one if isinstance(one, _Guarded) else _Guarded(one) for one in callbacks]


@dataclass(frozen=True)
class _Guarded:
    callback: Callable[[Any], None]

    def __call__(self, engine: Any) -> None:
        try:
            self.callback(engine)
        except Exception as error:
            future = self.callback.keywords.get("future") if isinstance(self.callback, functools.partial) else None
            if not isinstance(future, Future) or future.done():
                raise
            logger.warning("The engine goes on after a pause failed; the caller gets the error: %s", error)
            future.set_exception(error)


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


def _quiet_in_seconds(core: Any) -> float:
    return max((side.revocations.quiet_in_seconds for side in sides(private(core.scheduler, "connector"))), default=0.0)


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


@Patch(ENGINE_CORE, "_handle_shutdown", "scheduler", "self").because(
    "an engine that shuts down without grace would end without revoking its offers, and decode would notice late; "
    "it would answer the beginning of a response as a complete one (/v1/responses).",
    remove_when=_REMOVE_WHEN,
)
def handle_shutdown(call: Call) -> bool:
    core = call.instance
    # Without time for peers to fetch the blocks that it holds.
    ends_at_once = private(core, "shutdown_state").name == "REQUESTED" and not core.vllm_config.shutdown_timeout
    found = list(bound_sides(core.scheduler)) if ends_at_once else []
    for side in found:
        side.revocations.paused(grace_seconds=0.0, clears=True)
    if found:
        _end_at_once(core)
    return bool(call.proceed())


def _end_at_once(core: Any) -> None:
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
