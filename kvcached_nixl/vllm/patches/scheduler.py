# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM's scheduler and engine loop for events that vLLM does not report to a connector: a request's arrival,
its preemption, its failure.

Runs in: the engine-core process. The logic is in ``kvcached_nixl.scheduler``.
"""

from __future__ import annotations

from typing import Any

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.vllm.adapter.arrival import Arrival, arrival_of, drop_unknown_stops, give_own_id, load_once
from kvcached_nixl.vllm.adapter.attached_state import sides
from kvcached_nixl.vllm.adapter.locate import ENGINE_CORE_BASE, ENGINE_SCHEDULER
from kvcached_nixl.vllm.adapter.queues import bring_forward, hold
from kvcached_nixl.vllm.adapter.requests import drop_unless_mapping, hash_embeddings
from kvcached_nixl.vllm.adapter.states import align_chunks, stop_before_last
from kvcached_nixl.vllm.patches.actions.engine_blocks import bound_sides
from kvcached_nixl.vllm.patches.actions.step_output import (
    let_load_fail,
    note_tokens,
    reports_of,
    tell_finished,
    with_ended,
    with_refused,
    with_reports,
    with_told,
)
from kvcached_nixl.vllm.patches.resting import note_step
from kvcached_nixl.wire.step import FAILING


@Patch(
    target=ENGINE_SCHEDULER,
    attribute="add_request",
    process="scheduler",
    parameters=("self", "request"),
    why="the lease of a request that waits to be allocated would end, and prefill would reuse its blocks.",
    upstream="vllm#41383, vllm#38027; vLLM tells the connector alone (on_new_request)",
    remove_when="every supported vLLM tells the connector of a request's arrival, and of the scheduler",
).around
def add_request(call: Call) -> None:
    request = call.argument("request")
    drop_unless_mapping(request)
    arrival = arrival_of(call.instance, request)
    found = list(bound_sides(call.instance))
    for side in found:
        if arrival is Arrival.REPEATED or side.keeps(request.request_id):
            side.refuse(request.request_id, request.client_index)
            return
    is_held = False
    for side in found if arrival is Arrival.FIRST else ():
        # A worker may load an adapter's files again for any request that uses it, so identify it for every request.
        side.read.adapter_arrives(request.lora_request)
        is_held |= side.arrived(side.read(request), may_hold=not is_held)
    call.proceed()
    if is_held:
        hold(call.instance, request)


@Patch(
    target=ENGINE_CORE_BASE,
    attribute="preprocess_add_request",
    process="scheduler",
    parameters=("self", "request"),
    why="the request that vLLM adds for one that it has rejected has an id that the client chose. If a request whose "
    "blocks are kept has that id, the engine would end. So would it for stop tokens that the model does not have, and "
    "for an adapter whose files are incomplete. And prefill would hand over states behind a prompt's last token, "
    "from which decode cannot go back, or on a CPU cached states of other tokens than those of their blocks. "
    "Embeddings would be hashed on the engine's thread.",
    upstream="vllm/entrypoints/generate/base/serving.py: notify_kv_transfer_request_rejected; "
    "vllm/v1/sample/logits_processor/builtin.py: MinTokensLogitsProcessor; vllm/lora/worker_manager.py: load_inplace; "
    "v1/nixl/base_scheduler.py: _truncate_mamba_request_for_prefill; vllm/platforms/cpu.py: check_and_update_config",
    remove_when="vLLM gives such a request a unique id, checks stop tokens, loads an adapter once, asks its "
    "connector where prefill stops, and keeps the block size that its scheduler was made with",
).around
def preprocess_add_request(call: Call) -> Any:
    request = call.argument("request")
    give_own_id(request)
    drop_unknown_stops(request, call.instance.vllm_config.model_config.get_vocab_size())
    sides_here = list(bound_sides(call.instance.scheduler))
    for side in sides_here:
        load_once(request, side.read.is_loaded)
    if any(side.keeps_states for side in sides_here):
        align_chunks(call.instance.scheduler)
        stop_before_last(request)
    found = call.proceed()
    made, _ = found
    if sides_here and made.kv_transfer_params is not None:
        # Here on the thread that decodes requests: the engine's would make every request wait.
        hash_embeddings(made)
    return found


@Patch(
    target=ENGINE_SCHEDULER,
    attribute="update_from_output",
    process="scheduler",
    parameters=("self", "scheduler_output", "model_runner_output"),
    why="vLLM would take this package's reports for request ids and block ids, and a failed hand-over for a successful "
    "one.",
    upstream="vllm#52234 (failed receives of several KV-cache groups); vllm/v1/core/sched/scheduler.py",
    remove_when="vLLM's connectors can end a receive without its blocks",
).around
def update_from_output(call: Call) -> Any:
    output = call.argument("model_runner_output")
    reports = reports_of(output)
    ending: set[str] = set()
    refused: list[tuple[str, int]] = []
    found = list(bound_sides(call.instance))
    for side in found:
        side.collect(reports)
        ending |= side.take_ending()
        refused += side.take_refused()
    outputs = call.proceed(model_runner_output=with_reports(call.instance, output, reports))
    bring_forward(call.instance, reports.received)
    outputs = with_refused(with_ended(call.instance, outputs, ending), refused)
    for side in found:
        outputs = with_told(outputs, side.take_told())
    note_tokens(found, outputs)
    note_step(call.instance, call.argument("scheduler_output"), reports, outputs)
    return outputs


@Patch(
    target=ENGINE_SCHEDULER,
    attribute="_handle_invalid_blocks",
    process="scheduler",
    parameters=("self", "invalid_block_ids", "num_scheduled_tokens"),
    why="a hand-over that has failed would be taken for one that has succeeded.",
    upstream="vllm#52234: the stock method unpacks one KV-cache group and raises for more",
    remove_when="vLLM's connectors can name the requests whose load has failed",
).around
def handle_invalid_blocks(call: Call) -> Any:
    others = call.argument("invalid_block_ids") - {FAILING}
    failed = set(call.proceed(invalid_block_ids=others)) if others else set()
    for side in sides(call.instance.connector):
        failed |= let_load_fail(call.instance, side.take_failed(), side.starts_again)
    return failed


@Patch(
    target=ENGINE_SCHEDULER,
    attribute="_preempt_request",
    process="scheduler",
    parameters=("self", "request", "timestamp"),
    also_accepts=(("self", "request", "timestamp", "drop_stale_output"),),
    why="blocks of a preempted request would be reused while a WRITE reads them, and decode would get another "
    "request's KV.",
    upstream="nixl#2067: a posted transfer cannot be cancelled",
    remove_when="vLLM asks its connector before it frees the blocks of a preempted request",
).around
def preempt_request(call: Call) -> None:
    for side in sides(call.instance.connector):
        side.preempted(call.argument("request").request_id)
    call.proceed()


@Patch(
    target=ENGINE_SCHEDULER,
    attribute="_connector_finished",
    process="scheduler",
    parameters=("self", "request"),
    why="vLLM would first free the blocks that have left a sliding window: decode's while they are written, and "
    "prefill's that its manifest names.",
    upstream="vllm/v1/core/sched/scheduler.py: remove_skipped_blocks counts tokens that were generated",
    remove_when="vLLM tells its connector before it frees any block of a request",
).around
def connector_finished(call: Call) -> Any:
    request = call.argument("request")
    is_spared = any(side.spares(request.request_id) for side in sides(call.instance.connector))
    found = tell_finished(call.instance, request) if is_spared else call.proceed()
    if found[0]:
        for side in sides(call.instance.connector):
            side.kept(request.request_id)
    return found
