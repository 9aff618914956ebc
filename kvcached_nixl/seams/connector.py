# SPDX-License-Identifier: Apache-2.0
"""Where vLLM calls its NIXL connector: the layout it asks for, and everything of a push.

A connector that pushes has a half of ours beside each of its own (``push_of``), and each method below asks that one
instead. A connector that pulls has none, and goes on as it is.

Runs in: the configuration's methods in every process; the others in the engine core (scheduler) or the worker.
"""

from __future__ import annotations

from typing import Any

from kvcached_nixl.compat.attached import (
    attach_beats,
    attach_step,
    beats_of,
    ours_of,
    pull_of,
    push_of,
    sent_in,
    step_of,
)
from kvcached_nixl.compat.connector import WorkerView
from kvcached_nixl.compat.engine import blocks_of, is_idle, is_whole, scheduled
from kvcached_nixl.compat.locate import FACADE, PULL_FACADE
from kvcached_nixl.patching import Call, Patch, Target
from kvcached_nixl.patching.record import Process
from kvcached_nixl.scheduler.push import Progress
from kvcached_nixl.worker.memory_order import required_memory_order

REQUIRED_LAYOUT = Patch(
    target=FACADE,
    attribute="get_required_kvcache_layout",
    kind="classmethod",
    process="every",
    parameters=("cls", "vllm_config"),
    versions="<0.26",
    needs="layout",
    why="kvcached's memory is token-major (NHD) whatever is asked for; called head-major, heads and tokens would swap "
    "between peers that split heads differently.",
    upstream="kvcached#311; vLLM's 4-D packed caches (0.26) made the stock choice right",
    remove_when="vLLM 0.25 is no longer supported",
)


@REQUIRED_LAYOUT.around
def get_required_kvcache_layout(call: Call) -> str | None:
    return required_memory_order(call.proceed())


def _push(
    attribute: str,
    process: Process,
    parameters: tuple[str, ...],
    why: str,
    *,
    target: Target = FACADE,
    versions: str = "",
) -> Patch:
    return Patch(
        target=target,
        attribute=attribute,
        process=process,
        parameters=("self", *parameters),
        versions=versions,
        needs="push",
        why=why,
        upstream="vllm#45168 and vllm#48633 (push); vllm/distributed/kv_transfer/kv_connector/v1/base.py",
        remove_when="vLLM's own push streams, fails requests that are not served, and keeps blocks in flight",
    )


GET_NUM_NEW_MATCHED_TOKENS = _push(
    "get_num_new_matched_tokens",
    "scheduler",
    ("request", "num_computed_tokens"),
    "decode would not wait for what prefill writes.",
)


@GET_NUM_NEW_MATCHED_TOKENS.around
def get_num_new_matched_tokens(call: Call) -> Any:
    push = push_of(call.instance)
    if push is None:
        return call.proceed()
    return push.matched(call.argument("request"), call.argument("num_computed_tokens"))


UPDATE_STATE_AFTER_ALLOC = _push(
    "update_state_after_alloc",
    "scheduler",
    ("request", "blocks", "num_external_tokens"),
    "decode's blocks would be pulled into, and prefill would not know what to write.",
)


@UPDATE_STATE_AFTER_ALLOC.around
def update_state_after_alloc(call: Call) -> None:
    push, pull = push_of(call.instance), pull_of(call.instance)
    request, num_external_tokens = call.argument("request"), call.argument("num_external_tokens")
    if push is not None:
        push.allocated(request, blocks_of(call.argument("blocks")), num_external_tokens)
    else:
        pull.allocated(request, num_external_tokens)
        call.proceed()


BUILD_CONNECTOR_META = _push(
    "build_connector_meta", "scheduler", ("scheduler_output",), "the workers would hear nothing of a push."
)


@BUILD_CONNECTOR_META.around
def build_connector_meta(call: Call) -> Any:
    metadata, output = call.proceed(), call.argument("scheduler_output")
    push = push_of(call.instance)
    if push is None:
        return attach_beats(metadata, pull_of(call.instance).take_beats(is_idle=is_idle(output)))
    push.scheduled(Progress(*one) for one in scheduled(output))
    return attach_step(metadata, push.take_step())


REQUEST_FINISHED = _push(
    "request_finished", "scheduler", ("request", "block_ids"), "blocks would be reused while a WRITE reads them."
)


@REQUEST_FINISHED.around
def request_finished(call: Call) -> Any:
    return _finished(call, (call.argument("block_ids"),))


REQUEST_FINISHED_ALL_GROUPS = _push(
    "request_finished_all_groups",
    "scheduler",
    ("request", "block_ids"),
    "blocks would be reused while a WRITE reads them.",
)


@REQUEST_FINISHED_ALL_GROUPS.around
def request_finished_all_groups(call: Call) -> Any:
    return _finished(call, call.argument("block_ids"))


def _finished(call: Call, block_ids: tuple[list[int], ...]) -> Any:
    push, request = push_of(call.instance), call.argument("request")
    if push is not None:
        return push.finished(request, is_whole(request), block_ids)
    is_kept, params = call.proceed()
    pull_of(call.instance).finished(request.request_id, is_kept)
    return is_kept, params


ON_NEW_REQUEST = _push(
    "on_new_request",
    "scheduler",
    ("request",),
    "the lease of a request that waits to be allocated would end, and prefill give its blocks to another.",
    versions=">=0.22",
)


@ON_NEW_REQUEST.around
def on_new_request(call: Call) -> None:
    push = push_of(call.instance)
    if push is None:
        call.proceed()
    else:
        push.arrived(call.argument("request"))


HAS_PENDING_PUSH_WORK = _push(
    "has_pending_push_work",
    "scheduler",
    (),
    "an engine with nothing to compute would sleep, and give back nothing that its workers have let go of.",
    versions=">=0.24",
)


@HAS_PENDING_PUSH_WORK.around
def has_pending_push_work(call: Call) -> bool:
    return ours_of(call.instance).pending or bool(call.proceed())


START_LOAD_KV = _push(
    "start_load_kv",
    "worker",
    ("forward_context", "kwargs"),
    "registrations would not be sent.",
    target=PULL_FACADE,
)


@START_LOAD_KV.around
def start_load_kv(call: Call) -> None:
    push = push_of(call.instance)
    if push is not None:
        push.begin_step(step_of(call.instance))
        return
    pull, worker = pull_of(call.instance), WorkerView(call.instance.connector_worker)
    pull.forget_lost_peers(worker)
    call.proceed()
    pull.begin_step(worker, sent_in(call.instance), beats_of(call.instance))


WAIT_FOR_SAVE = _push("wait_for_save", "worker", (), "what a step computed would not be offered.")


@WAIT_FOR_SAVE.around
def wait_for_save(call: Call) -> None:
    push = push_of(call.instance)
    if push is None:
        call.proceed()
    else:
        push.end_step()


GET_FINISHED = _push(
    "get_finished",
    "worker",
    ("finished_req_ids",),
    "the stock worker would take the writer thread's notifications, and requests would wait for ever.",
)


@GET_FINISHED.around
def get_finished(call: Call) -> tuple[set[str], set[str]]:
    push = push_of(call.instance)
    if push is None:
        found: tuple[set[str], set[str]] = call.proceed()
        return found
    ended = push.take_ended()
    worker = WorkerView(call.instance.connector_worker)
    worker.report_failed_receives(len(ended.failed), ended.invalid)
    worker.count_expired(len(ended.expired))
    return ended.sent, ended.received


SEAMS = (
    get_required_kvcache_layout,
    get_num_new_matched_tokens,
    update_state_after_alloc,
    build_connector_meta,
    request_finished,
    request_finished_all_groups,
    on_new_request,
    has_pending_push_work,
    start_load_kv,
    wait_for_save,
    get_finished,
)
