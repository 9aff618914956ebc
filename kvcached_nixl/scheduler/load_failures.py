# SPDX-License-Identifier: Apache-2.0
"""Requests whose KV could not be loaded, in engines with several KV-cache groups.

The stock scheduler unpacks a request's block ids as one group and raises for more (``TODO: add support for hybrid
memory allocator`` in ``Scheduler._update_requests_with_invalid_blocks``, vLLM 0.19 to 0.28). With several groups the
first unwritten block of one group says nothing of the others, so nothing that was loaded is kept: the request starts
again from its first token, or fails, as ``kv_load_failure_policy`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol


class LoadedRequest(Protocol):
    """What is read and written of a vLLM request."""

    request_id: str
    num_computed_tokens: int


class CountedRequest(Protocol):
    """A request of vLLM <= 0.19, which counts the tokens it found in the prefix cache; -1 until it is scheduled."""

    num_cached_tokens: int


def count_no_cached_tokens(failed: Iterable[CountedRequest]) -> None:
    """Give requests that failed before they were scheduled a count that the metrics accept."""
    for request in failed:
        request.num_cached_tokens = max(request.num_cached_tokens, 0)


def restart_affected(
    requests: Iterable[LoadedRequest],
    invalid_block_ids: set[int],
    num_scheduled_tokens: Mapping[str, int],
    block_ids_of: Callable[[str], Sequence[Sequence[int]]],
    evict_blocks: bool,
) -> tuple[set[str], int, set[int]]:
    """Send every request that holds an unwritten block back to its first token.

    Args:
        requests: the requests to look at.
        invalid_block_ids: blocks without valid KV.
        num_scheduled_tokens: request id -> tokens scheduled in this step; they do not count as computed.
        block_ids_of: request id -> block ids, one sequence per KV-cache group.
        evict_blocks: whether the affected requests' blocks may be in the prefix cache.

    Returns:
        Affected request ids, tokens that must be computed again, block ids to evict: what vLLM's method returns.
    """
    affected: set[str] = set()
    lost_tokens = 0
    evict: set[int] = set()
    for request in requests:
        held = {block_id for group in block_ids_of(request.request_id) for block_id in group}
        if held.isdisjoint(invalid_block_ids):
            continue
        affected.add(request.request_id)
        lost_tokens += request.num_computed_tokens - num_scheduled_tokens.get(request.request_id, 0)
        request.num_computed_tokens = 0
        if evict_blocks:
            evict |= held
    return affected, lost_tokens, evict
