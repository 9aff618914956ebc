# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler hands to its workers in a step, and gets back: which requests were computed, have got their KV,
have failed, were preempted, or have ended.

Runs in: the engine-core process.
Sources: ``v1/core/sched/scheduler.py``, ``v1/core/sched/output.py``, ``v1/outputs.py``; vllm#52234 (failed receives
of several KV-cache groups).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.scheduler.context import Progress
from kvcached_nixl.vllm.adapter.attributes import optional, private, reports_in, sides
from kvcached_nixl.vllm.adapter.locate import ENGINE_SCHEDULER
from kvcached_nixl.vllm.adapter.metrics import add_lasted, take_timelines
from kvcached_nixl.vllm.adapter.queues import bring_forward, waits_for_kv
from kvcached_nixl.vllm.patches.engine_blocks import bound_sides
from kvcached_nixl.vllm.patches.tier import tier_of
from kvcached_nixl.wire.step import FAILING, Report, Reports

_WHOLE = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
"""Final statuses of a request that has computed its whole prompt."""
STOOD_STILL = "_kvcached_nixl_stood_still"
"""Of vLLM's scheduler: its last step has changed nothing."""


def scheduled(scheduler_output: Any) -> Iterator[Progress]:
    """Each request of a step."""
    tokens = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        before = new.num_computed_tokens
        yield Progress(new.req_id, new.block_ids, True, before + tokens[new.req_id], before)
    cached = scheduler_output.scheduled_cached_reqs
    running = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
    for request_id, block_ids, before in running:
        replaces = request_id in cached.resumed_req_ids
        yield Progress(request_id, block_ids or (), replaces, before + tokens[request_id], before)


@Patch(ENGINE_SCHEDULER, "update_from_output", "scheduler", "self scheduler_output model_runner_output")
def update_from_output(call: Call) -> Any:
    """Without it, vLLM would take this package's reports for request ids and block ids, and a failed hand-over for a
    successful one. Until vLLM's connectors can end a receive without its blocks."""
    output = call.argument("model_runner_output")
    tier = tier_of(call.instance)
    if tier is not None:
        tier.ended(optional(output.kv_connector_output, "kv_connector_worker_meta"))
    reports = reports_of(output)
    found = list(bound_sides(call.instance))
    for side in found:
        side.collect(reports)
        miscounted, side.num_miscounted_tokens = side.num_miscounted_tokens, 0
        if (stats := private(call.instance, "connector_prefix_cache_stats")) is not None:
            # vLLM counts prompts that no cache may serve, as with ``prompt_logprobs``, as missed in the external cache,
            # and leaves them out of the queries of its own (vllm#57596). A release that counts rightly must not see a
            # counter fall: Prometheus' client raises, and the server ends.
            stats.queries = max(0, stats.queries - miscounted)
    outputs = call.proceed(model_runner_output=with_reports(call.instance, output, reports))
    bring_forward(call.instance, reports.received)
    end_requests(call.instance, outputs, reports.ending, reports.refused)
    for side in found:
        tell_reasons(outputs, side.engine.failures.take_ended())
        if side.awaits_tokens:
            told = (one for of_client in outputs.values() for one in of_client.outputs)
            side.answered([one.request_id for one in told if one.new_token_ids])
    note_step(call.instance, call.argument("scheduler_output"), reports, outputs)
    return outputs


def reports_of(model_runner_output: Any) -> Reports:
    found = model_runner_output.kv_connector_output
    reports = Reports()
    if found is not None:
        reports.sent |= found.finished_sending or set()
        reports.received |= found.finished_recving or set()
        reports.invalid |= found.invalid_block_ids
        reports.timelines += take_timelines(found.kv_connector_stats)
        for one in reports_in(found.kv_connector_worker_meta):
            reports.report.add(one)
    return reports


def has_reports(model_runner_output: Any) -> bool:
    """Whether a step's output reports anything; nothing is taken out of it."""
    found = model_runner_output.kv_connector_output
    return found is not None and bool(
        found.finished_sending
        or found.finished_recving
        or found.invalid_block_ids
        or list(reports_in(found.kv_connector_worker_meta))
    )


def with_reports(engine_scheduler: Any, model_runner_output: Any, reports: Reports) -> Any:
    """A copy of a step's output with these reports in place of its own. vLLM shares one output among empty steps."""
    from vllm.v1.outputs import KVConnectorOutput

    before = model_runner_output.kv_connector_output
    if before is not None:
        add_lasted(before.kv_connector_stats, reports.lasted)
    has_own = before is not None and (before.finished_sending or before.finished_recving or before.invalid_block_ids)
    if not (has_own or reports.sent or reports.received or reports.invalid):
        return model_runner_output
    requests = private(engine_scheduler, "requests")
    found = KVConnectorOutput() if before is None else copy.copy(before)
    # vLLM's engine ends if a report names an unknown id, a request that neither waits nor has finished, or a finished
    # request twice: the first report frees it (vllm#46240, vllm#51786).
    ended = {one for one in (reports.sent | reports.received) if one in requests and requests[one].is_finished()}
    waiting = {one for one in reports.received - ended if one in requests and waits_for_kv(requests[one])}
    found.finished_sending = reports.sent & ended
    found.finished_recving = (reports.received & ended) - reports.sent | waiting
    found.invalid_block_ids = reports.invalid
    output = copy.copy(model_runner_output)
    output.kv_connector_output = found
    return output


def end_requests(engine_scheduler: Any, outputs: Any, ending: set[str], refused: Iterable[tuple[str, int]]) -> None:
    """Add to a step's outputs for clients that requests have ended with an error: those that vLLM has to end, and
    (request id, client index) of those that were refused before they entered the engine."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.request import RequestStatus

    requests = private(engine_scheduler, "requests")
    ended: list[tuple[str, int, Any]] = []
    for request in [requests[one] for one in ending if one in requests]:
        engine_scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        ended.append((request.request_id, request.client_index, request.get_finished_reason()))
    ended += [(*one, FinishReason.ERROR) for one in refused]
    for request_id, client_index, reason in ended:
        told = outputs.setdefault(client_index, EngineCoreOutputs())
        told.outputs = [*told.outputs, EngineCoreOutput(request_id, [], finish_reason=reason)]


def tell_reasons(outputs: Any, told: dict[str, str]) -> None:
    """Add the reason for clients to the outputs of failed requests that have none from vLLM."""
    for of_client in outputs.values() if told else ():
        for output in of_client.outputs:
            if output.stop_reason is None and output.finish_reason is not None and output.finish_reason.name == "ERROR":
                output.stop_reason = told.get(output.request_id)


def note_step(engine_scheduler: Any, scheduler_output: Any, reports: Reports, outputs: Any) -> None:
    """Remember whether a step has changed anything, by its reports after our facades have handled them, and by its
    outputs for clients."""
    has_moved = (
        scheduler_output.total_num_scheduled_tokens
        or private(scheduler_output, "preempted_req_ids")
        or scheduler_output.finished_req_ids
        or reports.sent
        or reports.received
        or reports.invalid
        or reports.report != Report()
        or any(one.outputs for one in outputs.values())
    )
    setattr(engine_scheduler, STOOD_STILL, not has_moved)


@Patch(ENGINE_SCHEDULER, "_handle_invalid_blocks", "scheduler", "self invalid_block_ids num_scheduled_tokens")
def handle_invalid_blocks(call: Call) -> Any:
    """Without it, a hand-over that has failed would be taken for one that has succeeded. Until vLLM's connectors can
    name the requests whose load has failed.

    Fail or recompute requests that received no KV, as ``kv_load_failure_policy`` says.

    None of their tokens counts as computed, so vLLM frees the blocks that they still have and starts them again.

    Returns: the requests that vLLM has to end with an error.
    """
    scheduler = call.instance
    others = call.argument("invalid_block_ids") - {FAILING}
    ending = set(call.proceed(invalid_block_ids=others)) if others else set()
    if others and (tier := tier_of(scheduler)) is not None:
        # It may have stored them: its job was made together with the step that has loaded them.
        tier.forget()
    requests = private(scheduler, "requests")
    recomputes = private(scheduler, "recompute_kv_load_failures")
    for side in sides(scheduler.connector):
        for request_id in side.take_failed() & requests.keys():
            requests[request_id].num_computed_tokens = 0
            if side.asking.may_ask_again(request_id) or recomputes:
                private(scheduler, "failed_recving_kv_req_ids").add(request_id)
            else:
                ending.add(request_id)
    return ending


@Patch(ENGINE_SCHEDULER, "_preempt_request", "scheduler", "self request timestamp drop_stale_output?")
def preempt_request(call: Call) -> None:
    """Without it, blocks of a preempted request would be reused while a WRITE reads them, and decode would get another
    request's KV (nixl#2067: a posted transfer cannot be cancelled). Until vLLM asks its connector before it frees the
    blocks of a preempted request."""
    for side in sides(call.instance.connector):
        side.offering.preempted(call.argument("request").request_id)
    call.proceed()


@Patch(ENGINE_SCHEDULER, "_connector_finished", "scheduler", "self request")
def connector_finished(call: Call) -> Any:
    """Without it, vLLM would first free the blocks that have left a sliding window: decode's while they are written,
    and prefill's that its manifest names. And a streaming session that was ended would go on without its beginning.
    Until vLLM tells its connector before it frees any block of a request, and no input begins such a session anew."""
    request, tier = call.argument("request"), tier_of(call.instance)
    if tier is not None:
        tier.finished(request.request_id)
    if private(request, "resumable"):
        for side in sides(call.instance.connector):
            side.engine.failures.sessions.append(request.request_id)
    is_spared = any(side.spares(request.request_id) for side in sides(call.instance.connector))
    found = tell_finished(call.instance, request) if is_spared else call.proceed()
    if found[0]:
        for side in sides(call.instance.connector):
            side.kept(request.request_id)
    return found


def tell_finished(engine_scheduler: Any, request: Any) -> Any:
    """Tell the connector that a request has finished, with all its block ids, including blocks outside its window."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

    connector = private(engine_scheduler, "connector")
    block_ids = private(engine_scheduler, "kv_cache_manager").get_block_ids(request.request_id)
    # Another package's connector, with NIXL's inside it, may support one KV-cache group only.
    if isinstance(connector, SupportsHMA):
        return connector.request_finished_all_groups(request, block_ids)
    return connector.request_finished(request, block_ids[0])


def is_whole(request: Any) -> bool:
    return request.status.name in _WHOLE and request.num_computed_tokens >= request.num_prompt_tokens
