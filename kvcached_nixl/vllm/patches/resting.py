# SPDX-License-Identifier: Apache-2.0
"""Let an engine rest if it can only wait. vLLM would step a thousand times a second.

After a step that changed nothing, the next step changes nothing either, until something enters the engine (a request,
an abort, a call, a worker's wake-up), a deadline is due, or another engine frees blocks: engines share kvcached's
memory. If the engine has other work that vLLM polls for in its steps, it keeps stepping.

Runs in: the engine-core process.
Sources: ``v1/engine/core.py``, ``v1/core/sched/scheduler.py``; vllm#45168.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.vllm.adapter.attributes import private, remember, side_of, sides
from kvcached_nixl.vllm.adapter.locate import ENGINE_CORE
from kvcached_nixl.vllm.adapter.queues import queued, startable, wait_for_input, wake_of, wants_blocks
from kvcached_nixl.vllm.patches.engine_blocks import bound_sides
from kvcached_nixl.vllm.patches.step_output import reports_of, stood_still
from kvcached_nixl.vllm.patches.weights import identify_if_due

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


@Patch(ENGINE_CORE, "_process_input_queue", "scheduler", "self").because(
    "a sleeping engine would not be told that its workers have released blocks, and one that waits for KV would "
    "step a thousand times a second.",
    remove_when="vLLM lets a connector wake its engine",
)
def process_input_queue(call: Call) -> None:
    remember(call.instance)
    for side in bound_sides(call.instance.scheduler):
        side.bind_wake(wake_of(call.instance))
    rest(call.instance, REST_SECONDS)
    call.proceed()
    for side in sides(call.instance.scheduler.connector):
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
    that offers give way because memory is short.

    Returns: whether something has entered the queue.
    """
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
    if not stood_still(scheduler) or any(side.pending for side in found):
        return False
    # Ranks of a data-parallel group step together, and remote encoders are polled in every step.
    if private(core, "engines_running") or private(scheduler, "ec_connector") is not None:
        return False
    if scheduler.finished_req_ids or private(scheduler, "deferred_frees"):
        return False
    statuses = [one.status.name for one in queued(scheduler)]
    # A compiled grammar and the loads of another connector are found by polling only.
    if "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR" in statuses:
        return False
    if statuses.count("WAITING_FOR_REMOTE_KVS") > sum(side.num_waiting for side in found):
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
        reports = None if output is None else reports_of(output)
        if reports is None or reports.sent or reports.received or reports.invalid:
            return False
    return True
