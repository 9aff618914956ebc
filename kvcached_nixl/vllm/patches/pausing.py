# SPDX-License-Identifier: Apache-2.0
"""Patches for pausing, resuming, clearing and shutting down an engine: its hand-overs are revoked first (rule R12).

Runs in: the engine-core process. The logic is in ``kvcached_nixl.scheduler``.
"""

from __future__ import annotations

import logging
from typing import Any

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.scheduler.kept_offers import GRACE_SECONDS
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.locate import ENGINE_CORE, ENGINE_CORE_BASE, ENGINE_SCHEDULER
from kvcached_nixl.vllm.patches.actions.engine_blocks import bound_sides
from kvcached_nixl.vllm.patches.actions.pausing import (
    cleared,
    end_at_once,
    ends_at_once,
    go_on_unless_paused,
    held_back,
    tell_who_waits,
    wait_until_due,
)

logger = logging.getLogger(SERVER_LOGGER)

_REMOVE_WHEN = "vLLM tells its connector that an engine is paused, and the caller that its cache was not cleared"


@Patch(
    target=ENGINE_CORE,
    attribute="pause_scheduler",
    process="scheduler",
    parameters=("self", "mode", "clear_cache"),
    why="a pause (/pause, /sleep) would wait until other engines have fetched the KV kept for them, and these engines "
    "may be paused, too.",
    upstream="vllm/v1/engine/core.py: kept requests count as work",
    remove_when=_REMOVE_WHEN,
).around
def pause_scheduler(call: Call) -> Any:
    grace_seconds = GRACE_SECONDS if call.argument("mode") == "wait" else 0.0
    for side in bound_sides(call.instance.scheduler):
        side.revocations.paused(grace_seconds=grace_seconds, clears=call.argument("clear_cache"))
    try:
        return call.proceed()
    except Exception:
        go_on_unless_paused(call.instance)
        raise


@Patch(
    target=ENGINE_CORE_BASE,
    attribute="resume_scheduler",
    process="scheduler",
    parameters=("self",),
    why="an engine that was paused would revoke every later offer, too.",
    upstream="vllm/v1/engine/core.py",
    remove_when=_REMOVE_WHEN,
).around
def resume_scheduler(call: Call) -> Any:
    found = call.proceed()
    for side in bound_sides(call.instance.scheduler):
        side.revocations.resumed()
    return found


@Patch(
    target=ENGINE_SCHEDULER,
    attribute="reset_prefix_cache",
    process="scheduler",
    parameters=("self", "reset_running_requests", "reset_connector"),
    why="KV that is in flight would enter a cache that has just been cleared, and blocks kept for decode would prevent "
    "clearing it at all.",
    upstream="vllm/v1/core/sched/scheduler.py: reset_prefix_cache",
    remove_when=_REMOVE_WHEN,
).around
def reset_prefix_cache(call: Call) -> bool:
    return cleared(call.instance, call.proceed, is_forced=call.argument("reset_running_requests"))


@Patch(
    target=ENGINE_CORE,
    attribute="_notify_idle_state_callbacks",
    process="scheduler",
    parameters=("self",),
    why="a pause (/pause, /sleep) clears the cache of an idle engine; this fails while blocks are held for transfers "
    "in flight, and the error would end the engine.",
    upstream="vllm/v1/engine/core.py: pause_scheduler",
    remove_when=_REMOVE_WHEN,
).around
def notify_idle_state_callbacks(call: Call) -> None:
    tell_who_waits(call.instance, logger)
    if not held_back(call.instance):
        call.proceed()
        wait_until_due(call.instance)


@Patch(
    target=ENGINE_CORE,
    attribute="_handle_shutdown",
    process="scheduler",
    parameters=("self",),
    why="an engine that shuts down without grace would end without revoking its offers, and decode would notice late; "
    "it would answer the beginning of a response as a complete one (/v1/responses).",
    upstream="vllm/v1/engine/core.py; llm-d#927",
    remove_when=_REMOVE_WHEN,
).around
def handle_shutdown(call: Call) -> bool:
    found = list(bound_sides(call.instance.scheduler)) if ends_at_once(call.instance) else []
    for side in found:
        side.revocations.paused(grace_seconds=0.0, clears=True)
    if found:
        end_at_once(call.instance, logger)
    return bool(call.proceed())
