# SPDX-License-Identifier: Apache-2.0
"""Named access to the private state of vLLM's scheduler and of the engine core around it.

Sources: ``v1/core/sched/scheduler.py``, ``v1/core/sched/output.py``, ``v1/core/single_type_kv_cache_manager.py``,
``v1/engine/core.py``.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvcached_nixl.compat.actions.engine_name import wants_of
from kvcached_nixl.compat.attached_state import side_of, sides
from kvcached_nixl.compat.metrics import add_lasted, take_reasons, take_timelines
from kvcached_nixl.compat.platform import device_name
from kvcached_nixl.compat.private import optional, private
from kvcached_nixl.compat.versions import installed_row
from kvcached_nixl.naming.wants import Want, Wants
from kvcached_nixl.wire.headroom import BlockUsage
from kvcached_nixl.wire.step import BlockIds, Reports

__all__ = [
    "EngineBlocks",
    "blocks_of",
    "bound_sides",
    "core_of",
    "due_in_seconds",
    "has_call",
    "is_whole",
    "let_load_fail",
    "queued",
    "remember",
    "reports_of",
    "scheduled",
    "startable",
    "tell_finished",
    "wait_for_input",
    "wake_of",
    "wants_blocks",
    "with_ended",
    "with_refused",
    "with_reports",
]

logger = logging.getLogger("vllm.kvcached_nixl")

_CORE = "_kvcached_nixl_core"
_WHOLE = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
"""Final statuses of a request that has computed its whole prompt."""


@dataclass(frozen=True)
class EngineBlocks:
    """The KV-cache blocks of an engine."""

    engine_scheduler: Any

    @property
    def are_shared(self) -> bool:
        """Whether another connector may load KV into them, which may fail (``MultiConnector``)."""
        return side_of(private(self.engine_scheduler, "connector")) is None

    @property
    def is_producer(self) -> bool:
        """Whether vLLM's scheduler takes the engine for one that only offers KV; below a ``MultiConnector``, too."""
        return not private(self.engine_scheduler, "vllm_config").kv_transfer_config.is_kv_consumer

    @property
    def stalled(self) -> str | None:
        """The next request, if none runs: it waits for blocks, and no running request will free any."""
        scheduler = self.engine_scheduler
        if private(scheduler, "running"):
            return None
        return next((str(one.request_id) for one in startable(scheduler) if wants_blocks(one)), None)

    @property
    def starved(self) -> tuple[str, int] | None:
        """The next request that vLLM would start, and how many more blocks it needs than are free.

        vLLM starts it when all of its prompt fits. Its look-ahead and its reserve for running requests add a few
        blocks, which count only if nothing runs: otherwise blocks come free.
        """
        scheduler = self.engine_scheduler
        request = next((one for one in startable(scheduler) if wants_blocks(one)), None)
        if request is None or len(private(scheduler, "running")) >= private(scheduler, "max_num_running_reqs"):
            return None
        managers = self._managers()
        needed = sum(_blocks_of(manager, request) for manager in managers)
        missing = needed - int(self._pool.get_num_free_blocks())
        if missing > 0:
            missing -= self._num_shared(request)
        if missing <= 0 and not private(self.engine_scheduler, "running"):
            missing = int(missing + len(managers) > 0)
        return (request.request_id, missing) if missing > 0 else None

    @property
    def blocks_over_limit(self) -> int:
        """How many allocated blocks exceed kvcached's limit, whether kvcached has applied it already (it does so when
        it allocates) or not; at least one if blocks keep more pages in use than the limit has."""
        manager = optional(self._pool, "kv_cache_manager")
        if manager is None:
            return 0
        pages = private(manager, "page_allocator")
        # Of the keys or values of one layer. 0 if the limit was never changed.
        limit_bytes = pages.get_resize_target()
        if limit_bytes <= 0:
            return 0
        allowed = limit_bytes // private(manager, "block_mem_size")
        exceeds = pages.get_num_inuse_pages() > limit_bytes // private(manager, "page_size")
        return max(int(exceeds), int(private(manager, "_get_num_alloced_blocks")()) - allowed)

    def usage(self) -> BlockUsage:
        """As seen from any thread: the engine's own may change things meanwhile, so a failure means "ask again"."""
        pool, scheduler = self._pool, self.engine_scheduler
        num_free = int(pool.get_num_free_blocks())
        manager = optional(pool, "kv_cache_manager")
        free_bytes, num_used = 0, int(private(pool, "num_gpu_blocks")) - 1 - num_free
        if manager is not None:
            pages = private(manager, "page_allocator")
            free_bytes = int(pages.get_avail_physical_pages() * private(manager, "page_size") * _num_buffers(manager))
            cached = len(optional(pool, "_evictable_blocks", ()))
            # The null block is allocated for good.
            num_used = int(private(manager, "_get_num_alloced_blocks")()) - 1 - cached
        queued_tokens = sum(one.num_prompt_tokens for one in list(queued(scheduler)) if wants_blocks(one))
        return BlockUsage(num_free, max(0, num_used), free_bytes, queued_tokens)

    def mapped_bytes(self) -> int:
        """As seen from any thread. Each rank has mapped as much on its device."""
        manager = optional(self._pool, "kv_cache_manager")
        if manager is None:
            return 0
        pages = private(manager, "page_allocator")
        num_pages = pages.get_num_inuse_pages() + pages.get_num_reserved_pages()
        return int(num_pages * private(manager, "page_size") * _num_buffers(manager))

    def apply_limit(self) -> None:
        """kvcached applies a changed limit in its next allocation, and vLLM asks for none that exceeds the free blocks
        of before: a limit that was raised again would never count."""
        manager = optional(self._pool, "kv_cache_manager")
        if manager is not None and private(manager, "page_allocator").get_resize_target() > 0:
            manager.alloc(0)

    def tell_neighbours(self) -> bool:
        """Say how much memory the next request waits for that the device does not have. Returns whether it is any."""
        if self._wants is None:
            return False
        starved = self.starved
        num_bytes = 0 if starved is None else min(starved[1] * self._block_bytes, self._bytes_to_map)
        self._wants.say(Want(num_bytes, not private(self.engine_scheduler, "running")))
        return num_bytes > 0

    def wanted_by_neighbours(self) -> tuple[int, bool]:
        """What other engines lack, in blocks of this one. What they could still map of the device's free memory they
        have left out."""
        if self._wants is None:
            return 0, False
        want = self._wants.of_others()
        return (-(-want.num_bytes // self._block_bytes) if want.num_bytes else 0), want.is_stalled

    def neighbours_served(self) -> None:
        if self._wants is not None:
            self._wants.served()

    def drop_cached(self, num_blocks: int) -> int:
        """Free blocks that only the prefix cache keeps, whole pages first."""
        evict = optional(self._pool, "_evict_blocks_from_pool")
        return 0 if evict is None or num_blocks <= 0 else int(evict(num_blocks))

    def trim(self) -> int:
        """Give the device back what kvcached has mapped in advance. Returns how many blocks would have fitted."""
        manager = optional(self._pool, "kv_cache_manager")
        if manager is None or not (num_pages := int(private(manager, "page_allocator").get_num_reserved_pages())):
            return 0
        manager.trim()
        return num_pages * int(private(manager, "page_size")) // int(private(manager, "block_mem_size"))

    def take(self, request_id: str) -> list[Any]:
        """Take a request's blocks away without freeing them, so that vLLM finds none when it frees the request.

        vLLM's reference count cannot be used: kvcached counts no references without prefix caching.
        """
        taken: list[Any] = []
        for manager in self._managers():
            taken += reversed(private(manager, "req_to_blocks").pop(request_id, []))
            # Frees no block now, but forgets what else vLLM notes of them: which of them has the state.
            private(manager, "free")(request_id)
        return [block for block in taken if not block.is_null]

    def give_back(self, blocks: list[Any]) -> None:
        """Free blocks that `take` returned."""
        self._pool.free_blocks(blocks)

    def let_go(self, request_id: str, *, recomputes: bool) -> int | None:
        """Between two steps, drop the received KV and the blocks of a request that has computed nothing since.

        vLLM may have noticed the KV already without scheduling the request since (other adapters run, or there are no
        free blocks). It then counts those tokens as computed, whatever blocks the request has.

        Returns: the index of the client, if the request was ended with an error; None if it is recomputed, or if it
        runs, has finished or is unknown.
        """
        request = private(self.engine_scheduler, "requests").get(request_id)
        if request is None or request.is_finished() or request in private(self.engine_scheduler, "running"):
            return None
        # Nothing is in flight into these blocks any more. Those in vLLM's prefix cache would be found again.
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
        """Clear the prefix cache, so that no request begins with earlier KV. Returns whether it is empty now."""
        # A request that has blocks goes on caching them. Below vLLM 0.26 kvcached reports success whatever is in use.
        if any(private(manager, "req_to_blocks") for manager in self._managers()):
            return False
        return bool(private(self.engine_scheduler, "kv_cache_manager").reset_prefix_cache())

    def first_tokens(self, num_tokens: int) -> tuple[int, ...]:
        """Per KV-cache group, the first token of the first block that is kept when ``num_tokens`` are computed."""
        return tuple(
            manager.get_num_skipped_tokens(num_tokens) // manager.block_size * manager.block_size
            for manager in self._managers()
        )

    def _num_shared(self, request: Any) -> int:
        """How many blocks of a waiting request's prompt others use now, so that they need not be allocated."""
        manager = private(self.engine_scheduler, "kv_cache_manager")
        if not private(manager, "enable_caching"):
            return 0
        coordinator = private(manager, "coordinator")
        hits = coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[0]
        return sum(block.ref_cnt > 0 and not block.is_null for group in hits for block in group)

    @functools.cached_property
    def _wants(self) -> Wants | None:
        if optional(self._pool, "kv_cache_manager") is None:
            return None
        parallel = private(self.engine_scheduler, "vllm_config").parallel_config
        try:
            device = device_name(private(parallel, "data_parallel_rank_local") or 0)
        except Exception as error:  # noqa: BLE001 - drivers raise anything, and no engine may end for a hint
            logger.warning("Engines on one device do not give way to each other: it cannot be identified: %r", error)
            return None
        return None if device is None else wants_of(device)

    @property
    def _bytes_to_map(self) -> int:
        """How much more of the device kvcached would map for this pool if there were more; 0 if there is enough."""
        manager = private(self._pool, "kv_cache_manager")
        pages = private(manager, "page_allocator")
        free = pages.get_avail_physical_pages() + pages.get_num_reserved_pages()
        return max(0, int((pages.get_num_free_pages() - free) * private(manager, "page_size") * _num_buffers(manager)))

    @property
    def _block_bytes(self) -> int:
        manager = private(self._pool, "kv_cache_manager")
        return int(private(manager, "block_mem_size") * _num_buffers(manager))

    @property
    def _pool(self) -> Any:
        return private(private(self.engine_scheduler, "kv_cache_manager"), "block_pool")

    def _managers(self) -> Any:
        return private(private(self.engine_scheduler, "kv_cache_manager"), "coordinator").single_type_managers


def _num_buffers(manager: Any) -> int:
    """In how many buffers kvcached maps each page: keys and values of every layer."""
    return int(private(manager, "num_layers") * private(manager, "num_kv_buffers"))


def _blocks_of(manager: Any, request: Any) -> int:
    """How many blocks of one KV-cache group a request needs for its prompt, in addition to those that it has."""
    first_block = manager.get_num_skipped_tokens(request.num_tokens) // manager.block_size
    needed = -(-request.num_tokens // manager.block_size) - first_block
    return max(0, needed - len(private(manager, "req_to_blocks").get(request.request_id, ())))


def queued(engine_scheduler: Any) -> Iterator[Any]:
    """The requests that do not run, in vLLM's order."""
    # From 0.31 on vLLM has a queue of those that hold KV, and schedules them first; before, one of those it skipped.
    holding = optional(engine_scheduler, "kv_holding_waiting")
    if holding is not None:
        yield from holding
    yield from private(engine_scheduler, "waiting")
    if holding is None:
        yield from private(engine_scheduler, "skipped_waiting")


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


def bound_sides(engine_scheduler: Any) -> Iterator[Any]:
    """Our scheduler facade of each NIXL connector of an engine, bound to the engine's blocks."""
    for side in sides(private(engine_scheduler, "connector")):
        side.bind(EngineBlocks(engine_scheduler))
        yield side


def tell_finished(engine_scheduler: Any, request: Any) -> Any:
    """Tell the connector that a request has finished, with all its block ids, including blocks outside its window."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

    connector = private(engine_scheduler, "connector")
    block_ids = private(engine_scheduler, "kv_cache_manager").get_block_ids(request.request_id)
    # vLLM 0.19's MultiConnector supports one KV-cache group only.
    if isinstance(connector, SupportsHMA):
        return connector.request_finished_all_groups(request, block_ids)
    return connector.request_finished(request, block_ids[0])


def is_whole(request: Any) -> bool:
    """Whether a finished request has computed its whole prompt."""
    return request.status.name in _WHOLE and request.num_computed_tokens >= request.num_prompt_tokens


def scheduled(scheduler_output: Any) -> Iterator[tuple[str, BlockIds, bool, int, int]]:
    """Each request of a step: id, block ids per group, whether these replace the earlier ones, computed tokens after
    the step, and before it.
    """
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
    """The connector's reports in a step's output."""
    found = model_runner_output.kv_connector_output
    if found is None:
        return Reports(set(), set(), set())
    sent, received = set(found.finished_sending or ()), set(found.finished_recving or ())
    stats = found.kv_connector_stats
    return Reports(sent, received, set(found.invalid_block_ids), take_reasons(stats), take_timelines(stats))


def with_reports(engine_scheduler: Any, model_runner_output: Any, reports: Reports) -> Any:
    """A copy of a step's output with these reports in place of its own. vLLM shares one output among empty steps."""
    from vllm.v1.outputs import KVConnectorOutput

    before = model_runner_output.kv_connector_output
    if before is not None:
        add_lasted(before.kv_connector_stats, reports.lasted)
    if before is None and not (reports.sent or reports.received or reports.invalid):
        return model_runner_output
    requests = private(engine_scheduler, "requests")
    found = KVConnectorOutput() if before is None else copy.copy(before)
    # vLLM's engine ends if a report names an unknown id, a request that neither waits nor has finished, or a finished
    # request twice: the first report frees it (vllm#46240, vllm#51786).
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
    """In vLLM <= 0.19 ``num_cached_tokens`` is -1 until a request is scheduled, and its metrics raise on that value."""
    if optional(request, "num_cached_tokens", 0) < 0:
        request.num_cached_tokens = 0


def let_load_fail(engine_scheduler: Any, request_ids: set[str]) -> set[str]:
    """Fail or recompute requests that received no KV, as ``kv_load_failure_policy`` says.

    None of their tokens counts as computed, so vLLM frees the blocks that they still have and starts them again.

    Returns: the requests that vLLM has to end with an error.
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
    """End requests with an error, and add that to a step's outputs for clients."""
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
    """Add to a step's outputs that requests, (request id, client index) each, were rejected before they entered the
    engine. This reports the end of no other request.
    """
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    for request_id, client_index in refused:
        told = outputs.setdefault(client_index, EngineCoreOutputs())
        told.outputs = [*told.outputs, EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)]
    return outputs


def with_told(outputs: Any, told: dict[str, str]) -> Any:
    """Add the reason for clients to the outputs of failed requests that have none from vLLM."""
    for of_client in outputs.values() if told else ():
        for output in of_client.outputs:
            if output.stop_reason is None and output.finish_reason is not None and output.finish_reason.name == "ERROR":
                output.stop_reason = told.get(output.request_id)
    return outputs


def note_tokens(found: Iterable[Any], outputs: Any) -> None:
    """Tell these facades which requests have got tokens, if a hand-over ends with that."""
    for side in found:
        if side.timelines.awaits_tokens:
            told = (one for of_client in outputs.values() for one in of_client.outputs)
            side.timelines.answered(one.request_id for one in told if one.new_token_ids)


def remember(core: Any) -> None:
    """Remember the engine core of its scheduler, for `core_of`."""
    vars(core.scheduler)[_CORE] = core


def core_of(engine_scheduler: Any) -> Any:
    """The engine core around a scheduler; None if there is no core process (an engine in its client's own process)."""
    return vars(engine_scheduler).get(_CORE)


def due_in_seconds(found: Iterable[Any]) -> float:
    """Seconds until one of these facades has something to do by the clock; infinite if none has."""
    return min((due for side in found if (due := side.due_in_seconds) is not None), default=math.inf)


def has_call(core: Any, method: str) -> bool:
    """Whether such a call from outside waits in the engine's input queue."""
    from vllm.v1.engine import EngineCoreRequestType

    with core.input_queue.mutex:
        waiting = list(core.input_queue.queue)
    # A call is (client, number, method, arguments).
    return any(kind is EngineCoreRequestType.UTILITY and request[2] == method for kind, request in waiting)


def wait_for_input(core: Any, seconds: float) -> bool:
    """On the engine's thread, wait until something enters the engine's input queue, such as a worker's wake-up.

    Returns: whether something has.
    """
    queue = core.input_queue
    with queue.not_empty:
        if not queue._qsize():
            queue.not_empty.wait(None if math.isinf(seconds) else seconds)
        return bool(queue._qsize())


def wake_of(core: Any) -> Any:
    """A function that ends `wait_for_input` and vLLM's own wait for requests. Any thread may call it."""
    from vllm.v1.engine import EngineCoreRequestType

    return lambda: core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
