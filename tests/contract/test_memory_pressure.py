# SPDX-License-Identifier: Apache-2.0
"""Which request vLLM's scheduler would start next, how many blocks it lacks, and that offers give way to it."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")

from support import attention_engines, engine_node, handover_node
from support.engine_node import BLOCKS, PREFILL_ID, USABLE
from support.handover_node import (
    DECODE_FILLING,
    PREFILL_FILLING,
    Node,
    mover,
    prefilled,
    rest,
    transfers_held,
    until_both,
)
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from kvcached_nixl.vllm.patches.engine_blocks import EngineBlocks

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
direction = handover_node.direction
node = handover_node.node

OLDER = [f"cmpl-o-0-aaaaaaa{number}" for number in range(USABLE // BLOCKS)]
NEW = "cmpl-n-0-aaaaaaaa"
FIRST = "skipped_waiting" if hasattr(Scheduler, "_select_waiting_queue_for_scheduling") else "kv_holding_waiting"


def test_only_what_vllm_does_not_start_for_want_of_blocks_is_starved(node: Callable[..., Node]) -> None:
    prefill = node(PREFILL_FILLING)
    for place, name in enumerate(OLDER):
        prefilled(prefill, name, first_token=100 * (place + 1))
    assert prefill.free_blocks < BLOCKS, "the others are kept for decode"
    blocks = EngineBlocks(prefill.scheduler)
    # Two blocks of three are those of an offer, which vLLM shares.
    prefill.add(PREFILL_ID, {"do_remote_decode": True}, 5, 100)
    assert not blocks.num_running_blocks
    prefill.step()
    assert PREFILL_ID in prefill.scheduler.requests and blocks.starved is None
    assert blocks.num_running_blocks == BLOCKS
    prefill.step_until(lambda: PREFILL_ID in prefill.ended)
    prefill.add(NEW, {"do_remote_decode": True}, 1, 900)
    assert blocks.starved is not None
    with mock.patch.object(prefill.scheduler, "max_num_running_reqs", 0):
        assert blocks.starved is None
    prefill.step_until(lambda: NEW in prefill.ended)
    rest(prefill)


def test_one_whose_kv_has_come_runs_whoever_waits_for_its_blocks(
    node: Callable[..., Node], direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#57841: by priority, it would stand behind one of higher priority that lacks the blocks which it has."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    decode.scheduler.policy = SchedulingPolicy.PRIORITY
    for name in ("waiting", FIRST):
        setattr(decode.scheduler, name, create_request_queue(SchedulingPolicy.PRIORITY))
    kept = [prefilled(prefill, name, first_token=100 * (place + 1)) for place, name in enumerate(OLDER)]
    gate = transfers_held(mover(direction, prefill, decode), monkeypatch)
    *low, high = [f"cmpl-d-0-ddddddd{place}" for place in range(len(kept))]
    for place, name in enumerate(low):
        decode.add(name, kept[place], first_token=100 * (place + 1), priority=5)
    until_both(prefill, decode, lambda: gate.kept and all(map(decode.waits, low)))
    # It takes what is left, and one block of those that the others have.
    taken = decode.scheduler.kv_cache_manager.block_pool.get_new_blocks(decode.free_blocks - BLOCKS + 1)
    decode.add(high, kept[-1], first_token=100 * len(kept), priority=0)
    decode.step()
    assert decode.status(high) is RequestStatus.WAITING
    gate.closed = False
    until_both(prefill, decode, lambda: {*low, high} <= decode.ended.keys())
    assert {decode.ended[name] for name in (*low, high)} == {"length"}
    decode.scheduler.kv_cache_manager.block_pool.free_blocks(taken)
    rest(prefill, decode)
