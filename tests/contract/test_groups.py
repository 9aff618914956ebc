# SPDX-License-Identifier: Apache-2.0
"""Models with sliding-window layers, alone or beside full attention, on the installed vLLM.

Blocks that have left a window are freed while prefill still computes. So prefill tells, per KV-cache group, the first
token whose KV it has kept, and decode takes the blocks that its next token needs. A push begins when the whole prompt
is computed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
import torch
from support import attention_engines, engine_node
from support.engine_node import DECODE_ID, PREFILL_ID, nodes, prompt
from support.handover_node import (
    ANOTHER_REQUESTS,
    DECODE_FILLING,
    NAME,
    PREFILL_FILLING,
    RESERVED,
    SEND,
    Node,
    kv,
    rest,
    until_both,
)
from vllm.v1.request import RequestStatus

from kvcached_nixl.wire.causes import FailureCause

pytestmark = pytest.mark.long

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched

WINDOW, BLOCK = 64, 16
GEOMETRY = dataclasses.replace(RESERVED, block_size=BLOCK, num_blocks=60, reserved_blocks=70, num_pools=2)
WIDE = -WINDOW
"""A window of as many tokens, in blocks of twice as many tokens of half as many heads, as in Gemma 4."""
KINDS: dict[str, tuple[int | None, ...]] = {
    "a full one and a window": (None, WINDOW),
    "a window alone": (WINDOW,),
    "a full one and a window of wide blocks": (None, WIDE),
}


class GroupsNode(Node):
    """Its layers belong to groups with blocks of their own, in the same pools."""

    windows: tuple[int | None, ...] = ()

    def of_groups(self, request_id: str) -> list[list[int]]:
        return [list(group) for group in self.scheduler.kv_cache_manager.get_block_ids(request_id)]

    def places(self, token_ids: list[int], first: int, blocks: list[list[int]], group: int) -> Iterator[Any]:
        """Where a group has each token from ``first`` on, and what must be there; None where it has let go of it."""
        layers = list(self.caches.values())[group * self.geometry.num_pools :][: self.geometry.num_pools]
        size = self.geometry.of_group(group).block_size
        for position in range(first, len(token_ids)):
            block_id = blocks[group][position // size]
            for layer, cache in enumerate(layers):
                number = group * self.geometry.num_pools + layer
                block = self.geometry.block(cache, block_id).view(torch.uint8).movedim(1, 0)
                cell = block[position % size]
                expected = kv([token_ids[position]], position, number, cell.numel()).view(cell.shape)
                yield position, (cell if block_id else None), expected

    def compute(self, output: Any) -> None:
        for request_id, count in output.num_scheduled_tokens.items():
            request, blocks = self.scheduler.requests[request_id], self.of_groups(request_id)
            end = request.num_computed_tokens
            for group in range(len(self.windows)):
                for _, cell, expected in self.places(list(request.all_token_ids[:end]), end - count, blocks, group):
                    assert cell is not None, "what is computed is in a block"
                    cell.copy_(expected)

    def sees(self, request_id: str, num_tokens: int, at: int) -> bool:
        """Attention, computing the token ``at``, sees what it must of the prompt in the layers of each group."""
        blocks, token_ids = self.of_groups(request_id), prompt(0, num_tokens)[:at]
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, at - window + 1)
            for _, cell, expected in self.places(token_ids, first, blocks, group):
                if cell is None or not torch.equal(cell, expected):
                    return False
        return True


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def windows(request: pytest.FixtureRequest) -> tuple[int | None, ...]:
    found: tuple[int | None, ...] = request.param
    return found


@pytest.fixture(
    params=[
        ("pull", "direct", "direct"),
        ("pull", "host", "direct"),
        ("pull", "direct", "device"),
        ("push", "direct", "direct"),
        ("push", "host", "device"),
    ],
    ids=["direct", "P staged", "D", "push", "push, staged"],
)
def paths(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    """Who moves the bytes, and the memory paths of prefill and of decode."""
    found: tuple[str, str, str] = request.param
    return found


@pytest.fixture
def node(
    windows: tuple[int | None, ...], paths: tuple[str, str, str], tmp_path: Path, log: pytest.LogCaptureFixture
) -> Iterator[Any]:
    wide = tuple(group for group, window in enumerate(windows) if window == WIDE)
    geometry = dataclasses.replace(GEOMETRY, groups=len(windows), wide=wide)
    windows = tuple(window and abs(window) for window in windows)
    mode, *of_sides = paths

    with nodes(GroupsNode, tmp_path, log) as make:

        def one(filling: int, contiguous: bool = False, **options: Any) -> GroupsNode:
            shape = dataclasses.replace(geometry, contiguous=contiguous)
            extra = {"transfer_mode": mode, "memory_path": of_sides[filling != PREFILL_FILLING]}
            found = make(filling, shape, windows=windows, **extra, **options)
            found.windows = windows
            return found

        yield one


def prefilled(prefill: Node, request_id: str, num_tokens: int, max_tokens: int = 1) -> dict[str, Any]:
    prefill.add(request_id, SEND, max_tokens, num_tokens=num_tokens)
    prefill.step_until(lambda: request_id in prefill.transfer_params)
    found: dict[str, Any] = json.loads(json.dumps(prefill.transfer_params[request_id]))
    return found


def runs_rightly(prefill: Node, decode: GroupsNode, num_tokens: int) -> None:
    """Whether it was handed over or not: whenever decode computes a token, it sees what it must."""
    request = decode.scheduler.requests[DECODE_ID]
    compute, wrong = decode.compute, list[int]()

    def checked(output: Any) -> None:
        count = output.num_scheduled_tokens.get(DECODE_ID)
        if count is not None:
            first = request.num_computed_tokens - count
            if not decode.sees(DECODE_ID, num_tokens, first):
                wrong.append(first)
        compute(output)

    decode.compute = checked  # type: ignore[method-assign]
    try:
        until_both(prefill, decode, lambda: DECODE_ID in decode.ended)
    finally:
        del decode.compute
    assert decode.ended.pop(DECODE_ID) == "length"
    assert wrong == []


@pytest.mark.parametrize("contiguous", [False, True])
def test_prompts_around_the_window_arrive(contiguous: bool, node: Callable[..., GroupsNode]) -> None:
    """Finding B5: from inside the window to beyond it, over every block boundary; none is recomputed."""
    prefill, decode = node(PREFILL_FILLING, contiguous), node(DECODE_FILLING, contiguous)
    for num_tokens in (5, 16, 17, *range(60, 101, 1 if contiguous else 4), 63, 64, 65, 66, 79, 80, 81, 129, 200):
        params = prefilled(prefill, PREFILL_ID, num_tokens)
        # All of it is to come from prefill.
        assert decode.scheduler.reset_prefix_cache()
        decode.add(DECODE_ID, params, 3, num_tokens=num_tokens)
        decode.step()
        assert decode.status(DECODE_ID) == RequestStatus.WAITING_FOR_REMOTE_KVS, num_tokens
        runs_rightly(prefill, decode, num_tokens)
        rest(prefill, decode)
        prefill.transfer_params.clear()
        assert decode.account["kvcached_nixl_failures"] == [], num_tokens


@pytest.mark.parametrize("tokens_a_step", [24, 48])
def test_prompts_computed_in_chunks_arrive(tokens_a_step: int, node: Callable[..., GroupsNode]) -> None:
    """Finding B5: prefill gives blocks back while it computes the next chunk."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=tokens_a_step), node(DECODE_FILLING)
    for num_tokens in (70, 96, 97, 150, 200):
        params = prefilled(prefill, PREFILL_ID, num_tokens)
        assert decode.scheduler.reset_prefix_cache()
        decode.add(DECODE_ID, params, 3, num_tokens=num_tokens)
        runs_rightly(prefill, decode, num_tokens)
        rest(prefill, decode)
        prefill.transfer_params.clear()
    assert decode.account["kvcached_nixl_failures"] == []


@pytest.mark.parametrize("cached", [16, 48, 80])
@pytest.mark.parametrize("more", [0, 1, 20])
def test_what_decode_has_cached_and_what_follows_fit_together(
    more: int, cached: int, node: Callable[..., GroupsNode]
) -> None:
    """Findings A1, B5: after a prefix hit, and with a longer prompt than prefill's: right bytes, or recomputed."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING, policy="recompute")
    for num_tokens in (90, 100, 128):
        assert decode.scheduler.reset_prefix_cache()
        decode.add("cmpl-y-0-dddddddd", None, 1, num_tokens=cached + 1)
        decode.step_until(lambda: "cmpl-y-0-dddddddd" in decode.ended)
        decode.ended.clear()
        decode.add(DECODE_ID, prefilled(prefill, PREFILL_ID, num_tokens), 3, num_tokens=num_tokens + more)
        runs_rightly(prefill, decode, num_tokens + more)
        rest(prefill, decode)
        prefill.transfer_params.clear()
    assert set(decode.account["kvcached_nixl_failures"]) <= {FailureCause.RANGE}


def test_prefill_that_goes_on_computing_gives_back_what_it_had_promised(node: Callable[..., GroupsNode]) -> None:
    """Findings A1 (a), B5: with ``max_tokens`` above 1 the window moves on; freed blocks are not offered."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING, policy="recompute")
    for max_tokens in (2, 17, 40):
        prefill.add(PREFILL_ID, SEND, max_tokens, num_tokens=100)
        prefill.step_until(lambda: PREFILL_ID in prefill.ended)
        params = prefill.transfer_params.pop(PREFILL_ID, None)
        owned = prefill.of_groups(PREFILL_ID) if PREFILL_ID in prefill.scheduler.requests else []
        prefill.fill(prefill.all_but([block_id for group in owned for block_id in group]), ANOTHER_REQUESTS)
        assert decode.scheduler.reset_prefix_cache()
        decode.add(DECODE_ID, params, 3, num_tokens=100)
        runs_rightly(prefill, decode, 100)
        rest(prefill, decode)
        prefill.ended.clear()


@pytest.mark.parametrize("tokens_a_step", [None, 48])
def test_decode_may_ask_first(
    tokens_a_step: int | None, node: Callable[..., GroupsNode], paths: tuple[str, str, str]
) -> None:
    """A push: what decode has registered is written when prefill has computed all of it."""
    if paths[0] == "pull":
        pytest.skip("a pull names what prefill has computed")
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=tokens_a_step), node(DECODE_FILLING)
    for num_tokens in (5, 65, 100, 200):
        assert decode.scheduler.reset_prefix_cache() and prefill.scheduler.reset_prefix_cache()
        decode.add(DECODE_ID, {**prefill.address(), **NAME}, 3, num_tokens=num_tokens)
        decode.step()
        assert decode.status(DECODE_ID) == RequestStatus.WAITING_FOR_REMOTE_KVS
        prefill.add(PREFILL_ID, {**SEND, **NAME}, 1, num_tokens=num_tokens)
        runs_rightly(prefill, decode, num_tokens)
        rest(prefill, decode)
        prefill.transfer_params.clear()
        prefill.ended.clear()
    assert decode.account["kvcached_nixl_failures"] == []
