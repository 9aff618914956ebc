# SPDX-License-Identifier: Apache-2.0
"""Models with sliding-window layers, alone or beside full attention, on the installed vLLM.

Blocks that have left a window are freed while prefill still computes. So prefill tells, per KV-cache group, the first
token whose KV it has kept, and decode takes the blocks that its next token needs. A push begins when the whole prompt
is computed.
"""

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
from support.handover_node import (
    ANOTHER_REQUESTS,
    DECODE_FILLING,
    PREFILL_FILLING,
    RESERVED,
    SEND,
    rest,
)
from vllm.v1.request import RequestStatus

from kvcached_nixl.vllm.adapter.versions import HITS_DIVERGE, installed_has

pytestmark = pytest.mark.long

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched

WINDOW, BLOCK = 64, 16
GEOMETRY = dataclasses.replace(RESERVED, block_size=BLOCK, num_blocks=60, reserved_blocks=70, num_pools=2)
DIRECT, PUSHED_AND_STAGED = ("pull", "direct", "direct"), ("push", "host", "device")
WIDE = -WINDOW
"""A window of as many tokens, in blocks of twice as many tokens of half as many heads, as in Gemma 4."""
KINDS: dict[str, tuple[int | str | None, ...]] = {
    "a full one and a window": (None, WINDOW),
    "a window alone": (WINDOW,),
    "a full one and a window of wide blocks": (None, WIDE),
    "a full one and a state": (None, "none"),
    "a state, a full one and a window, with prefix caching": ("align", None, WINDOW),
}


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def windows(request: pytest.FixtureRequest) -> tuple[int | str | None, ...]:
    found: tuple[int | str | None, ...] = request.param
    return found


@pytest.fixture(
    params=[
        DIRECT,
        ("pull", "host", "direct"),
        ("pull", "direct", "device"),
        ("push", "direct", "direct"),
        PUSHED_AND_STAGED,
    ],
    ids=["direct", "P staged", "D", "push", "push, staged"],
)
def paths(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    """Who moves the bytes, and the memory paths of prefill and of decode."""
    found: tuple[str, str, str] = request.param
    return found


@pytest.fixture
def node(
    windows: tuple[int | str | None, ...], paths: tuple[str, str, str], tmp_path: Path, log: pytest.LogCaptureFixture
) -> Iterator[Any]:
    if any(isinstance(one, str) for one in windows) and not installed_has(HITS_DIVERGE):
        pytest.skip("this vLLM cannot load states")
    if any(isinstance(one, str) for one in windows) and paths not in (DIRECT, PUSHED_AND_STAGED):
        pytest.skip("random schedules (test_states_random.py) have these")
    wide = tuple(group for group, window in enumerate(windows) if window == WIDE)
    states = tuple(group for group, window in enumerate(windows) if isinstance(window, str))
    geometry = dataclasses.replace(GEOMETRY, groups=len(windows), wide=wide, states=states)
    windows = tuple(abs(window) if isinstance(window, int) else window for window in windows)
    mode, *of_sides = paths

    with nodes(GroupsNode, tmp_path, log) as make:

        def one(filling: int, contiguous: bool = False, **options: Any) -> GroupsNode:
            shape = dataclasses.replace(geometry, contiguous=contiguous)
            extra = {"transfer_mode": mode, "memory_path": of_sides[filling != PREFILL_FILLING]}
            # As vLLM does where states are kept for whole requests only.
            extra["prefix_caching"] = "none" not in windows
            return make(filling, shape, windows=windows, **extra, **options)

        yield one


@pytest.mark.parametrize("contiguous", [(False, False), (True, True), (True, False)], ids=str)
def test_prompts_around_the_window_arrive(contiguous: tuple[bool, bool], node: Callable[..., GroupsNode]) -> None:
    """Finding B5: from inside the window to beyond it, over every block boundary; none is recomputed."""
    prefill, decode = node(PREFILL_FILLING, contiguous[0]), node(DECODE_FILLING, contiguous[1])
    for num_tokens in (
        5,
        16,
        17,
        *range(60, 101, 1 if contiguous == (True, True) else 4),
        63,
        64,
        65,
        66,
        79,
        80,
        81,
        129,
        200,
    ):
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
