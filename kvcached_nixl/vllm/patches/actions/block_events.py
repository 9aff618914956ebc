# SPDX-License-Identifier: Apache-2.0
"""KV events (``--kv-events-config``) of kvcached's block pool, for routers that follow which blocks an engine has.

kvcached's pool keeps its hashes with vLLM's own code, which reports blocks that are stored; but
kvcached never asks it to, and evicts by a way of its own. So routers see an empty cache, and nobody says so.
Sources: kvcached 0.1.6, ``integration/vllm/native_block_pool.py``; vLLM 0.26 to 0.33, ``v1/core/block_pool.py``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from kvcached_nixl.vllm.adapter.private import private
from kvcached_nixl.vllm.patches.actions.completed import with_pool

__all__ = ["with_block_events"]


def with_block_events(kv_cache_coordinator: types.ModuleType, apply: Callable[[], bool]) -> bool:
    """Let kvcached's pool report its blocks where vLLM was asked for KV events.

    Args:
        kv_cache_coordinator: vLLM's module; kvcached replaces the constructor of its coordinator.
        apply: kvcached's patch.

    Returns: what ``apply`` returns.
    """

    def report(pool: Any, is_asked: bool) -> None:
        if is_asked:
            report_blocks(pool)

    return with_pool(kv_cache_coordinator, apply, "enable_kv_cache_events", report)


def report_blocks(pool: Any) -> None:
    """Make one of kvcached's block pools report what it stores, evicts and clears, as vLLM's own pool does.

    Args:
        pool: a pool that holds no block yet, of kvcached or of vLLM; vLLM's own reports already.
    """
    if "_native_block_pool" not in vars(pool):
        return
    from vllm.distributed.kv_events import AllBlocksCleared
    from vllm.v1.core.block_pool import MEDIUM_GPU

    # Read here: a name that is missing stops the start, not a step.
    remove_hashes, tell_removed = (
        private(pool, name) for name in ("_remove_cached_block_hashes", "_emit_block_removed_events")
    )
    take_events = private(vars(pool)["_native_block_pool"], "take_events")
    reset = pool.reset_prefix_cache

    def remove_cached_block(key: Any, block_id: int) -> Any:
        block = pool.blocks[block_id]
        removed = remove_hashes(block)
        tell_removed(removed)
        return block if removed else None

    def reset_prefix_cache() -> bool:
        is_reset = bool(reset())
        if is_reset and pool.enable_prefix_cache:
            pool.kv_event_queue.append(AllBlocksCleared())
        return is_reset

    pool.enable_kv_cache_events, pool.medium, pool.kv_event_queue = True, MEDIUM_GPU, []
    pool.take_events = functools.partial(take_events, pool)
    pool._remove_cached_block, pool.reset_prefix_cache = remove_cached_block, reset_prefix_cache
