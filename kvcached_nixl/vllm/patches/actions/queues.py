# SPDX-License-Identifier: Apache-2.0
"""Named access to the queues of vLLM's scheduler. Source: ``v1/core/sched/scheduler.py``."""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from kvcached_nixl.vllm.adapter.attached_state import sides
from kvcached_nixl.vllm.adapter.private import optional, private
from kvcached_nixl.vllm.adapter.versions import installed_row
from kvcached_nixl.vllm.patches.actions.step_output import waits_for_kv

__all__ = ["bring_forward", "goes_by_priority", "queued", "startable", "wants_blocks"]

_AHEAD = "_kvcached_nixl_ahead"


def queued(engine_scheduler: Any) -> Iterator[Any]:
    """The requests that do not run, in vLLM's order."""
    waiting = private(engine_scheduler, "waiting")
    # From 0.31 on vLLM has a queue of those that hold KV, before one of those it skipped, and schedules them first.
    holding = optional(engine_scheduler, "kv_holding_waiting")
    first = private(engine_scheduler, "skipped_waiting") if holding is None else holding
    if holding is not None or not goes_by_priority(engine_scheduler):
        yield from first
        yield from waiting
    else:
        # By priority (``--scheduling-policy``).
        yield from heapq.merge(first, waiting)


def goes_by_priority(engine_scheduler: Any) -> bool:
    """Whether requests are started by priority (``--scheduling-policy``), and not as they arrived."""
    holding = optional(engine_scheduler, "kv_holding_waiting")
    return not isinstance(private(engine_scheduler, "skipped_waiting") if holding is None else holding, Sequence)


def bring_forward(engine_scheduler: Any, request_ids: Container[str]) -> None:
    """Put requests that no longer wait for KV before all others that do not run, as vLLM does from 0.31 on. Called
    after each step.

    Before, vLLM stops at the first one that lacks blocks. One behind it would keep its own blocks, which the first one
    may need, for ever: it gets no turn to use them, or to free them if its KV has not come.
    """
    if optional(engine_scheduler, "kv_holding_waiting") is not None:
        return
    skipped = private(engine_scheduler, "skipped_waiting")
    is_by_priority = goes_by_priority(engine_scheduler)
    # Requests that have another priority until their turn -> their own.
    ahead = vars(engine_scheduler).setdefault(_AHEAD, {})
    _set_priorities(engine_scheduler, {one: ahead.pop(one) for one in list(ahead) if not _holds_kv(one)})
    found = [one for one in skipped if one.request_id in request_ids] if request_ids else []
    if is_by_priority:
        for one in found:
            ahead.setdefault(one, one.priority)
        _set_priorities(engine_scheduler, dict.fromkeys(found, -math.inf))
    else:
        for request in found:
            skipped.remove(request)
            skipped.appendleft(request)


def _holds_kv(request: Any) -> bool:
    """Whether a request waits for its turn, and has KV, or blocks for KV that has not come."""
    return waits_for_kv(request) or (wants_blocks(request) and request.num_computed_tokens > 0)


def _set_priorities(engine_scheduler: Any, priorities: Mapping[Any, float]) -> None:
    if not priorities:
        return
    for queue in (private(engine_scheduler, "waiting"), private(engine_scheduler, "skipped_waiting")):
        queued_here = [one for one in queue if one in priorities]
        queue.remove_requests(queued_here)
        for request in queued_here:
            request.priority = priorities[request]
            queue.add_request(request)
    for request, priority in priorities.items():
        request.priority = priority


def startable(engine_scheduler: Any) -> Iterator[Any]:
    """Those of `queued` that vLLM would run if there are blocks: all but those that a connector holds back; while it is
    paused, those that hold KV, or none.
    """
    state = private(engine_scheduler, "pause_state")
    if not state:
        found = list(sides(private(engine_scheduler, "connector")))
        for request in queued(engine_scheduler):
            if not any(side.holds_back(request.request_id) for side in found):
                yield request
    elif installed_row().shape.held_kv_runs_while_pausing and state != type(state).PAUSED_ALL:
        yield from private(engine_scheduler, "kv_holding_waiting")


def wants_blocks(request: Any) -> bool:
    """Whether a request that does not run waits only for its turn and for blocks."""
    return request.status.name in ("WAITING", "PREEMPTED")
