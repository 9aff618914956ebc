# SPDX-License-Identifier: Apache-2.0
"""States that vLLM keeps for its prefix cache (``mamba_cache_mode`` align): what this package must leave behind, and
blocks that must not be taken for the one with the state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support import attention_engines, engine_node
from support.engine_node import DECODE_ID, PREFILL_ID, nodes
from support.groups_node import GroupsNode, prefilled, runs_rightly
from support.handover_node import DECODE_FILLING, PREFILL_FILLING, RESERVED, rest, until_both
from vllm.v1.request import RequestStatus

from kvcached_nixl.vllm.adapter.versions import COUNTS_EXTERNAL_WEIGHTS, HITS_DIVERGE, installed_has
from kvcached_nixl.vllm.patches import arrival
from kvcached_nixl.wire import kv_groups
from kvcached_nixl.wire.kv_groups import Keeps, KVGroup
from kvcached_nixl.wire.manifest import BlockRange

pytestmark = pytest.mark.skipif(not installed_has(HITS_DIVERGE), reason="this vLLM cannot load states")
parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched

BLOCK = 16
GEOMETRY = dataclasses.replace(
    RESERVED, block_size=BLOCK, num_blocks=40, reserved_blocks=43, num_pools=2, groups=2, states=(1,)
)


@pytest.fixture
def node(tmp_path: Path, log: pytest.LogCaptureFixture) -> Iterator[Callable[..., GroupsNode]]:
    with nodes(GroupsNode, tmp_path, log) as make:

        def one(filling: int, **options: Any) -> GroupsNode:
            return make(filling, GEOMETRY, **{"windows": (None, "align"), "policy": "recompute", **options})

        yield one


@pytest.mark.parametrize("num_tokens", [BLOCK + 1, 2 * BLOCK + 1, 4 * BLOCK + 1])
def test_a_state_that_is_taken_away_before_its_request_runs_leaves_nothing(
    num_tokens: int, node: Callable[..., GroupsNode]
) -> None:
    """The weights change while the request has its KV and waits for a free block. vLLM's notes of its blocks have to go
    with them: it would later free the block that has the new state."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    params = prefilled(prefill, PREFILL_ID, num_tokens)
    decode.add(DECODE_ID, params, 2 * BLOCK, num_tokens=num_tokens)
    until_both(prefill, decode, lambda: DECODE_ID in decode.received)
    pool = decode.scheduler.kv_cache_manager.block_pool
    others = pool.get_new_blocks(pool.get_num_free_blocks())
    decode.step()
    assert decode.status(DECODE_ID) == RequestStatus.WAITING, "vLLM has noticed the KV, and has no block to go on"
    decode.side_of_engine.revocations.weights_changed()
    pool.free_blocks(others)
    runs_rightly(prefill, decode, num_tokens)
    rest(prefill, decode)


def older(self: KVGroup, blocks: list[int], first_token: int, end_token: int) -> BlockRange:
    """The slot before the right one: the superseded state of an earlier chunk."""
    if self.keeps is Keeps.STATE and end_token > self.table_block_size:
        place = (end_token - 1) // self.table_block_size - 1
        return BlockRange(end_token - 1, tuple(blocks[place : place + 1]))
    return original(self, blocks, first_token, end_token)


original = KVGroup.range


@pytest.mark.parametrize("num_tokens", [2 * BLOCK + 5, 3 * BLOCK + 2, 4 * BLOCK])
@pytest.mark.parametrize("is_right", [True, False], ids=["as it is", "the superseded slot"])
def test_the_superseded_slot_is_not_handed_over(
    is_right: bool, num_tokens: int, node: Callable[..., GroupsNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks that end at block boundaries, each chunk's state is in a block of its own, and the one before the last
    is still there when the request ends."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=BLOCK), node(DECODE_FILLING)
    with monkeypatch.context() as planted:
        if not is_right:
            planted.setattr(kv_groups.KVGroup, "range", older)
        params = prefilled(prefill, PREFILL_ID, num_tokens)
    decode.add(DECODE_ID, params, 2, num_tokens=num_tokens)
    if is_right:
        runs_rightly(prefill, decode, num_tokens)
    else:
        with pytest.raises(AssertionError, match="== \\[\\]"):
            runs_rightly(prefill, decode, num_tokens)
    rest(prefill, decode)


@pytest.mark.parametrize("is_aligned", [True, False], ids=["as it is", "as vLLM leaves it on a CPU"])
def test_a_cached_state_is_the_one_at_its_blocks_end(
    is_aligned: bool, node: Callable[..., GroupsNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU's platform sets the block size back when the scheduler exists. Chunks of one and a half blocks would then
    leave a state in the middle of the second block, and the next prompt would go on from there."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=BLOCK * 3 // 2), node(DECODE_FILLING)
    prefill.scheduler.cache_config.block_size = BLOCK // 2
    if not is_aligned:
        monkeypatch.setattr(arrival, "align_chunks", lambda scheduler: None)
    for num_tokens, is_right in ((4 * BLOCK + 1, True), (2 * BLOCK + 5, is_aligned)):
        params = prefilled(prefill, PREFILL_ID, num_tokens)
        decode.add(DECODE_ID, params, 2, num_tokens=num_tokens)
        if is_right:
            runs_rightly(prefill, decode, num_tokens)
            rest(prefill, decode)
        else:
            with pytest.raises(AssertionError, match="== \\[\\]"):
                runs_rightly(prefill, decode, num_tokens)
        assert decode.scheduler.reset_prefix_cache() or not is_right
        prefill.transfer_params.clear()


def test_prefills_hit_ends_before_the_state_that_it_hands_over(node: Callable[..., GroupsNode]) -> None:
    """The same prompt twice, and longer ones: the cached state is shared, and the one handed over is the request's."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    for num_tokens in (3 * BLOCK + 1, 3 * BLOCK + 1, 3 * BLOCK + 2, 5 * BLOCK, 5 * BLOCK + 1):
        params = prefilled(prefill, PREFILL_ID, num_tokens)
        assert decode.scheduler.reset_prefix_cache()
        decode.add(DECODE_ID, params, 3, num_tokens=num_tokens)
        decode.step()
        assert decode.status(DECODE_ID) == RequestStatus.WAITING_FOR_REMOTE_KVS
        runs_rightly(prefill, decode, num_tokens)
        rest(prefill, decode)
        prefill.transfer_params.clear()
    assert decode.account["kvcached_nixl_failures"] == []
    assert bool(prefill.num_checkpoints) is installed_has(COUNTS_EXTERNAL_WEIGHTS)
