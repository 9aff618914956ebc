# SPDX-License-Identifier: Apache-2.0
"""scheduler/load_failures.py: a request with an unwritten block in any group starts again."""

from __future__ import annotations

from dataclasses import dataclass

from kvcached_nixl.scheduler.load_failures import count_no_cached_tokens, restart_affected


@dataclass
class Request:
    request_id: str
    num_computed_tokens: int


BLOCKS = {"a": ([1, 2], [5, 6]), "b": ([3], [7, 8]), "c": ([4], [9])}


def test_only_requests_that_hold_an_unwritten_block_start_again() -> None:
    """A block of the second group counts as one of the first; other requests keep what they have."""
    requests = [Request("a", 64), Request("b", 33), Request("c", 10)]
    affected, lost, evict = restart_affected(requests, {8}, {}, BLOCKS.__getitem__, evict_blocks=False)
    assert affected == {"b"}
    assert lost == 33
    assert evict == set()
    assert [r.num_computed_tokens for r in requests] == [64, 0, 10]


def test_cached_blocks_of_an_affected_request_are_evicted() -> None:
    """Where blocks may be in the prefix cache, all blocks of the request are named."""
    _, lost, evict = restart_affected([Request("a", 64)], {2}, {"a": 16}, BLOCKS.__getitem__, evict_blocks=True)
    assert evict == {1, 2, 5, 6}
    assert lost == 48


@dataclass
class Counted:
    num_cached_tokens: int


def test_a_request_that_was_never_scheduled_counts_no_cached_tokens() -> None:
    """-1 would end the server in its metrics; a real count stays."""
    requests = [Counted(-1), Counted(32)]
    count_no_cached_tokens(requests)
    assert [request.num_cached_tokens for request in requests] == [0, 32]
