# SPDX-License-Identifier: Apache-2.0
"""Named access to vLLM's scheduler and to what it hands the connector.

Sources: ``v1/core/sched/scheduler.py``, ``v1/core/sched/output.py``, ``v1/core/single_type_kv_cache_manager.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcached_nixl.compat.attached import ours_of
from kvcached_nixl.compat.connector import private

__all__ = ["blocks_of", "give_back", "halves", "is_idle", "is_whole", "scheduled", "take_blocks"]

_WHOLE = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
"""How a request ends that has computed its prompt to the end."""


def halves(engine_scheduler: Any) -> Iterator[Any]:
    """Our half of each NIXL connector of an engine; its connector may hold others (``MultiConnector``)."""
    waiting = [vars(engine_scheduler).get("connector")]
    while waiting:
        one = waiting.pop()
        half = ours_of(one)
        if half is not None:
            yield half
        waiting += vars(one).get("_connectors", ()) if one is not None else ()


def is_whole(request: Any) -> bool:
    """Whether a request that ended has computed its prompt to the end."""
    return request.status.name in _WHOLE and request.num_computed_tokens >= request.num_prompt_tokens


def is_idle(scheduler_output: Any) -> bool:
    """Whether a step computes nothing."""
    return not scheduler_output.total_num_scheduled_tokens


def scheduled(scheduler_output: Any) -> Iterator[tuple[str, tuple[list[int], ...], bool, int]]:
    """Each request of a step: id, block ids per group, whether they replace the earlier ones, tokens at the end."""
    tokens = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.block_ids, True, new.num_computed_tokens + tokens[new.req_id]
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, block_ids, num_computed_tokens in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        replaces = request_id in cached.resumed_req_ids
        yield request_id, block_ids or (), replaces, num_computed_tokens + tokens[request_id]


def blocks_of(blocks: Any) -> tuple[list[int], ...]:
    """Block ids per group of vLLM's ``KVCacheBlocks``."""
    found: tuple[list[int], ...] = blocks.get_block_ids()
    return found


def take_blocks(engine_scheduler: Any, request_id: str) -> list[Any]:
    """Take a request's blocks away from it without freeing them; vLLM finds none when it frees the request.

    vLLM's own reference count does not serve: kvcached counts none without prefix caching.
    """
    taken: list[Any] = []
    for manager in private(private(engine_scheduler, "kv_cache_manager"), "coordinator").single_type_managers:
        taken += reversed(private(manager, "req_to_blocks").pop(request_id, []))
        private(manager, "num_cached_block").pop(request_id, None)
    return taken


def give_back(engine_scheduler: Any, blocks: list[Any]) -> None:
    """Free what `take_blocks` took."""
    private(private(engine_scheduler, "kv_cache_manager"), "block_pool").free_blocks(blocks)
