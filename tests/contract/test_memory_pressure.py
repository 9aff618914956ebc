# SPDX-License-Identifier: Apache-2.0
"""Which request vLLM's scheduler would start next, how many blocks it lacks, and that offers give way to it.

And what happens where another engine on the device takes the last memory between vLLM's look at the free blocks and
kvcached's allocation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from support.kvcached_pool import elastic_pool, put_into, windows_open
from support.nodes import (
    BLOCK_SIZE,
    BLOCKS,
    DECODE_FILLING,
    DECODE_ID,
    PREFILL_FILLING,
    PREFILL_ID,
    PROMPT,
    RESERVED,
    USABLE,
    Node,
    mover,
)
from vllm.v1.core import kv_cache_manager
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

OLDER = [f"cmpl-o-0-aaaaaaa{number}" for number in range(USABLE // BLOCKS)]
NEW = "cmpl-n-0-aaaaaaaa"
FIRST = "skipped_waiting" if hasattr(Scheduler, "_select_waiting_queue_for_scheduling") else "kv_holding_waiting"


def test_only_what_vllm_does_not_start_for_want_of_blocks_is_starved(node: Callable[..., Node]) -> None:
    prefill = node(PREFILL_FILLING)
    for place, name in enumerate(OLDER):
        prefill.prefilled(name, first_token=100 * (place + 1))
    assert prefill.free_blocks < BLOCKS, "the others are kept for decode"
    blocks = prefill.side_of_engine.engine.blocks
    # Two blocks of three are those of an offer, which vLLM shares.
    prefill.add(PREFILL_ID, {"do_remote_decode": True}, 5, 100)
    assert not blocks.num_running_blocks
    prefill.step()
    assert PREFILL_ID in prefill.scheduler.requests and blocks.starved is None
    assert blocks.num_running_blocks == BLOCKS
    prefill.step_until(lambda: PREFILL_ID in prefill.ended)
    prefill.add(NEW, {"do_remote_decode": True}, 1, 900)
    assert blocks.starved is None, "vLLM has not tried it"
    prefill.step()
    assert blocks.starved == (NEW, BLOCKS - prefill.free_blocks)
    with mock.patch.object(blocks, "most_running", 0):
        assert blocks.starved is None
    prefill.step_until(lambda: NEW in prefill.ended)
    prefill.rest()


def test_an_offer_of_its_own_prompt_gives_way_to_one_that_shares_no_blocks(node: Callable[..., Node]) -> None:
    """As with ``prompt_logprobs``: vLLM looks for none in the prefix cache."""
    prefill = node(PREFILL_FILLING, give_way_after=0.2)
    prefill.prefilled(PREFILL_ID)
    taken = prefill.scheduler.kv_cache_manager.block_pool.get_new_blocks(prefill.free_blocks - 1)
    prefill.add(NEW, None, 1)
    prefill.scheduler.requests[NEW].skip_reading_prefix_cache = True
    prefill.step_until(lambda: NEW in prefill.ended)
    assert prefill.ended[NEW] == "length"
    prefill.scheduler.kv_cache_manager.block_pool.free_blocks(taken)
    prefill.rest()


def test_one_whose_kv_has_come_runs_whoever_waits_for_its_blocks(
    node: Callable[..., Node], direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#57841: by priority, it would stand behind one of higher priority that lacks the blocks which it has."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    decode.scheduler.policy = SchedulingPolicy.PRIORITY
    for name in ("waiting", FIRST):
        setattr(decode.scheduler, name, create_request_queue(SchedulingPolicy.PRIORITY))
    kept = [prefill.prefilled(name, first_token=100 * (place + 1)) for place, name in enumerate(OLDER)]
    gate = mover(direction, prefill, decode).hold_transfers(monkeypatch)
    *low, high = [f"cmpl-d-0-ddddddd{place}" for place in range(len(kept))]
    for place, name in enumerate(low):
        decode.add(name, kept[place], first_token=100 * (place + 1), priority=5)
    decode.step_until(lambda: gate.kept and all(map(decode.waits, low)), prefill)
    # It takes what is left, and one block of those that the others have.
    taken = decode.scheduler.kv_cache_manager.block_pool.get_new_blocks(decode.free_blocks - BLOCKS + 1)
    decode.add(high, kept[-1], first_token=100 * len(kept), priority=0)
    decode.step()
    assert decode.status(high) is RequestStatus.WAITING
    gate.closed = False
    decode.step_until(lambda: {*low, high} <= decode.ended.keys(), prefill)
    assert {decode.ended[name] for name in (*low, high)} == {"length"}
    decode.scheduler.kv_cache_manager.block_pool.free_blocks(taken)
    prefill.rest(decode)


@pytest.fixture
def elastic(node: Callable[..., Node], patched: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Node]:
    """Makes nodes with kvcached's pool; ``patched``: kvcached's patch is applied as this package has it applied."""
    from kvcached.integration.vllm.patches import KVCacheManagerAllocateSlotsPatch

    owner = kv_cache_manager.KVCacheManager
    monkeypatch.setattr(owner, "allocate_slots", owner.allocate_slots)
    with windows_open(monkeypatch):
        assert KVCacheManagerAllocateSlotsPatch().apply(kv_cache_manager)

    def make(filling: int, **extra: Any) -> Node:
        one = node(filling, **extra)
        put_into(one.scheduler, elastic_pool(monkeypatch, RESERVED.num_blocks, BLOCK_SIZE))
        monkeypatch.setenv("ENABLE_KVCACHED", "true")
        return one

    return make


def is_as_before(one: Node) -> bool:
    """Nothing is in use; what is cached is cached still."""
    pool = one.scheduler.kv_cache_manager.block_pool
    managers = one.scheduler.kv_cache_manager.coordinator.single_type_managers
    is_held = any(block.ref_cnt for block in pool.blocks if not block.is_null)
    return not is_held and not any(manager.req_to_blocks or manager.num_cached_block for manager in managers)


def test_a_hand_over_behind_cached_tokens_waits_for_the_others(elastic: Callable[..., Node]) -> None:
    """On decode, whose blocks are allocated for KV that is to come."""
    prefill, decode = elastic(PREFILL_FILLING), elastic(DECODE_FILLING)
    decode.add("cmpl-y-0-dddddddd", None, 1)
    decode.step_until(lambda: "cmpl-y-0-dddddddd" in decode.ended)
    params = prefill.prefilled(num_tokens=PROMPT + BLOCK_SIZE)
    pages = decode.scheduler.kv_cache_manager.block_pool.kv_cache_manager
    pages.num_taken = 2
    decode.add(DECODE_ID, params, num_tokens=PROMPT + BLOCK_SIZE)
    decode.step()
    assert decode.status(DECODE_ID) == RequestStatus.WAITING and is_as_before(decode)
    decode.step()
    assert decode.waits(DECODE_ID)
    blocks = decode.blocks(DECODE_ID)
    decode.step_until(lambda: DECODE_ID in decode.received, prefill)
    assert decode.holds(blocks, 0, PROMPT + BLOCK_SIZE)
    decode.step_until(lambda: DECODE_ID in decode.ended, prefill)
    assert decode.ended[DECODE_ID] == "length" and is_as_before(decode)


def test_one_that_gets_no_blocks_although_enough_are_said_to_be_free_ends(elastic: Callable[..., Node]) -> None:
    """kvcached says how many there are at most, where pages begin and end inside of blocks (MLA)."""
    prefill = elastic(PREFILL_FILLING, allocation_timeout=0.2)
    prefill.scheduler.kv_cache_manager.block_pool.kv_cache_manager.num_taken = 1 << 30
    prefill.add(PREFILL_ID, None, 1)
    prefill.step_until(lambda: PREFILL_ID in prefill.ended)
    assert prefill.ended[PREFILL_ID] == "error" and is_as_before(prefill)


def test_what_follows_in_a_session_that_has_failed_is_refused(elastic: Callable[..., Node]) -> None:
    """It would be computed without what came before. Its last input would be one token that nobody has sent."""
    one = elastic(PREFILL_FILLING, allocation_timeout=0.2)
    pages = one.scheduler.kv_cache_manager.block_pool.kv_cache_manager
    one.add_input(0)
    one.step_until(lambda: one.status(PREFILL_ID) == RequestStatus.WAITING_FOR_STREAMING_REQ)
    pages.num_taken = 1 << 30
    for number, is_last in enumerate((False, False, True, False)):
        one.ended.clear()
        one.add_input(100 * number, is_last=is_last)
        one.step_until(lambda: PREFILL_ID in one.ended)
        assert one.ended[PREFILL_ID] == "error" and PREFILL_ID not in one.scheduler.requests, number
        pages.num_taken = 0
    assert is_as_before(one)


@pytest.mark.parametrize("is_last", [False, True])
def test_what_follows_in_a_session_that_was_aborted_is_refused(elastic: Callable[..., Node], is_last: bool) -> None:
    """By ``/pause?mode=abort``: behind vLLM's balancer of data parallelism, no abort may follow."""
    one = elastic(PREFILL_FILLING)
    one.add_input(0)
    one.step_until(lambda: one.status(PREFILL_ID) == RequestStatus.WAITING_FOR_STREAMING_REQ)
    one.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    one.ended.clear()
    one.add_input(100, is_last=is_last)
    one.step_until(lambda: PREFILL_ID in one.ended)
    assert one.ended[PREFILL_ID] == "error" and is_as_before(one)
