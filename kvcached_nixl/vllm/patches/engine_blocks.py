# SPDX-License-Identifier: Apache-2.0
"""The KV-cache blocks of an engine: who waits for them, how much memory they take, and how they are given away.

Sources: ``v1/core/sched/scheduler.py``, ``v1/core/single_type_kv_cache_manager.py``, kvcached's ``kv_cache_manager``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.attributes import connectors, optional, owner_of, private, side_of, sides
from kvcached_nixl.vllm.adapter.neighbours import is_tier
from kvcached_nixl.vllm.adapter.queues import goes_by_priority, hold, queued, startable, waits_for_kv, wants_blocks
from kvcached_nixl.vllm.adapter.requests import set_apart
from kvcached_nixl.vllm.patches.naming import wants_of
from kvcached_nixl.vllm.patches.tier import tier_of
from kvcached_nixl.wants import Want, Wants
from kvcached_nixl.wire.headroom import BlockUsage

logger = logging.getLogger(SERVER_LOGGER)

_BLOCKS = "_kvcached_nixl_blocks"
_OWN_THRESHOLD = "_kvcached_nixl_threshold"


class EngineBlocks:
    """The KV-cache blocks of an engine. What is read once stays as it is while the engine runs.

    Attributes:
        are_shared: another connector may load KV into them, and may later report that the load has failed.
        is_copied: another connector is reading blocks or writing them: those that are freed meanwhile are not free.
        is_producer: the engine only offers KV (``kv_role`` kv_producer), so that vLLM orders no loads into them.
        is_paused: the engine runs nothing.
        admits: the engine starts requests now: it is neither paused nor asleep.
        most_running: how many requests may run at a time.
        caches_prefixes: there is a prefix cache.
        goes_by_priority: requests are started by priority, and not as they arrived.
        num_free: blocks that could be allocated now, those that only the prefix cache keeps among them.
        num_used: blocks that requests have, or that are kept or held for peers.
        num_running_blocks: those of the requests that run.
        num_cached: blocks that only the prefix cache keeps, and that `drop_cached` could free; 0 without kvcached.
        has_reserve: kvcached has mapped pages in advance, which `trim` would give back.
        stalled: if no request runs: those that wait for blocks, in vLLM's order. No running request will free any.
    """

    def __init__(self, engine_scheduler: Any) -> None:
        scheduler = self._scheduler = engine_scheduler
        manager = self._manager = private(scheduler, "kv_cache_manager")
        self._pool = private(manager, "block_pool")
        self._coordinator = private(manager, "coordinator")
        # Whom vLLM has refused blocks last, and how many were free then. Around the bound method: what kvcached has put
        # into its class turns an allocation that fails half way into a refusal.
        self._refused: tuple[Any, int] = None, 0
        self._allocate = private(manager, "allocate_slots")
        manager.allocate_slots = self._allocate_slots
        # Per KV-cache group, with the blocks of each request.
        self._managers = self._coordinator.single_type_managers
        self._tables = [private(one, "req_to_blocks") for one in self._managers]
        # Where NIXL's connector is one of several (``MultiConnector``).
        self.are_shared = side_of(private(scheduler, "connector")) is None
        # As vLLM's scheduler takes it; below a ``MultiConnector``, too.
        self.is_producer = not private(scheduler, "vllm_config").kv_transfer_config.is_kv_consumer
        self.most_running = int(private(scheduler, "max_num_running_reqs"))
        self.caches_prefixes = bool(private(manager, "enable_caching"))
        self.goes_by_priority = goes_by_priority(scheduler)
        # kvcached's, below its own block pool: each page of KV is mapped in several buffers, keys and values of every
        # layer.
        elastic = self._elastic = optional(self._pool, "kv_cache_manager")
        if elastic is not None:
            self._pages = private(elastic, "page_allocator")
            num_buffers = int(private(elastic, "num_layers") * private(elastic, "num_kv_buffers"))
            self._page_bytes = int(private(elastic, "page_size")) * num_buffers
            self._block_bytes = int(private(elastic, "block_mem_size")) * num_buffers

    @property
    def is_copied(self) -> bool:
        tier = tier_of(self._scheduler)
        return tier is not None and tier.is_copying

    @property
    def is_paused(self) -> bool:
        return bool(private(self._scheduler, "pause_state")) and not private(self._scheduler, "running")

    @property
    def admits(self) -> bool:
        return not private(self._scheduler, "pause_state")

    @property
    def num_free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    @property
    def num_used(self) -> int:
        # The null block is allocated for good.
        if self._elastic is None:
            return max(0, int(private(self._pool, "num_gpu_blocks")) - 1 - self.num_free)
        return max(0, int(private(self._elastic, "_get_num_alloced_blocks")()) - 1 - self.num_cached)

    def num_needed(self, request_id: str) -> int:
        """How many blocks a request needs for its prompt, in addition to those that it has."""
        return self._num_needed(private(self._scheduler, "requests")[request_id])

    def num_cached_tokens(self, request_id: str) -> int:
        """How many tokens of a request's prompt are in the prefix cache."""
        return self.num_cached_tokens_of(private(self._scheduler, "requests")[request_id])

    def num_cached_tokens_of(self, request: Any) -> int:
        """How many tokens of a request of vLLM's are in the prefix cache, whether the scheduler knows it or not."""
        return int(self._hits(request)[1]) if self.caches_prefixes else 0

    def keep_cached(self, request: Any) -> tuple[int, Any]:
        """Give a request that the scheduler does not know the cached blocks of its prompt, as one that has ended, and
        whose blocks a connector keeps. Returns its tokens and block ids."""
        from vllm.v1.request import RequestStatus

        blocks, num_tokens = self._hits(request)[:2]
        private(self._coordinator, "allocate_new_computed_blocks")(request.request_id, blocks, num_tokens, 0)
        request.status, request.num_computed_tokens = RequestStatus.FINISHED_STOPPED, num_tokens
        private(self._scheduler, "requests")[request.request_id] = request
        return int(num_tokens), self._manager.get_block_ids(request.request_id)

    def drop(self, request: Any) -> None:
        """Free what `keep_cached` has given it."""
        private(self._manager, "free")(private(self._scheduler, "requests").pop(request.request_id))

    def hold(self, request_id: str) -> None:
        """Have a request that waits in vLLM's queue wait there until `release`, and no step look at it."""
        hold(self._scheduler, private(self._scheduler, "requests")[request_id])

    def limit_chunks(self, num_tokens: int) -> None:
        """Limit how many tokens of one prompt a step computes while other requests run; 0 for no limit but vLLM's.

        By vLLM's own limit (``--long-prefill-token-threshold``). Nothing is limited where vLLM may not divide prompts,
        or only at certain tokens: a request would get no turn."""
        scheduler = self._scheduler
        config = private(scheduler, "scheduler_config")
        own = vars(scheduler).setdefault(_OWN_THRESHOLD, config.long_prefill_token_threshold)
        divides = config.enable_chunked_prefill and not (
            config.disable_chunked_mm_input or private(scheduler, "need_mamba_block_aligned_split")
        )
        is_limited = divides and len(private(scheduler, "running")) > 1
        limits = [one for one in (own, num_tokens if is_limited else 0) if one]
        config.long_prefill_token_threshold = min(limits, default=0)

    def release(self, request_id: str, params: Mapping[str, Any] | None) -> None:
        """Have a held request started when it is its turn, with ``kv_transfer_params`` of prefill if there are any."""
        request = private(self._scheduler, "waiting").release(request_id)
        if params is not None:
            request.kv_transfer_params = dict(params)

    @property
    def stalled(self) -> list[str]:
        scheduler = self._scheduler
        if private(scheduler, "running"):
            return []
        return [str(one.request_id) for one in startable(scheduler) if wants_blocks(one)]

    @property
    def num_running_blocks(self) -> int:
        running = private(self._scheduler, "running")
        held = (block for table in self._tables for one in running for block in table.get(one.request_id, ()))
        return len({block.block_id for block in held if not block.is_null})

    def others_have_blocks(self, request_ids: Collection[str]) -> bool:
        """Whether any request but these has blocks: it waits for KV or for input, or is kept for a peer."""
        return any(blocks and one not in request_ids for table in self._tables for one, blocks in table.items())

    @property
    def starved(self) -> tuple[str, int] | None:
        """The request in the queue that vLLM has refused blocks, and how many more it needs than are free; None if
        there is no such request, or if enough blocks have become free in the meantime.

        The number may be too small: what vLLM reserves for others, and pages that blocks do not tile, are not in it."""
        scheduler, (request, num_free_then) = self._scheduler, self._refused
        if request is None or not wants_blocks(request) or len(private(scheduler, "running")) >= self.most_running:
            return None
        if not any(one is request for one in startable(scheduler)):
            return None
        missing = self._num_needed(request) - self.num_free
        # One that has its KV finds its own blocks in the prefix cache, and vLLM looks for no others. Those that others
        # use now need not be allocated.
        finds = self.caches_prefixes and not (request.num_computed_tokens or request.skip_reading_prefix_cache)
        if missing > 0 and finds:
            found = (block for group in self._hits(request)[0] for block in group)
            missing -= sum(block.ref_cnt > 0 and not block.is_null for block in found)
        has_come_free = self.num_free > num_free_then
        return None if missing <= 0 and has_come_free else (request.request_id, max(1, missing))

    def _allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of vLLM's `KVCacheManager.allocate_slots`."""
        found = self._allocate(request, *args, **kwargs)
        # For one that runs, others are preempted.
        if found is None and wants_blocks(request):
            self._refused = request, self.num_free
        return found

    @property
    def blocks_over_limit(self) -> int:
        """How many more blocks are allocated than kvcached's limit (``kvctl limit``) allows, whether kvcached has
        applied it already (it does so when it allocates) or not; at least one if blocks keep more pages in use than the
        limit has."""
        # Of the keys or values of one layer. 0 if the limit was never changed.
        limit_bytes = 0 if self._elastic is None else self._pages.get_resize_target()
        if limit_bytes <= 0:
            return 0
        allowed = int(limit_bytes // private(self._elastic, "block_mem_size"))
        exceeds = self._pages.get_num_inuse_pages() > limit_bytes // private(self._elastic, "page_size")
        return max(int(exceeds), int(private(self._elastic, "_get_num_alloced_blocks")()) - allowed)

    def usage(self) -> BlockUsage:
        """Numbers at this moment. May be called from any thread: the engine's own may change things meanwhile, so a
        failure means "ask again"."""
        free_bytes = 0 if self._elastic is None else int(self._pages.get_avail_physical_pages() * self._page_bytes)
        queued_tokens = sum(one.num_prompt_tokens for one in list(queued(self._scheduler)) if wants_blocks(one))
        return BlockUsage(self.num_free, self.num_used, free_bytes, queued_tokens)

    def mapped_bytes(self) -> int:
        """Memory of one device that is mapped for KV, with the reserve of free pages; as much on each rank's. May be
        called from any thread."""
        if self._elastic is None:
            return 0
        return int((self._pages.get_num_inuse_pages() + self._pages.get_num_reserved_pages()) * self._page_bytes)

    def apply_limit(self) -> None:
        """Have kvcached look at its limit (``kvctl limit``). It applies a changed one in its next allocation, and vLLM
        asks for none that exceeds the free blocks of before: a limit that was raised again would never count."""
        if self._elastic is not None and self._pages.get_resize_target() > 0:
            self._elastic.alloc(0)

    def tell_neighbours(self, needs_others: Callable[[str], bool]) -> bool:
        """Tell the other engines on the device how much memory `starved` waits for. Returns whether it is any.
        ``needs_others``: whether a request would not run with that memory, but wait for another engine."""
        if self._wants is None:
            return False
        starved, num_bytes = self.starved, 0
        if starved is not None:
            # What kvcached would map for this pool if there were more, beyond what it still can.
            pages = self._pages
            missing = pages.get_num_free_pages() - pages.get_avail_physical_pages() - pages.get_num_reserved_pages()
            num_bytes = min(starved[1] * self._block_bytes, max(0, int(missing * self._page_bytes)))
        runs_then = starved is not None and not needs_others(starved[0])
        self._wants.say(Want(num_bytes, runs_then and not private(self._scheduler, "running")))
        return num_bytes > 0

    def wanted_by_neighbours(self) -> tuple[int, bool]:
        """How many blocks would have to be freed for other engines on the device that wait for memory, and whether one
        of them runs nothing until it gets some. What they could still map of the free memory they have left out."""
        if self._wants is None:
            return 0, False
        want = self._wants.of_others()
        return (-(-want.num_bytes // self._block_bytes) if want.num_bytes else 0), want.is_stalled

    def neighbours_served(self) -> None:
        """What `wanted_by_neighbours` has returned is being freed."""
        if self._wants is not None:
            self._wants.served()

    @property
    def num_cached(self) -> int:
        return len(optional(self._pool, "_evictable_blocks", ()))

    def drop_cached(self, num_blocks: int) -> int:
        """Free blocks that only the prefix cache keeps, whole pages first. Returns how many."""
        evict = optional(self._pool, "_evict_blocks_from_pool")
        return 0 if evict is None or num_blocks <= 0 else int(evict(num_blocks))

    @property
    def has_reserve(self) -> bool:
        return self._elastic is not None and self._pages.get_num_reserved_pages() > 0

    def trim(self) -> int:
        """Give the device back what kvcached has mapped in advance. Returns how many blocks would have fitted."""
        if not self.has_reserve:
            return 0
        num_bytes = int(self._pages.get_num_reserved_pages()) * self._page_bytes
        self._elastic.trim()
        return num_bytes // self._block_bytes

    def take(self, request_id: str) -> list[Any]:
        """Take a request's blocks from it without freeing them; vLLM finds none when it frees the request. Its
        reference count cannot be used: kvcached counts no references without prefix caching."""
        taken: list[Any] = []
        for manager, table in zip(self._managers, self._tables, strict=True):
            taken += reversed(table.pop(request_id, []))
            # Frees no block now, but forgets what else vLLM notes of them: which of them has the state.
            private(manager, "free")(request_id)
        return [block for block in taken if not block.is_null]

    def give_back(self, blocks: list[Any]) -> None:
        """Free blocks that `take` returned."""
        self._pool.free_blocks(blocks)

    def let_go(self, request_id: str, *, recomputes: bool) -> int | None:
        """Take the received KV from a request that vLLM has not resumed yet, between two steps: it is recomputed
        (``recomputes``), or ends with an error. Returns the client to tell, by its index, if it has ended.

        vLLM may have noticed the KV already without scheduling the request since (other adapters run, or there are no
        free blocks). It then counts those tokens as computed, whatever blocks the request has. Nothing is done to one
        that runs, has finished or is unknown."""
        request = private(self._scheduler, "requests").get(request_id)
        if request is None or request.is_finished() or request in private(self._scheduler, "running"):
            return None
        # Nothing is in flight into these blocks any more. Those in vLLM's prefix cache would be found again.
        taken = self.take(request_id)
        if not waits_for_kv(request):
            self._manager.evict_blocks({block.block_id for block in taken})
        self.give_back(taken)
        request.num_computed_tokens = 0
        if recomputes:
            if waits_for_kv(request):
                private(self._scheduler, "failed_recving_kv_req_ids").add(request_id)
            return None
        from vllm.v1.request import RequestStatus

        self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
        return int(request.client_index)

    def outdate(self, is_meant: Callable[[int, str], bool], *, even_waiting: bool = False) -> set[str]:
        """Take KV that was computed so far out of the prefix cache, and have the requests that have blocks now share
        none of what they go on to compute. Called between two steps.

        A block's hash says nothing of the weights, and knows an adapter by its name. Blocks that only the prefix cache
        keeps may be of any adapter, so all of them go.

        Args:
            is_meant: whether KV of this LoRA adapter is outdated: vLLM's number and name of it, 0 and "" for none.
            even_waiting: requests without blocks share nothing with later ones either.

        Returns: the requests that are meant and have blocks.
        """
        outdated: set[str] = set()
        kept: set[int] = set()
        for request_id, request in private(self._scheduler, "requests").items():
            held = [block for table in self._tables for block in table.get(request_id, ())]
            lora = request.lora_request
            if not is_meant(*((0, "") if lora is None else (int(lora.lora_int_id), str(lora.lora_name)))):
                kept.update(block.block_id for block in held)
                continue
            if held:
                outdated.add(request_id)
            if held or even_waiting:
                set_apart(request)
        if len(private(self._pool, "cached_block_hash_to_block")):
            cached = {one.block_id for one in private(self._pool, "blocks") if one.block_hash is not None}
            self._manager.evict_blocks(cached - kept)
        tier = tier_of(self._scheduler)
        for request_id in () if tier is None else tier.forget():
            self._load_again(request_id)
        # Nor do embeddings of images. Workers that are told with the next step keep what that computes again.
        owner, encoders = owner_of(self._scheduler), private(self._scheduler, "encoder_cache_manager")
        if owner is not None and (optional(encoders, "cached") or optional(encoders, "freed")):
            owner.reset_encoder_cache()
        self._reset_others()
        return outdated

    def _reset_others(self) -> None:
        for one in connectors(private(self._scheduler, "connector")):
            if side_of(one) is not None or optional(one, "_connectors") is not None or is_tier(type(one)):
                continue
            try:
                has_failed = one.reset_cache() is False
            except Exception:
                # Another package's: whatever it raises, the weights have changed.
                logger.exception("reset_cache of %s has failed", type(one).__name__)
                has_failed = True
            if has_failed:
                logger.warning("%s has not forgotten the KV of the weights of before", type(one).__name__)

    def _load_again(self, request_id: str) -> None:
        """Have a request that waits for KV of another connector, or for its turn with it, begin anew."""
        request = private(self._scheduler, "requests").get(request_id)
        if request is not None and waits_for_kv(request):
            # Its blocks are still written. vLLM frees them when the load has ended.
            request.num_computed_tokens = 0
            private(self._scheduler, "failed_recving_kv_req_ids").add(request_id)
        else:
            self.let_go(request_id, recomputes=True)

    def first_tokens(self, num_tokens: int) -> tuple[int, ...]:
        """Per KV-cache group, the first token whose block is kept after ``num_tokens`` tokens; it starts a block."""
        return tuple(
            manager.get_num_skipped_tokens(num_tokens) // manager.block_size * manager.block_size
            for manager in self._managers
        )

    def _num_needed(self, request: Any) -> int:
        """As vLLM counts before it starts a request: all of its prompt, and of a window what is computed at a time."""
        num_tokens, num_computed, cached = request.num_tokens, request.num_computed_tokens, [()] * len(self._managers)
        counts = (num_tokens, cached, 0, num_computed, num_computed, num_tokens)
        count = private(self._coordinator, "get_num_blocks_to_allocate")
        return int(count(request.request_id, *counts, apply_admission_cap=True))

    def _hits(self, request: Any) -> Any:
        return private(self._coordinator, "find_longest_cache_hit")(request.block_hashes, request.num_tokens - 1)

    @functools.cached_property
    def _wants(self) -> Wants | None:
        return None if self._elastic is None else wants_of(private(self._scheduler, "vllm_config").parallel_config)


def blocks_of(engine_scheduler: Any) -> EngineBlocks:
    """The KV-cache blocks of an engine that hands KV over."""
    attached = vars(engine_scheduler)
    if _BLOCKS not in attached:
        attached[_BLOCKS] = EngineBlocks(engine_scheduler)
    found: EngineBlocks = attached[_BLOCKS]
    return found


def bound_sides(engine_scheduler: Any) -> Iterator[Any]:
    """Our scheduler facade of each NIXL connector of an engine, bound to the engine's blocks."""
    for side in sides(private(engine_scheduler, "connector")):
        side.engine.bind(blocks_of(engine_scheduler))
        yield side
