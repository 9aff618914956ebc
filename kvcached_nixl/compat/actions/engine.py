# SPDX-License-Identifier: Apache-2.0
"""Named access to vLLM's scheduler and its loop.

Sources: ``v1/core/sched/scheduler.py``, ``v1/core/sched/output.py``, ``v1/core/single_type_kv_cache_manager.py``,
``v1/engine/core.py``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvcached_nixl.compat.attached_state import side_of, sides
from kvcached_nixl.compat.metrics import take_reasons
from kvcached_nixl.compat.private import private
from kvcached_nixl.wire.step import BlockIds, Reports

__all__ = [
    "EngineBlocks",
    "blocks_of",
    "bound_sides",
    "core_of",
    "due_in_seconds",
    "is_whole",
    "let_load_fail",
    "queued",
    "remember",
    "reports_of",
    "scheduled",
    "tell_finished",
    "wait_for_input",
    "wake_of",
    "wants_blocks",
    "with_ended",
    "with_refused",
    "with_reports",
]

_CORE = "_kvcached_nixl_core"
_WHOLE = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
"""How a request ends that has computed its prompt to the end."""


@dataclass(frozen=True)
class EngineBlocks:
    """The KV-cache blocks of an engine."""

    engine_scheduler: Any

    @property
    def are_shared(self) -> bool:
        """Whether another connector may load KV into them, which may turn out to be no good (``MultiConnector``)."""
        return side_of(private(self.engine_scheduler, "connector")) is None

    @property
    def stalled(self) -> str | None:
        """The request that is next, if none runs: it waits for blocks, and no other one will free any."""
        scheduler = self.engine_scheduler
        # A scheduler that is paused begins nothing, whatever is free.
        if private(scheduler, "running") or private(scheduler, "pause_state"):
            return None
        return next((str(one.request_id) for one in queued(scheduler) if wants_blocks(one)), None)

    def take(self, request_id: str) -> list[Any]:
        """Take a request's blocks away from it without freeing them; vLLM finds none when it frees the request.

        vLLM's own reference count does not serve: kvcached counts none without prefix caching.
        """
        taken: list[Any] = []
        for manager in self._managers():
            taken += reversed(private(manager, "req_to_blocks").pop(request_id, []))
            private(manager, "num_cached_block").pop(request_id, None)
        return [block for block in taken if not block.is_null]

    def give_back(self, blocks: list[Any]) -> None:
        """Free what was taken."""
        private(private(self.engine_scheduler, "kv_cache_manager"), "block_pool").free_blocks(blocks)

    def let_go(self, request_id: str, *, recomputes: bool) -> int | None:
        """A request whose KV has come, and of which nothing is computed yet, loses it and its blocks between two steps.

        vLLM may have found already that it has come, and not have scheduled it since (other adapters run, or there is
        no room): it counts those tokens as computed then, whatever blocks it has.
        """
        request = private(self.engine_scheduler, "requests").get(request_id)
        if request is None or request.is_finished() or request in private(self.engine_scheduler, "running"):
            return None
        # Nothing is in flight into them any more. Those that vLLM has cached would be found again.
        taken = self.take(request_id)
        if not _waits(request):
            manager = private(self.engine_scheduler, "kv_cache_manager")
            manager.evict_blocks({block.block_id for block in taken})
        self.give_back(taken)
        request.num_computed_tokens = 0
        if recomputes:
            if _waits(request):
                private(self.engine_scheduler, "failed_recving_kv_req_ids").add(request_id)
            return None
        from vllm.v1.request import RequestStatus

        _count_cached(request)
        self.engine_scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
        return int(request.client_index)

    def forget_prefixes(self) -> bool:
        """Let no request begin with what others have computed. Returns whether nothing is left of it."""
        # Whoever has blocks goes on caching them. kvcached says that all is clear whatever is in use, below vLLM 0.26.
        if any(private(manager, "req_to_blocks") for manager in self._managers()):
            return False
        return bool(private(self.engine_scheduler, "kv_cache_manager").reset_prefix_cache())

    def first_tokens(self, num_tokens: int) -> tuple[int, ...]:
        """Per KV-cache group, the first token whose block is kept when so many are computed; it starts a block."""
        return tuple(
            manager.get_num_skipped_tokens(num_tokens) // manager.block_size * manager.block_size
            for manager in self._managers()
        )

    def _managers(self) -> Any:
        return private(private(self.engine_scheduler, "kv_cache_manager"), "coordinator").single_type_managers


def queued(engine_scheduler: Any) -> Iterator[Any]:
    """The requests that do not run, in vLLM's order."""
    # vLLM 0.28 keeps those that it has passed over in a queue of their own.
    for queue in (private(engine_scheduler, "waiting"), vars(engine_scheduler).get("skipped_waiting", ())):
        yield from queue


def wants_blocks(request: Any) -> bool:
    """Whether a request that does not run waits for its turn and for blocks, and for nothing else."""
    return request.status.name in ("WAITING", "PREEMPTED")


def bound_sides(engine_scheduler: Any) -> Iterator[Any]:
    """Our side of each NIXL connector of an engine; each knows whose blocks these are."""
    for side in sides(private(engine_scheduler, "connector")):
        side.bind(EngineBlocks(engine_scheduler))
        yield side


def tell_finished(engine_scheduler: Any, request: Any) -> Any:
    """Tell the connector that a request has ended; blocks that have left its window are still its own."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

    connector = private(engine_scheduler, "connector")
    block_ids = private(engine_scheduler, "kv_cache_manager").get_block_ids(request.request_id)
    # vLLM 0.19's MultiConnector knows one KV-cache group.
    if isinstance(connector, SupportsHMA):
        return connector.request_finished_all_groups(request, block_ids)
    return connector.request_finished(request, block_ids[0])


def is_whole(request: Any) -> bool:
    """Whether a request that ended has computed its prompt to the end."""
    return request.status.name in _WHOLE and request.num_computed_tokens >= request.num_prompt_tokens


def scheduled(scheduler_output: Any) -> Iterator[tuple[str, BlockIds, bool, int, int]]:
    """Each request of a step: id, block ids per group, whether they replace the earlier ones, tokens at the end, and at
    its begin."""
    tokens = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.block_ids, True, new.num_computed_tokens + tokens[new.req_id], new.num_computed_tokens
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, block_ids, num_computed_tokens in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        replaces = request_id in cached.resumed_req_ids
        yield request_id, block_ids or (), replaces, num_computed_tokens + tokens[request_id], num_computed_tokens


def blocks_of(blocks: Any) -> BlockIds:
    """Block ids per group of vLLM's ``KVCacheBlocks``."""
    found: BlockIds = blocks.get_block_ids()
    return found


def reports_of(model_runner_output: Any) -> Reports:
    """The reports of a step."""
    found = model_runner_output.kv_connector_output
    if found is None:
        return Reports(set(), set(), set())
    sent, received = set(found.finished_sending or ()), set(found.finished_recving or ())
    return Reports(sent, received, set(found.invalid_block_ids), take_reasons(found.kv_connector_stats))


def with_reports(engine_scheduler: Any, model_runner_output: Any, reports: Reports) -> Any:
    """The output of a step with these reports in place of its own; vLLM shares one output among all empty steps."""
    from vllm.v1.outputs import KVConnectorOutput

    before = model_runner_output.kv_connector_output
    if before is None and not (reports.sent or reports.received or reports.invalid):
        return model_runner_output
    requests = private(engine_scheduler, "requests")
    found = KVConnectorOutput() if before is None else copy.copy(before)
    # vLLM ends at an id that it does not know, at a request that neither waits nor has ended, and where one that has
    # ended is named twice: whoever is named first frees it (vllm#46240, vllm#51786).
    ended = {one for one in (reports.sent | reports.received) if one in requests and requests[one].is_finished()}
    waiting = {one for one in reports.received - ended if one in requests and _waits(requests[one])}
    found.finished_sending = reports.sent & ended
    found.finished_recving = (reports.received & ended) - reports.sent | waiting
    found.invalid_block_ids = reports.invalid
    output = copy.copy(model_runner_output)
    output.kv_connector_output = found
    return output


def _waits(request: Any) -> bool:
    return bool(request.status.name == "WAITING_FOR_REMOTE_KVS")


def _count_cached(request: Any) -> None:
    """vLLM <= 0.19 counts cached tokens, -1 until a request is scheduled, and its metrics raise on that."""
    if vars(request).get("num_cached_tokens", 0) < 0:
        request.num_cached_tokens = 0


def let_load_fail(engine_scheduler: Any, request_ids: set[str]) -> set[str]:
    """Have requests whose KV has not come fail or be computed anew, as ``kv_load_failure_policy`` says.

    They have no token that counts as computed, so vLLM frees what blocks they still have and starts them again.

    Returns: those that vLLM has to end with an error.
    """
    requests = private(engine_scheduler, "requests")
    ours = {request_id for request_id in request_ids if request_id in requests}
    for request_id in ours:
        requests[request_id].num_computed_tokens = 0
    if private(engine_scheduler, "recompute_kv_load_failures"):
        private(engine_scheduler, "failed_recving_kv_req_ids").update(ours)
        return set()
    for request_id in ours:
        _count_cached(requests[request_id])
    return ours


def with_ended(engine_scheduler: Any, outputs: Any, request_ids: set[str]) -> Any:
    """End requests with an error, and tell it with what a step has brought for clients."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    requests = private(engine_scheduler, "requests")
    for request in [requests[one] for one in request_ids if one in requests]:
        engine_scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        told = outputs.setdefault(request.client_index, EngineCoreOutputs())
        output = EngineCoreOutput(request.request_id, [], finish_reason=request.get_finished_reason())
        told.outputs = [*told.outputs, output]
    return outputs


def with_refused(outputs: Any, refused: Iterable[tuple[str, int]]) -> Any:
    """Tell clients, each by its index, that a request of theirs was not taken in; no other one's end is told."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    for request_id, client_index in refused:
        told = outputs.setdefault(client_index, EngineCoreOutputs())
        told.outputs = [*told.outputs, EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)]
    return outputs


def with_told(outputs: Any, told: dict[str, str]) -> Any:
    """Say with the ends of failed requests what their clients are told of it, where vLLM says nothing."""
    for of_client in outputs.values() if told else ():
        for output in of_client.outputs:
            if output.stop_reason is None and output.finish_reason is not None and output.finish_reason.name == "ERROR":
                output.stop_reason = told.get(output.request_id)
    return outputs


def remember(core: Any) -> None:
    """The loop around a scheduler is this one."""
    vars(core.scheduler)[_CORE] = core


def core_of(engine_scheduler: Any) -> Any:
    """The loop around a scheduler; None where there is none (an engine in its client's own process)."""
    return vars(engine_scheduler).get(_CORE)


def due_in_seconds(found: Iterable[Any]) -> float:
    """How long until these sides of an engine have something to do by themselves; infinite if they never have."""
    return min((due for side in found if (due := side.due_in_seconds) is not None), default=math.inf)


def wait_for_input(core: Any, seconds: float) -> bool:
    """Wait, on the engine's thread, for whatever enters the engine, a word of a worker among it.

    Returns: whether something has.
    """
    queue = core.input_queue
    with queue.not_empty:
        if not queue._qsize():
            queue.not_empty.wait(seconds)
        return bool(queue._qsize())


def wake_of(core: Any) -> Any:
    """What ends `wait_for_input`, and vLLM's own wait for requests; any thread may call it."""
    from vllm.v1.engine import EngineCoreRequestType

    return lambda: core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
