# SPDX-License-Identifier: Apache-2.0
"""An engine that has nothing to do but to wait rests: vLLM would step a thousand times a second.

After a step that has changed nothing the next one changes nothing either, until something enters the engine (a request,
an abort, a call, a word of a worker), something is due by the clock, or blocks have become free elsewhere: kvcached's
memory is shared by engines. What else vLLM looks after in its steps, and says nothing of, keeps an engine stepping.

Sources: ``v1/engine/core.py``, ``v1/core/sched/scheduler.py``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from kvcached_nixl.compat.actions.engine import due_in_seconds, queued, reports_of, wait_for_input, wants_blocks
from kvcached_nixl.compat.attached_state import side_of, sides
from kvcached_nixl.compat.private import private
from kvcached_nixl.wire.step import Reports

__all__ = ["note_step", "rest"]

_STOOD_STILL = "_kvcached_nixl_stood_still"
_LOOK_SECONDS = 0.05
"""Between two looks at how many blocks are free, while a request waits for some; no step is needed for that."""
_SHARED_SECONDS = 1.0
"""Beside another connector, whose ends are found in steps only, an engine rests no longer."""


def note_step(engine_scheduler: Any, scheduler_output: Any, reports: Reports, outputs: Any) -> None:
    """Remember whether a step has changed anything.

    Args:
        reports: what its output has brought, and what our side has made of it.
        outputs: what it has brought for clients.
    """
    has_moved = (
        scheduler_output.total_num_scheduled_tokens
        or getattr(scheduler_output, "preempted_req_ids", None)
        or scheduler_output.finished_req_ids
        or reports.sent
        or reports.received
        or reports.invalid
        or any(one.outputs for one in outputs.values())
    )
    setattr(engine_scheduler, _STOOD_STILL, not has_moved)


def rest(core: Any, longest_seconds: float) -> None:
    """Wait, on the engine's thread, while nothing that this engine does would change anything."""
    found = list(sides(private(core.scheduler, "connector")))
    # With nothing to do at all vLLM waits by itself, and whoever has paused it is told first.
    if not found or not private(core, "has_work")() or not _stands_still(core, found):
        return
    seconds = min(longest_seconds, due_in_seconds(found))
    if side_of(core.scheduler.connector) is None:
        seconds = min(seconds, _SHARED_SECONDS)
    if _waits_for_blocks(core.scheduler):
        _wait_for_blocks(core, seconds)
    else:
        wait_for_input(core, seconds)


def _wait_for_blocks(core: Any, seconds: float) -> None:
    pool = private(private(core.scheduler, "kv_cache_manager"), "block_pool")
    before = pool.get_num_free_blocks()
    for _ in range(math.ceil(round(seconds / _LOOK_SECONDS, 3))):
        if wait_for_input(core, min(_LOOK_SECONDS, seconds)) or pool.get_num_free_blocks() > before:
            return


def _stands_still(core: Any, found: Sequence[Any]) -> bool:
    scheduler = core.scheduler
    if not vars(scheduler).get(_STOOD_STILL) or any(side.pending for side in found):
        return False
    # Ranks of a data-parallel group step together, and encoders of other hosts are looked after in every step.
    if private(core, "engines_running") or vars(scheduler).get("ec_connector") is not None:
        return False
    if scheduler.finished_req_ids or vars(scheduler).get("deferred_frees"):
        return False
    statuses = [one.status.name for one in queued(scheduler)]
    # A grammar that is compiled, and what another connector loads, tell nobody when they are there.
    if "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR" in statuses or "WAITING_FOR_FSM" in statuses:
        return False
    if statuses.count("WAITING_FOR_REMOTE_KVS") > sum(side.num_waiting for side in found):
        return False
    return _bring_nothing(core.batch_queue or ())


def _waits_for_blocks(scheduler: Any) -> bool:
    # A scheduler that is paused begins nothing, whatever is free.
    if private(scheduler, "pause_state"):
        return False
    return any(map(wants_blocks, queued(scheduler)))


def _bring_nothing(batches: Collection[Any]) -> bool:
    """Whether batches that the workers were given compute nothing, and nothing is reported with them.

    With asynchronous scheduling vLLM always has one. Its next step waits for the oldest, as this does, and would raise
    what is raised here.
    """
    if any(scheduler_output.total_num_scheduled_tokens for _, scheduler_output, *_ in batches):
        return False
    for future, *_ in batches:
        output = future.result()
        reports = None if output is None else reports_of(output)
        if reports is None or reports.sent or reports.received or reports.invalid:
            return False
    return True
