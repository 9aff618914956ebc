# SPDX-License-Identifier: Apache-2.0
"""Another engine on the device takes the last memory between vLLM's look at the free blocks and kvcached's allocation.

Real: vLLM's scheduler and kvcached's pool and patch of the allocation, as this package completes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support import attention_engines, engine_node, handover_node
from support.engine_node import DECODE_ID, PREFILL_ID, PROMPT, USABLE
from support.handover_node import BLOCK_SIZE, DECODE_FILLING, PREFILL_FILLING, RESERVED, Node, prefilled, until_both
from support.kvcached_pool import elastic_pool, put_into, windows_open
from vllm.v1.core import kv_cache_manager
from vllm.v1.request import RequestStatus

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
direction, node = handover_node.direction, handover_node.node


@pytest.fixture
def elastic(node: Callable[..., Node], patched: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Node]:
    """Makes nodes with kvcached's pool; ``patched``: kvcached's patch is applied as this package has it applied."""
    from kvcached.integration.vllm.patches import KVCacheManagerAllocateSlotsPatch

    owner = kv_cache_manager.KVCacheManager
    monkeypatch.setattr(owner, "allocate_slots", owner.allocate_slots)
    with windows_open(monkeypatch):
        assert KVCacheManagerAllocateSlotsPatch().apply(kv_cache_manager)

    def make(filling: int) -> Node:
        one = node(filling)
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


def test_a_request_that_begins_with_cached_tokens_waits_for_the_others(elastic: Callable[[int], Node]) -> None:
    one = elastic(PREFILL_FILLING)
    pages = one.scheduler.kv_cache_manager.block_pool.kv_cache_manager
    one.add(PREFILL_ID, None, 1)
    one.step_until(lambda: PREFILL_ID in one.ended)
    assert is_as_before(one) and one.free_blocks == USABLE
    # kvcached tries twice.
    pages.num_taken = 2 * 3
    one.add("cmpl-y-0-aaaaaaaa", None, 1, num_tokens=PROMPT + BLOCK_SIZE)
    for _ in range(3):
        one.step()
        assert one.status("cmpl-y-0-aaaaaaaa") == RequestStatus.WAITING
        assert is_as_before(one) and one.free_blocks == USABLE
    assert not pages.num_taken
    one.step()
    assert one.scheduler.requests.get("cmpl-y-0-aaaaaaaa") is None or one.tokens("cmpl-y-0-aaaaaaaa")
    one.step_until(lambda: "cmpl-y-0-aaaaaaaa" in one.ended)
    assert one.ended["cmpl-y-0-aaaaaaaa"] == "length" and is_as_before(one) and one.free_blocks == USABLE


def test_a_hand_over_behind_cached_tokens_waits_for_the_others(elastic: Callable[[int], Node]) -> None:
    """On decode, whose blocks are allocated for KV that is to come."""
    prefill, decode = elastic(PREFILL_FILLING), elastic(DECODE_FILLING)
    decode.add("cmpl-y-0-dddddddd", None, 1)
    decode.step_until(lambda: "cmpl-y-0-dddddddd" in decode.ended)
    params = prefilled(prefill, PREFILL_ID, num_tokens=PROMPT + BLOCK_SIZE)
    pages = decode.scheduler.kv_cache_manager.block_pool.kv_cache_manager
    pages.num_taken = 2
    decode.add(DECODE_ID, params, num_tokens=PROMPT + BLOCK_SIZE)
    decode.step()
    assert decode.status(DECODE_ID) == RequestStatus.WAITING and is_as_before(decode)
    decode.step()
    assert decode.waits(DECODE_ID)
    blocks = decode.blocks(DECODE_ID)
    until_both(prefill, decode, lambda: DECODE_ID in decode.received)
    assert decode.holds(blocks, 0, PROMPT + BLOCK_SIZE)
    until_both(prefill, decode, lambda: DECODE_ID in decode.ended)
    assert decode.ended[DECODE_ID] == "length" and is_as_before(decode)
