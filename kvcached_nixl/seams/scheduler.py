# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's scheduler and its loop tell a connector nothing: a request's arrival, its preemption, its failure.

Runs in: the engine-core process. Logic lives in ``kvcached_nixl.scheduler``.
"""

from __future__ import annotations

from typing import Any

from kvcached_nixl.compat.actions.engine import (
    bound_sides,
    let_load_fail,
    remember,
    reports_of,
    tell_finished,
    wake_of,
    with_ended,
    with_refused,
    with_reports,
    with_told,
)
from kvcached_nixl.compat.actions.pausing import drains
from kvcached_nixl.compat.actions.resting import note_step, rest
from kvcached_nixl.compat.arrival import Arrival, arrival_of, drop_unknown_stops, give_own_id, load_once
from kvcached_nixl.compat.attached_state import sides
from kvcached_nixl.compat.locate import ENGINE_CORE, ENGINE_CORE_BASE, ENGINE_SCHEDULER, ENGINE_SCHEDULER_INTERFACE
from kvcached_nixl.compat.series import ASKS_FOR_WORK
from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.wire.step import FAILING

REST_SECONDS = 5.0
"""An engine that only waits looks around as often, should nobody wake it.

After each step vLLM's workers look for another one for a second (``SpinCondition``): with ten steps a second each of
them would keep a core.
"""

ADD_REQUEST = Patch(
    target=ENGINE_SCHEDULER,
    attribute="add_request",
    process="scheduler",
    parameters=("self", "request"),
    needs="lease",
    why="the lease of a request that waits to be allocated would end, and prefill give its blocks to another.",
    upstream="vllm#41383, vllm#38027; vLLM 0.22 tells the connector (on_new_request)",
    remove_when="every supported vLLM tells the connector of a request's arrival, and of the scheduler",
)


@ADD_REQUEST.around
def add_request(call: Call) -> None:
    request = call.argument("request")
    arrival = arrival_of(call.instance, request)
    for side in bound_sides(call.instance):
        if arrival is Arrival.REPEATED or side.keeps(request.request_id):
            side.refuse(request.request_id, request.client_index)
            return
        if arrival is Arrival.FIRST:
            # A worker may read an adapter again for any request that asks for it, handed over or not.
            side.read.adapter_of(request.lora_request)
            side.arrived(side.read(request))
    call.proceed()


PREPROCESS_ADD_REQUEST = Patch(
    target=ENGINE_CORE_BASE,
    attribute="preprocess_add_request",
    process="scheduler",
    parameters=("self", "request"),
    needs="lease",
    why="what vLLM adds for a request that it has rejected has an id of a client's choice: that of a request that is "
    "kept ends the engine, as stop tokens do that the model has not, and an adapter's files that are half written.",
    upstream="vllm/entrypoints/generate/base/serving.py: notify_kv_transfer_request_rejected; "
    "vllm/v1/sample/logits_processor/builtin.py: MinTokensLogitsProcessor; vllm/lora/worker_manager.py: load_inplace",
    remove_when="vLLM gives such a request an id of its own, checks stop tokens, and loads an adapter once",
)


@PREPROCESS_ADD_REQUEST.around
def preprocess_add_request(call: Call) -> Any:
    request = call.argument("request")
    give_own_id(request)
    drop_unknown_stops(request, call.instance.vllm_config.model_config.get_vocab_size())
    for side in bound_sides(call.instance.scheduler):
        load_once(request, side.read.is_loaded)
    return call.proceed()


UPDATE_FROM_OUTPUT = Patch(
    target=ENGINE_SCHEDULER,
    attribute="update_from_output",
    process="scheduler",
    parameters=("self", "scheduler_output", "model_runner_output"),
    needs="pull",
    why="vLLM would take our words for request ids and blocks, and a hand-over that has failed for one that is there.",
    upstream="vllm#52234 (failed receives of several KV-cache groups); vllm/v1/core/sched/scheduler.py",
    remove_when="vLLM's connectors may end a receive without its blocks",
)


@UPDATE_FROM_OUTPUT.around
def update_from_output(call: Call) -> Any:
    output = call.argument("model_runner_output")
    reports = reports_of(output)
    ending: set[str] = set()
    refused: list[tuple[str, int]] = []
    for side in bound_sides(call.instance):
        side.collect(reports)
        ending |= side.take_ending()
        refused += side.take_refused()
    outputs = call.proceed(model_runner_output=with_reports(call.instance, output, reports))
    outputs = with_refused(with_ended(call.instance, outputs, ending), refused)
    for side in bound_sides(call.instance):
        outputs = with_told(outputs, side.take_told())
    note_step(call.instance, call.argument("scheduler_output"), reports, outputs)
    return outputs


HANDLE_INVALID_BLOCKS = Patch(
    target=ENGINE_SCHEDULER,
    attribute="_handle_invalid_blocks",
    process="scheduler",
    parameters=("self", "invalid_block_ids", "num_scheduled_tokens"),
    needs="pull",
    why="a hand-over that has failed would be taken for one that is there.",
    upstream="vllm#52234: the stock method unpacks one KV-cache group and raises for more",
    remove_when="vLLM's connectors name requests whose load has failed",
)


@HANDLE_INVALID_BLOCKS.around
def handle_invalid_blocks(call: Call) -> Any:
    others = call.argument("invalid_block_ids") - {FAILING}
    failed = set(call.proceed(invalid_block_ids=others)) if others else set()
    for side in sides(call.instance.connector):
        failed |= let_load_fail(call.instance, side.take_failed())
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
    for side in sides(call.instance.connector):
        side.preempted(call.argument("request").request_id)
    call.proceed()


CONNECTOR_FINISHED = Patch(
    target=ENGINE_SCHEDULER,
    attribute="_connector_finished",
    process="scheduler",
    parameters=("self", "request"),
    needs="pull",
    why="vLLM frees what has left a sliding window first: decode's blocks while they are written, and prefill's that "
    "decode was told of.",
    upstream="vllm/v1/core/sched/scheduler.py: remove_skipped_blocks counts tokens that were generated",
    remove_when="vLLM tells its connector before it frees any block of a request",
)


@CONNECTOR_FINISHED.around
def connector_finished(call: Call) -> Any:
    request = call.argument("request")
    is_spared = any(side.spares(request.request_id) for side in sides(call.instance.connector))
    found = tell_finished(call.instance, request) if is_spared else call.proceed()
    if found[0]:
        for side in sides(call.instance.connector):
            side.kept(request.request_id)
    return found


HAS_REQUESTS = Patch(
    target=ENGINE_SCHEDULER_INTERFACE,
    attribute="has_requests",
    process="scheduler",
    parameters=("self",),
    versions=ASKS_FOR_WORK.earlier,
    needs="pull",
    why="an engine with nothing to compute would sleep, and give back nothing that its workers have let go of.",
    upstream="vLLM 0.24 asks the connector (has_pending_push_work)",
    remove_when="vLLM 0.23 is no longer supported",
)


@HAS_REQUESTS.around
def has_requests(call: Call) -> bool:
    found = list(sides(call.instance.connector))
    if call.proceed() or any(side.pending for side in found):
        return True
    # What is kept counts as work from vLLM 0.22 on.
    return drains(call.instance) and any(side.num_kept for side in found)


PROCESS_INPUT_QUEUE = Patch(
    target=ENGINE_CORE,
    attribute="_process_input_queue",
    process="scheduler",
    parameters=("self",),
    needs="pull",
    why="an engine that sleeps would not hear that its workers have let go of blocks, and one that waits for KV would "
    "step a thousand times a second.",
    upstream="vllm#45168; vllm/v1/engine/core.py",
    remove_when="vLLM lets a connector wake its engine",
)


@PROCESS_INPUT_QUEUE.around
def process_input_queue(call: Call) -> None:
    remember(call.instance)
    for side in bound_sides(call.instance.scheduler):
        side.bind_wake(wake_of(call.instance))
    rest(call.instance, REST_SECONDS)
    call.proceed()


SEAMS = (
    preprocess_add_request,
    add_request,
    update_from_output,
    handle_invalid_blocks,
    preempt_request,
    connector_finished,
    has_requests,
    process_input_queue,
)
