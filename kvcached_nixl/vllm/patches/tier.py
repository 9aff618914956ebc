# SPDX-License-Identifier: Apache-2.0
"""vLLM's OffloadingConnector beside the NIXL connector: a *tier* of other memory that keeps KV for later turns.

It copies in *jobs*, each of all workers. vLLM frees blocks that a job still reads, or begins one for a request that has
ended, and counts on the copy being made before a step writes there. kvcached unmaps freed blocks, and hand-overs write
between steps. So here blocks that a job reads are parked when they are freed, until all workers have said that the job
has ended; none begins for a request that has ended; and what was stored before weights changed is never loaded. vLLM
itself keeps the blocks that a job writes until it has told the request that waits for them.

Runs in: the engine core; the worker, which describes its memory.
Sources: ``kv_connector/v1/offloading/scheduler.py``, ``offloading/worker.py``, ``v1/kv_offload/base.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.vllm.adapter.attributes import connectors, metadata_in, private, sides
from kvcached_nixl.vllm.adapter.neighbours import is_tier, require_one_group
from kvcached_nixl.vllm.adapter.nixl_worker import WorkerView
from kvcached_nixl.worker.geometry.layout import Layout
from kvcached_nixl.worker.memory_registration import lay_out

LONGEST_SECONDS = 120.0
"""The engine ends if a job takes longer, once those before it have ended: nothing else would bring back its blocks, or
the request that waits for it."""
_MOST_SECONDS = 1.0
"""Of a step, what counts at most: workers begin and end jobs in steps."""
_TIER = "_kvcached_nixl_tier"


@dataclass
class _Job:
    """What is copied at once, and how many workers have not ended it. ``block_ids``: those that it reads."""

    num_workers: int
    block_ids: frozenset[int]
    left_seconds: float


class Tier:
    """The jobs of an engine, and its parked blocks. On the engine's thread."""

    def __init__(self, connector: Any, pool: Any, clock: Clock) -> None:
        self._scheduler = private(connector, "connector_scheduler")
        self._clock = clock
        self._jobs: dict[int, _Job] = {}
        self._newest = -1
        self._looked_at_seconds = clock.now_seconds()
        self._loads: set[str] = set()
        self._parked: list[Any] = []
        self.free = private(pool, "free_blocks")
        pool.free_blocks = self._free_or_park
        # Since 0.30, where a running request lacks a block: else vLLM would preempt one after the other for it.
        connector.has_pending_block_frees = lambda: bool(self._parked)
        self._reset_cache, connector.reset_cache = connector.reset_cache, self._reset
        self._matched, connector.get_num_new_matched_tokens = connector.get_num_new_matched_tokens, self._match

    @property
    def is_copying(self) -> bool:
        self._note()
        return bool(self._jobs)

    def ended(self, worker_meta: Any) -> None:
        """Take what the workers have reported in a step, and free the parked blocks that no job reads any more. Raises
        RuntimeError if a job is stuck."""
        self._note()
        for told in metadata_in(worker_meta):
            is_of_tier = type(told).__name__ == "OffloadingWorkerMetadata"
            for number, count in private(told, "completed_jobs").items() if is_of_tier else ():
                if number in self._jobs:
                    self._jobs[number].num_workers -= count
        first = min((number for number, job in self._jobs.items() if job.num_workers <= 0), default=self._newest)
        self._jobs = {number: job for number, job in self._jobs.items() if job.num_workers > 0}
        now = self._clock.now_seconds()
        passed, self._looked_at_seconds = min(now - self._looked_at_seconds, _MOST_SECONDS), now
        for number, job in self._jobs.items():
            # It may have waited for that one.
            job.left_seconds = LONGEST_SECONDS if number > first else job.left_seconds - passed
        if any(job.left_seconds < 0 for job in self._jobs.values()):
            raise RuntimeError(
                f"OffloadingConnector: a worker has not copied blocks in {LONGEST_SECONDS:g} s. The engine ends: it "
                "could not use them again. Restart it; remove OffloadingConnector if this comes back."
            )
        parked, self._parked = self._parked, []
        if parked:
            self._free_or_park(parked)

    def finished(self, request_id: str) -> None:
        """A request has ended: vLLM would begin to copy its blocks with the next step, when they are free."""
        self._loads.discard(request_id)
        self._store_no_more(request_id)

    def forget(self) -> set[str]:
        """Between two steps, part what was stored so far from what later requests load: jobs in flight, too.

        Returns: requests that have loaded KV, or wait for it.
        """
        self._reset()
        for request_id, status in private(self._scheduler, "_req_status").items():
            groups = private(status, "group_states")
            if private(status, "req").num_computed_tokens or any(private(one, "block_ids") for one in groups):
                # vLLM would store all that the request has, under the hashes of before.
                self._store_no_more(request_id)
            for group in groups:
                private(group, "offload_keys").clear()
        return set(self._loads)

    def _reset(self) -> bool | None:
        """In place of the connector's ``reset_cache``, which asserts that there was none since the last step."""
        self._note()
        flushed = private(self._scheduler, "_current_batch_jobs_to_flush")
        before = set(flushed)
        flushed.clear()
        done: bool | None = self._reset_cache()
        flushed |= before
        return done

    def _match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """In place of the connector's ``get_num_new_matched_tokens``, which vLLM calls before a request begins.

        A streaming session is neither stored nor loaded. vLLM adds the blocks of its next input to those of its first,
        although they replace them. And it drops the tokens of a session that begins anew, as `forget` has it do.
        """
        if private(request, "resumable"):
            self._store_no_more(request.request_id)
            return 0, False
        found: tuple[int | None, bool] = self._matched(request, num_computed_tokens)
        return found

    def _store_no_more(self, request_id: str) -> None:
        status = private(self._scheduler, "_req_status").get(request_id)
        if status is not None:
            private(status, "max_offload_tokens")
            status.max_offload_tokens = 0

    def _note(self) -> None:
        """Remember new jobs: vLLM forgets those in flight when its cache is reset."""
        found = private(self._scheduler, "_jobs")
        for number in sorted(number for number in found if number > self._newest):
            job = found[number]
            is_store, self._newest = private(job, "is_store"), number
            if not is_store:
                self._loads.add(private(job, "req_id"))
            # One KV-cache group with full attention has no others.
            reads = private(job, "deferred_fence_block_ids") if is_store else ()
            self._jobs[number] = _Job(private(job, "pending_count"), frozenset(reads or ()), LONGEST_SECONDS)

    def _free_or_park(self, ordered_blocks: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        """In place of the block pool's ``free_blocks``, through which all blocks are given back."""
        self._note()
        blocks = list(ordered_blocks)
        in_use: Collection[int] = set().union(*(job.block_ids for job in self._jobs.values()))
        self._parked += [one for one in blocks if one.block_id in in_use]
        self.free([one for one in blocks if one.block_id not in in_use], *args, **kwargs)


def tier_of(engine_scheduler: Any) -> Tier | None:
    """The tier of an engine that hands KV over; None if it has none."""
    attached = vars(engine_scheduler)
    if _TIER not in attached:
        attached[_TIER] = None
        connector = private(engine_scheduler, "connector")
        found = [one for one in connectors(connector) if is_tier(type(one))]
        if found and any(sides(connector)):
            pool = private(private(engine_scheduler, "kv_cache_manager"), "block_pool")
            attached[_TIER] = Tier(found[0], pool, Clock())
    tier: Tier | None = attached[_TIER]
    return tier


# -------------------------------------------------------------------------------------------------- the worker's memory


def serve(connector: Any, nixl: Any, role: str, kv_cache_config: Any) -> None:
    """Prepare an ``OffloadingConnector`` that was constructed beside a NIXL connector. Raises SettingsError if the
    model keeps KV in a way that it cannot copy."""
    require_one_group(kv_cache_config)
    if role == "WORKER":
        connector.register_kv_caches = functools.partial(_register, connector, nixl)


def _register(connector: Any, nixl: Any, kv_caches: Mapping[str, torch.Tensor]) -> None:
    """In place of ``register_kv_caches``, which takes a layer's page for the distance of its blocks."""
    layout, _ = lay_out(WorkerView(nixl), kv_caches)
    private(private(connector, "connector_worker"), "_init_worker")(memory_of(layout))


def memory_of(layout: Layout) -> Any:
    """Describe kvcached's memory to vLLM's ``OffloadingSpec``: a matrix of bytes for each region, (num_blocks,
    block_bytes), with one row for each logical block."""
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

    logical = layout.num_blocks // layout.split
    tensors = [area.view(torch.int8).view(logical, -1) for _, area in layout.areas()]
    described = [CanonicalKVCacheTensor(tensor=one, page_size_bytes=one.shape[1]) for one in tensors]
    whole = [CanonicalKVCacheRef(tensor_idx=at, page_size_bytes=one.shape[1]) for at, one in enumerate(tensors)]
    return CanonicalKVCaches(tensors=described, group_data_refs=[whole])
