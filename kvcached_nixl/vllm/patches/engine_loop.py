# SPDX-License-Identifier: Apache-2.0
"""The loop of vLLM's engine: it rests, and it is paused, resumed, cleared and shut down.

vLLM would step a thousand times a second where it can only wait. After a step that changed nothing, the next step
changes nothing either, until something enters the engine (a request, an abort, a call, a worker's wake-up), a deadline
is due, or another engine frees blocks: engines share kvcached's memory. If the engine has other work that vLLM polls
for in its steps, it keeps stepping.

Before a pause and its like, hand-overs are revoked (rule R12); errors are returned to the caller.

Runs in: the engine-core process.
Sources: ``v1/engine/core.py``, ``v1/core/sched/scheduler.py``, ``v1/core/sched/interface.py``; vllm#45168, llm-d#927.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.scheduler.kept_offers import GRACE_SECONDS
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.attributes import OWNER, connectors, has_loop, owner_of, private, side_of, sides
from kvcached_nixl.vllm.adapter.locate import ENGINE_CORE, ENGINE_CORE_BASE, ENGINE_SCHEDULER
from kvcached_nixl.vllm.adapter.queues import queued, startable, wait_for_input, wake_of, wants_blocks
from kvcached_nixl.vllm.adapter.versions import BEYOND_KVCACHED, installed_has
from kvcached_nixl.vllm.patches.arrival import let_look_up
from kvcached_nixl.vllm.patches.engine_blocks import bound_sides
from kvcached_nixl.vllm.patches.step_output import STOOD_STILL, has_reports
from kvcached_nixl.vllm.patches.tier import tier_of
from kvcached_nixl.vllm.patches.weights import identify_if_due

logger = logging.getLogger(SERVER_LOGGER)

REST_SECONDS = 5.0
"""How often an engine that only waits for KV steps although nothing has woken it.

After each step vLLM's workers spin for one second, waiting for the next step (``SpinCondition``): with ten steps per
second each worker would keep a core busy.
"""
_LOOK_SECONDS = 0.05
"""Interval for polling the number of free blocks while a request waits for blocks. Polling needs no step."""
_LOOK_FOR_PRESSURE_SECONDS = 0.25
"""Interval for looking whether offers have to give way. Needs no step."""
_SHARED_SECONDS = 1.0
"""Longest rest beside another connector, because the end of its transfers is found in steps only."""


@Patch(ENGINE_CORE, "_process_input_queue", "scheduler", "self")
def process_input_queue(call: Call) -> None:
    """Without it, a sleeping engine would not be told that its workers have released blocks, and one that waits for KV
    would step a thousand times a second. Until vLLM lets a connector wake its engine."""
    vars(call.instance.scheduler)[OWNER] = call.instance
    let_look_up(call.instance)
    for side in bound_sides(call.instance.scheduler):
        side.engine.bind_wake(wake_of(call.instance))
    rest(call.instance, REST_SECONDS)
    call.proceed()
    for side in sides(call.instance.scheduler.connector):
        side.run_calls()
        side.ask()
    identify_if_due(call.instance)


def rest(core: Any, longest_seconds: float) -> None:
    """On the engine's thread, wait while a step would change nothing, at most ``longest_seconds``."""
    found = list(sides(private(core.scheduler, "connector")))
    # Without any work vLLM waits by itself, and first notifies the callers that paused it.
    if not found or not private(core, "has_work")() or not _stands_still(core, found):
        return
    if any(side.relieve() for side in found):
        return
    seconds = min(longest_seconds, due_in_seconds(found))
    if side_of(core.scheduler.connector) is None:
        seconds = min(seconds, _SHARED_SECONDS)
    if any(map(wants_blocks, startable(core.scheduler))):
        _wait_for_blocks(core, found, seconds)
    else:
        wait_relieving(core, found, seconds)


def due_in_seconds(found: Iterable[Any]) -> float:
    """Seconds until one of these facades has something to do by the clock; infinite if none has."""
    return min((due for side in found if (due := side.due_in_seconds) is not None), default=math.inf)


def wait_relieving(core: Any, found: Sequence[Any], seconds: float) -> bool:
    """On the engine's thread, wait until something enters the engine's input queue, or until workers have to be told
    that offers give way because memory is short. Returns whether something has entered."""
    until_seconds = time.monotonic() + seconds
    while any(side.watches_memory for side in found) and (left_seconds := until_seconds - time.monotonic()) > 0:
        if wait_for_input(core, min(left_seconds, _LOOK_FOR_PRESSURE_SECONDS)):
            return True
        if any(side.relieve() for side in found):
            return False
    return wait_for_input(core, max(0.0, until_seconds - time.monotonic()))


def _wait_for_blocks(core: Any, found: Sequence[Any], seconds: float) -> None:
    pool = private(private(core.scheduler, "kv_cache_manager"), "block_pool")
    before = pool.get_num_free_blocks()
    for _ in range(math.ceil(round(seconds / _LOOK_SECONDS, 3))):
        if wait_for_input(core, min(_LOOK_SECONDS, seconds)) or pool.get_num_free_blocks() > before:
            return
        if any(side.relieve() for side in found):
            return


def _stands_still(core: Any, found: Sequence[Any]) -> bool:
    scheduler = core.scheduler
    if not vars(scheduler).get(STOOD_STILL) or any(side.pending for side in found):
        return False
    # Of another connector, which may wait for what only a step brings.
    if any(one.has_pending_push_work() for one in connectors(scheduler.connector) if side_of(one) is None):
        return False
    # Ranks of a data-parallel group step together.
    if private(core, "engines_running") or scheduler.finished_req_ids or private(scheduler, "deferred_frees"):
        return False
    statuses = [one.status.name for one in queued(scheduler)]
    # A compiled grammar and the loads of another connector are found by polling only.
    if "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR" in statuses:
        return False
    if statuses.count("WAITING_FOR_REMOTE_KVS") > sum(len(side.fetching.attempts.waiting) for side in found):
        return False
    return _bring_nothing(core.batch_queue or ())


def _bring_nothing(batches: Collection[Any]) -> bool:
    """Whether the batches in flight on the workers compute no tokens and return no reports.

    With asynchronous scheduling vLLM always has one batch in flight. This waits for it, as vLLM's next step would, and
    raises what that step would raise.
    """
    if any(scheduler_output.total_num_scheduled_tokens for _, scheduler_output, *_ in batches):
        return False
    for future, *_ in batches:
        output = future.result()
        if output is None or has_reports(output):
            return False
    return True


# ------------------------------------------------------------------------------------- paused, resumed, cleared, ended
# Until vLLM tells its connector that an engine is paused, and the caller that its cache was not cleared.

_DRAIN_LOOK_SECONDS = 0.01
"""Longest wait for input: while requests wait in the input queue, messages of workers are queued behind them."""


@Patch(ENGINE_CORE, "pause_scheduler", "scheduler", "self mode clear_cache")
def pause_scheduler(call: Call) -> Any:
    """Without it, a pause (/pause, /sleep) would wait until other engines have fetched the KV kept for them, and these
    engines may be paused, too."""
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


@Patch(ENGINE_CORE_BASE, "resume_scheduler", "scheduler", "self")
def resume_scheduler(call: Call) -> Any:
    """Without it, an engine that was paused would revoke every later offer, too."""
    found = call.proceed()
    for side in bound_sides(call.instance.scheduler):
        side.revocations.resumed()
    return found


@Patch(ENGINE_SCHEDULER, "reset_prefix_cache", "scheduler", "self reset_running_requests reset_connector")
def reset_prefix_cache(call: Call) -> bool:
    """Without it, KV that is in flight would enter a cache that has just been cleared, and blocks kept for decode would
    prevent clearing it at all.

    Clear the prefix cache, with no block held for peers meanwhile, and none written by them later."""
    found = list(bound_sides(call.instance))
    if not call.argument("reset_running_requests"):
        # kvcached reports success even if blocks are held.
        return not any(side.revocations.has_blocks for side in found) and bool(call.proceed())
    for side in found:
        side.revocations.clear()
    if (tier := tier_of(call.instance)) is not None:
        # vLLM's engine would end if it loaded a request in the step that tells of its preemption here.
        tier.forget()
    try:
        return bool(call.proceed())
    except RuntimeError:
        # vLLM raises if blocks are held, and may be asked again.
        core = owner_of(call.instance)
        if not found or core is None or not has_loop(core) or not _drained(core):
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
                wait_for_input(core, min(seconds, _DRAIN_LOOK_SECONDS))
    finally:
        scheduler.set_pause_state(before)
    return not any(side.revocations.has_blocks for side in sides(scheduler.connector))


@Patch(ENGINE_CORE, "_notify_idle_state_callbacks", "scheduler", "self")
def notify_idle_state_callbacks(call: Call) -> None:
    """Without it, a pause (/pause, /sleep) clears the cache of an idle engine; this fails while blocks are held for
    transfers in flight, and the error would end the engine.

    On the engine's thread, before a pause completes, wait for transfers that may still be in flight; and when an
    engine is idle, until input arrives or its next deadline is due.

    vLLM is about to block on the input queue without a timeout. It treats a paused engine as idle, although hand-overs
    with deadlines may be waiting.
    """
    core = call.instance
    tell_who_waits(core)
    found = list(sides(private(core.scheduler, "connector")))
    quiet_in_seconds = _quiet_in_seconds(core) if private(core, "_idle_state_callbacks") else 0.0
    if quiet_in_seconds > 0:
        # vLLM calls this again when it has done what has entered.
        if wait_for_input(core, min(quiet_in_seconds, due_in_seconds(found))):
            return
        if _quiet_in_seconds(core) > 0:
            # vLLM is about to wait for input without a timeout.
            wake_of(core)()
            return
    call.proceed()
    # Elastic expert parallelism: vLLM does not block here while ranks are added or removed.
    if private(core, "process_input_queue_block"):
        due = due_in_seconds(found)
        waits = math.isfinite(due) or any(side.watches_memory for side in found)
        if waits and not wait_relieving(core, found, due):
            wake_of(core)()


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


def _quiet_in_seconds(core: Any) -> float:
    return max((side.revocations.quiet_in_seconds for side in sides(private(core.scheduler, "connector"))), default=0.0)


@Patch(ENGINE_CORE, "_handle_shutdown", "scheduler", "self")
def handle_shutdown(call: Call) -> bool:
    """Without it, an engine that shuts down without grace would end without revoking its offers, and decode would
    notice late; it would answer the beginning of a response as a complete one (/v1/responses).

    Without time to end (``--shutdown-timeout``), what the engine works on ends with an error at once, and peers get
    no time to fetch what it keeps. vLLM would send ``abort``, which not every endpoint tells its client.

    The API server does the same with what the engine aborts once it knows that it is shut down, but a signal to all
    processes may reach the engine first.
    """
    core = call.instance
    ends_at_once = private(core, "shutdown_state").name == "REQUESTED" and not core.vllm_config.shutdown_timeout
    found = list(bound_sides(core.scheduler)) if ends_at_once else []
    for side in found:
        side.revocations.paused(grace_seconds=0.0, clears=True)
    if found:
        from vllm.v1.request import RequestStatus

        ended = core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        if ended:
            why = "the engine is shut down without --shutdown-timeout"
            logger.warning("%d requests end with an error: %s", len(ended), why)
        for one in ended:
            private(core, "_send_error_outputs_to_client")([one.request_id], one.client_index)
    return bool(call.proceed())
