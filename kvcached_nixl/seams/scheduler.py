# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's scheduler handles KV that could not be loaded, and blocks that are still being written from.

Runs in: the engine-core process. Logic lives in ``kvcached_nixl.scheduler``.
"""

from __future__ import annotations

from typing import Any

from kvcached_nixl.compat.connector import num_kv_cache_groups
from kvcached_nixl.compat.engine import give_back, halves, take_blocks
from kvcached_nixl.compat.locate import ENGINE_SCHEDULER, ENGINE_SCHEDULER_INTERFACE
from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.scheduler import load_failures
from kvcached_nixl.scheduler import push as push_scheduler

INVALID_BLOCKS = Patch(
    target=ENGINE_SCHEDULER,
    attribute="_update_requests_with_invalid_blocks",
    process="scheduler",
    parameters=("self", "requests", "invalid_block_ids", "num_scheduled_tokens", "evict_blocks"),
    needs="layout",
    why="with several KV-cache groups the stock method unpacks one group and raises, so the connector does not report "
    "failed receives at all and the client gets wrong tokens.",
    upstream="vllm#52234",
    remove_when="vLLM's scheduler handles invalid blocks of several groups",
)


@INVALID_BLOCKS.around
def update_requests_with_invalid_blocks(call: Call) -> Any:
    if num_kv_cache_groups(call.instance) == 1:
        return call.proceed()
    return load_failures.restart_affected(
        call.argument("requests"),
        call.argument("invalid_block_ids"),
        call.argument("num_scheduled_tokens"),
        call.instance.kv_cache_manager.get_block_ids,
        call.argument("evict_blocks"),
    )


HANDLE_INVALID_BLOCKS = Patch(
    target=ENGINE_SCHEDULER,
    attribute="_handle_invalid_blocks",
    process="scheduler",
    parameters=("self", "invalid_block_ids", "num_scheduled_tokens"),
    versions="<0.20",
    needs="layout",
    why="a request that fails before it was scheduled reports -1 cached tokens; the metrics counter raises on it and "
    "the whole server dies with one refused peer.",
    upstream="vllm/v1/metrics/loggers.py counts EngineCoreOutput.num_cached_tokens; later versions do not send it",
    remove_when="vLLM 0.19 is no longer supported",
)


@HANDLE_INVALID_BLOCKS.around
def handle_invalid_blocks(call: Call) -> Any:
    failed = call.proceed()
    load_failures.count_no_cached_tokens(call.instance.requests[request_id] for request_id in failed)
    return failed


PREEMPT_REQUEST = Patch(
    target=ENGINE_SCHEDULER,
    attribute="_preempt_request",
    process="scheduler",
    parameters=("self", "request", "timestamp"),
    also_accepts=(("self", "request", "timestamp", "drop_stale_output"),),
    needs="push",
    why="blocks of a preempted request would be reused while a WRITE reads them, and decode would get another "
    "request's KV.",
    upstream="nixl#2067: a posted transfer cannot be called back",
    remove_when="vLLM asks its connector before it frees the blocks of a preempted request",
)


@PREEMPT_REQUEST.around
def preempt_request(call: Call) -> None:
    request_id = call.argument("request").request_id
    for half in halves(call.instance):
        if half.is_sending(request_id):
            half.preempted(request_id, take_blocks(call.instance, request_id))
    call.proceed()


UPDATE_FROM_KV_XFER_FINISHED = Patch(
    target=ENGINE_SCHEDULER,
    attribute="_update_from_kv_xfer_finished",
    process="scheduler",
    parameters=("self", "kv_connector_output"),
    needs="push",
    why="blocks of preempted requests would never be given back.",
    upstream="vllm/v1/core/sched/scheduler.py frees by request, and a preempted request lives on",
    remove_when="the patch of _preempt_request goes",
)


@UPDATE_FROM_KV_XFER_FINISHED.around
def update_from_kv_xfer_finished(call: Call) -> Any:
    output = call.argument("kv_connector_output")
    for half in halves(call.instance):
        for blocks in half.ended(output.finished_sending, output.finished_recving):
            give_back(call.instance, blocks)
    return call.proceed()


HAS_REQUESTS = Patch(
    target=ENGINE_SCHEDULER_INTERFACE,
    attribute="has_requests",
    process="scheduler",
    parameters=("self",),
    versions="<0.24",
    needs="push",
    why="an engine with nothing to compute would sleep, and give back nothing that its workers have let go of.",
    upstream="vLLM 0.24 asks the connector (has_pending_push_work)",
    remove_when="vLLM 0.23 is no longer supported",
)


@HAS_REQUESTS.around
def has_requests(call: Call) -> bool:
    if call.proceed():
        return True
    pending = any(half.pending for half in halves(call.instance))
    if pending:
        push_scheduler.pace()
    return pending


ADD_REQUEST = Patch(
    target=ENGINE_SCHEDULER,
    attribute="add_request",
    process="scheduler",
    parameters=("self", "request"),
    versions="<0.22",
    needs="lease",
    why="the lease of a request that waits to be allocated would end, and prefill give its blocks to another.",
    upstream="vllm#41383; vLLM 0.22 tells the connector (on_new_request)",
    remove_when="vLLM 0.21 is no longer supported",
)


@ADD_REQUEST.around
def add_request(call: Call) -> None:
    for half in halves(call.instance):
        half.arrived(call.argument("request"))
    call.proceed()


SEAMS = (
    update_requests_with_invalid_blocks,
    handle_invalid_blocks,
    preempt_request,
    update_from_kv_xfer_finished,
    has_requests,
    add_request,
)
