# SPDX-License-Identifier: Apache-2.0
"""Requests that have their KV, and wait for more blocks than the engine has left, end all the same (rule R4)."""

from __future__ import annotations

import pytest
from support.flow_cluster import LEASE_SECONDS, TIMEOUT_SECONDS
from support.flow_engine import Status
from support.flow_pair import Pair, kind

from kvcached_nixl.transfer_mode import TransferMode

NUM_TOKENS, FETCHED_BLOCKS = 25, 6
"""Decode of a model with sliding windows fetches 24 tokens, and needs another block to compute the last one."""


@pytest.mark.parametrize("mode", [TransferMode.PULL, TransferMode.PUSH], ids=["pull", "push"])
@pytest.mark.parametrize("recomputes", [True, False])
def test_two_requests_do_not_wait_for_each_others_blocks(mode: TransferMode, recomputes: bool) -> None:
    """Each was admitted with room for all of its prompt. Then kvcached's limit falls while their KV travels."""
    room = 2 * (FETCHED_BLOCKS + 1)
    decode = kind(num_blocks=1 + room, drops_blocks=True, caches_prefixes=False, recomputes=recomputes)
    pair = Pair(mode, kind(drops_blocks=True), decode)
    prompts = [tuple(range(first, first + NUM_TOKENS)) for first in (0, 20)]
    upstream = [pair.ask_prefill(prompt) for prompt in prompts]
    pair.settle()
    found = [pair.ask_decode(one.answer, one.prompt, max_tokens=1) for one in upstream]
    for one in found:
        pair.until(one, Status.REMOTE)
    pair.decode.pool.limit_blocks = 2 * FETCHED_BLOCKS
    pair.decode.pool.apply_limit()
    pair.settle()
    assert all(one.num_computed == NUM_TOKENS - 1 for one in found), "their KV has come"
    pair.pass_time(TIMEOUT_SECONDS + LEASE_SECONDS)
    assert all(one.status.is_finished for one in found), "one of them ends, and the other one has its blocks"
    assert Status.STOPPED in {one.status for one in found}
    pair.nothing_is_left(LEASE_SECONDS + TIMEOUT_SECONDS)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_request_that_was_passed_over_does_not_wait_for_blocks_of_one_behind_it(num_steps: int) -> None:
    """vLLM turns the order of those that it passes over around in each step, and tries none behind one without blocks:
    here a request that decode did not start while a neighbour waited for memory."""
    pair = Pair(TransferMode.PUSH, None, kind(num_blocks=8, caches_prefixes=False))
    pair.acquaint()
    has_blocks = pair.ask_decode(pair.meet(transfer_id="first"), tuple(range(15)), max_tokens=1)
    pair.until(has_blocks, Status.REMOTE)
    pair.decode.pool.neighbour_leaves_blocks = 0
    pair.cluster.pass_time(0.5, 0.25)
    passed_over = pair.ask_decode(pair.meet(transfer_id="second"), tuple(range(20, 35)), max_tokens=1)
    pair.settle()
    assert passed_over in pair.decode.skipped and has_blocks in pair.decode.skipped
    pair.decode.pool.neighbour_leaves_blocks = None
    for _ in range(num_steps):
        pair.decode.step()
    pair.cluster.pass_time(4.0, 0.25)
    for name, one in (("first", has_blocks), ("second", passed_over)):
        pair.ask_prefill(one.prompt, transfer_id=name)
    pair.settle()
    assert has_blocks.status is Status.STOPPED and passed_over.status is Status.STOPPED
    assert not pair.causes()
    pair.nothing_is_left(LEASE_SECONDS + TIMEOUT_SECONDS)
