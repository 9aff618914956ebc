# SPDX-License-Identifier: Apache-2.0
"""The KV-cache blocks of an engine: who waits for them, how much memory they take, and how they are given away.

Sources: ``v1/core/sched/scheduler.py``, ``v1/core/single_type_kv_cache_manager.py``, kvcached's ``kv_cache_manager``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.attributes import optional, private, side_of, sides
from kvcached_nixl.vllm.adapter.platform import device_name
from kvcached_nixl.vllm.adapter.queues import goes_by_priority, hold, queued, startable, waits_for_kv, wants_blocks
from kvcached_nixl.vllm.adapter.requests import set_apart
from kvcached_nixl.vllm.patches.naming import wants_of
from kvcached_nixl.vllm.patches.tier import tier_of
from kvcached_nixl.wants import Want, Wants
from kvcached_nixl.wire.headroom import BlockUsage

logger = logging.getLogger(SERVER_LOGGER)

_OWN_THRESHOLD = "_kvcached_nixl_threshold"


@dataclass(frozen=True)
class EngineBlocks:
    """The KV-cache blocks of an engine: `scheduler.engine.BlockPool`, which says what each of these is."""

    engine_scheduler: Any

    @property
    def are_shared(self) -> bool:
        """Whether another connector may load KV into them, which may fail (``MultiConnector``)."""
        return side_of(private(self.engine_scheduler, "connector")) is None

    @property
    def is_copied(self) -> bool:
        tier = tier_of(self.engine_scheduler)
        return tier is not None and tier.is_copying

    @property
    def is_producer(self) -> bool:
        """Whether vLLM's scheduler takes the engine for one that only offers KV; below a ``MultiConnector``, too."""
        return not private(self.engine_scheduler, "vllm_config").kv_transfer_config.is_kv_consumer

    @property
    def is_paused(self) -> bool:
        return bool(private(self.engine_scheduler, "pause_state")) and not private(self.engine_scheduler, "running")

    @property
    def admits(self) -> bool:
        return not private(self.engine_scheduler, "pause_state")

    @property
    def most_running(self) -> int:
        return int(private(self.engine_scheduler, "max_num_running_reqs"))

    @property
    def caches_prefixes(self) -> bool:
        return bool(private(self._manager, "enable_caching"))

    @property
    def goes_by_priority(self) -> bool:
        return goes_by_priority(self.engine_scheduler)

    @property
    def num_free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    @property
    def num_used(self) -> int:
        manager = optional(self._pool, "kv_cache_manager")
        if manager is None:
            return max(0, int(private(self._pool, "num_gpu_blocks")) - 1 - self.num_free)
        # The null block is allocated for good.
        return max(0, int(private(manager, "_get_num_alloced_blocks")()) - 1 - self.num_cached)

    def num_needed(self, request_id: str) -> int:
        request = private(self.engine_scheduler, "requests")[request_id]
        return sum(_blocks_of(manager, request) for manager in self._managers())

    def num_cached_tokens(self, request_id: str) -> int:
        return self.num_cached_tokens_of(private(self.engine_scheduler, "requests")[request_id])

    def num_cached_tokens_of(self, request: Any) -> int:
        """How many tokens of a request of vLLM's are in the prefix cache, whether the scheduler knows it or not."""
        return int(self._hits(request)[1]) if self.caches_prefixes else 0

    def keep_cached(self, request: Any) -> tuple[int, Any]:
        """Give a request that the scheduler does not know the cached blocks of its prompt, as one that has ended, and
        whose blocks a connector keeps. Returns its tokens and block ids."""
        from vllm.v1.request import RequestStatus

        blocks, num_tokens = self._hits(request)[:2]
        give = private(private(self._manager, "coordinator"), "allocate_new_computed_blocks")
        give(request.request_id, blocks, num_tokens, 0)
        request.status, request.num_computed_tokens = RequestStatus.FINISHED_STOPPED, num_tokens
        private(self.engine_scheduler, "requests")[request.request_id] = request
        return int(num_tokens), self._manager.get_block_ids(request.request_id)

    def drop(self, request: Any) -> None:
        """Free what `keep_cached` has given it."""
        private(self._manager, "free")(private(self.engine_scheduler, "requests").pop(request.request_id))

    def hold(self, request_id: str) -> None:
        hold(self.engine_scheduler, private(self.engine_scheduler, "requests")[request_id])

    def limit_chunks(self, num_tokens: int) -> None:
        """Lowers vLLM's own limit (``--long-prefill-token-threshold``), and restores it when ``num_tokens`` is 0.

        Nothing is limited where vLLM may not divide prompts, or only at certain tokens: a request would get no turn.
        """
        scheduler = self.engine_scheduler
        config = private(scheduler, "scheduler_config")
        own = vars(scheduler).setdefault(_OWN_THRESHOLD, config.long_prefill_token_threshold)
        divides = config.enable_chunked_prefill and not (
            config.disable_chunked_mm_input or private(scheduler, "need_mamba_block_aligned_split")
        )
        is_limited = divides and len(private(scheduler, "running")) > 1
        limits = [one for one in (own, num_tokens if is_limited else 0) if one]
        config.long_prefill_token_threshold = min(limits, default=0)

    def release(self, request_id: str, params: Mapping[str, Any] | None) -> None:
        request = private(self.engine_scheduler, "waiting").release(request_id)
        if params is not None:
            request.kv_transfer_params = dict(params)

    @property
    def stalled(self) -> list[str]:
        scheduler = self.engine_scheduler
        if private(scheduler, "running"):
            return []
        return [str(one.request_id) for one in startable(scheduler) if wants_blocks(one)]

    @property
    def num_running_blocks(self) -> int:
        running = private(self.engine_scheduler, "running")
        held = (block for table in self._tables for one in running for block in table.get(one.request_id, ()))
        return len({block.block_id for block in held if not block.is_null})

    def others_have_blocks(self, request_ids: Collection[str]) -> bool:
        return any(blocks and one not in request_ids for table in self._tables for one, blocks in table.items())

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
            ahead = int(private(scheduler, "num_lookahead_tokens"))
            missing = int(missing + sum(1 + ahead // one.block_size for one in managers) > 0)
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
        allowed = int(limit_bytes // private(manager, "block_mem_size"))
        exceeds = pages.get_num_inuse_pages() > limit_bytes // private(manager, "page_size")
        return max(int(exceeds), int(private(manager, "_get_num_alloced_blocks")()) - allowed)

    def usage(self) -> BlockUsage:
        """As seen from any thread: the engine's own may change things meanwhile, so a failure means "ask again"."""
        manager, free_bytes = optional(self._pool, "kv_cache_manager"), 0
        if manager is not None:
            pages = private(manager, "page_allocator")
            free_bytes = int(pages.get_avail_physical_pages() * private(manager, "page_size") * _num_buffers(manager))
        queued_tokens = sum(one.num_prompt_tokens for one in list(queued(self.engine_scheduler)) if wants_blocks(one))
        return BlockUsage(self.num_free, self.num_used, free_bytes, queued_tokens)

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

    def tell_neighbours(self, needs_others: Callable[[str], bool]) -> bool:
        if self._wants is None:
            return False
        starved = self.starved
        num_bytes = 0 if starved is None else min(starved[1] * self._block_bytes, self._bytes_to_map)
        runs_then = starved is not None and not needs_others(starved[0])
        self._wants.say(Want(num_bytes, runs_then and not private(self.engine_scheduler, "running")))
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

    @property
    def num_cached(self) -> int:
        return len(optional(self._pool, "_evictable_blocks", ()))

    def drop_cached(self, num_blocks: int) -> int:
        """Free blocks that only the prefix cache keeps, whole pages first."""
        evict = optional(self._pool, "_evict_blocks_from_pool")
        return 0 if evict is None or num_blocks <= 0 else int(evict(num_blocks))

    @property
    def has_reserve(self) -> bool:
        return self._num_reserved_pages > 0

    def trim(self) -> int:
        num_pages = self._num_reserved_pages
        if not num_pages:
            return 0
        manager = private(self._pool, "kv_cache_manager")
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
        if not waits_for_kv(request):
            self._manager.evict_blocks({block.block_id for block in taken})
        self.give_back(taken)
        request.num_computed_tokens = 0
        if recomputes:
            if waits_for_kv(request):
                private(self.engine_scheduler, "failed_recving_kv_req_ids").add(request_id)
            return None
        from vllm.v1.request import RequestStatus

        self.engine_scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
        return int(request.client_index)

    def outdate(self, is_meant: Callable[[int, str], bool], *, even_waiting: bool = False) -> set[str]:
        """Between two steps, part what was computed so far from what later requests compute.

        A block's hash says nothing of the weights, and knows an adapter by its name. Blocks that only the prefix cache
        keeps may be of any adapter, so all of them go.
        """
        tables = self._tables
        outdated: set[str] = set()
        kept: set[int] = set()
        for request_id, request in private(self.engine_scheduler, "requests").items():
            held = [block for table in tables for block in table.get(request_id, ())]
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
        tier = tier_of(self.engine_scheduler)
        for request_id in () if tier is None else tier.forget():
            self._load_again(request_id)
        return outdated

    def _load_again(self, request_id: str) -> None:
        """Have a request that waits for KV of another connector, or for its turn with it, begin anew."""
        request = private(self.engine_scheduler, "requests").get(request_id)
        if request is not None and waits_for_kv(request):
            # Its blocks are still written. vLLM frees them when the load has ended.
            request.num_computed_tokens = 0
            private(self.engine_scheduler, "failed_recving_kv_req_ids").add(request_id)
        else:
            self.let_go(request_id, recomputes=True)

    def first_tokens(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(
            manager.get_num_skipped_tokens(num_tokens) // manager.block_size * manager.block_size
            for manager in self._managers()
        )

    def _num_shared(self, request: Any) -> int:
        """How many blocks of a waiting request's prompt others use now, so that they need not be allocated."""
        # One that has its KV finds its own blocks, and vLLM looks for no others.
        if not self.caches_prefixes or request.num_computed_tokens:
            return 0
        return sum(block.ref_cnt > 0 and not block.is_null for group in self._hits(request)[0] for block in group)

    def _hits(self, request: Any) -> Any:
        find = private(private(self._manager, "coordinator"), "find_longest_cache_hit")
        return find(request.block_hashes, request.num_tokens - 1)

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
    def _num_reserved_pages(self) -> int:
        manager = optional(self._pool, "kv_cache_manager")
        return 0 if manager is None else int(private(manager, "page_allocator").get_num_reserved_pages())

    @property
    def _block_bytes(self) -> int:
        manager = private(self._pool, "kv_cache_manager")
        return int(private(manager, "block_mem_size") * _num_buffers(manager))

    @property
    def _manager(self) -> Any:
        return private(self.engine_scheduler, "kv_cache_manager")

    @property
    def _pool(self) -> Any:
        return private(self._manager, "block_pool")

    @property
    def _tables(self) -> list[Any]:
        """Per KV-cache group, the blocks of each request."""
        return [private(manager, "req_to_blocks") for manager in self._managers()]

    def _managers(self) -> Any:
        return private(self._manager, "coordinator").single_type_managers


def _num_buffers(manager: Any) -> int:
    """In how many buffers kvcached maps each page: keys and values of every layer."""
    return int(private(manager, "num_layers") * private(manager, "num_kv_buffers"))


def _blocks_of(manager: Any, request: Any) -> int:
    """How many blocks of one KV-cache group a request needs for its prompt, in addition to those that it has."""
    first_block = manager.get_num_skipped_tokens(request.num_tokens) // manager.block_size
    # Where vLLM drafts, a state has a block for each guessed token, too.
    last_block = -(-request.num_tokens // manager.block_size) + optional(manager, "num_speculative_blocks", 0)
    needed: int = last_block - first_block
    return max(0, needed - len(private(manager, "req_to_blocks").get(request.request_id, ())))


def bound_sides(engine_scheduler: Any) -> Iterator[Any]:
    """Our scheduler facade of each NIXL connector of an engine, bound to the engine's blocks."""
    for side in sides(private(engine_scheduler, "connector")):
        side.engine.bind(EngineBlocks(engine_scheduler))
        yield side
