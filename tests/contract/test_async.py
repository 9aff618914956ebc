# SPDX-License-Identifier: Apache-2.0
"""A hand-over with asynchronous scheduling: a step is scheduled before the output of the previous one is known.

vLLM schedules this way wherever it can, but not on CPUs, so no server of the other tiers does. Real here: vLLM's
``AsyncScheduler``, and the two steps in EngineCore's queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.nodes import (
    CHUNK,
    DECODE_FILLING,
    DECODE_ID,
    NAME,
    PREFILL_FILLING,
    PREFILL_ID,
    PROMPT,
    RESERVED,
    SEND,
    mover,
    nodes,
)
from support.nodes import AsyncNode as Node
from support.waiting import until


@pytest.fixture(params=["", "kv_both"], ids=["own roles", "both roles"])
def node(
    request: pytest.FixtureRequest, direction: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> Iterator[Callable[..., Node]]:
    """For a pure producer vLLM frees blocks that a step under way still writes into; for others it waits."""
    with nodes(Node, tmp_path, log) as make:
        yield lambda filling, **options: make(
            filling, RESERVED, transfer_mode=direction, **{"kv_role": request.param, **options}
        )


def computing(prefill: Node, **params: Any) -> None:
    """Prefill has one step of a longer prompt under way, and the next one scheduled."""
    prefill.add(PREFILL_ID, {**SEND, **params}, 1)
    prefill.step()
    assert len(prefill.queued) == 1 and 0 < prefill.tokens(PREFILL_ID) < PROMPT


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_what_is_handed_over_is_what_was_computed(max_tokens: int, direction: str, node: Callable[..., Node]) -> None:
    """A request that ends may have a step more under way than its output says."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK), node(DECODE_FILLING)
    params = prefill.prefilled(max_tokens=1)
    local = decode.asked(params, max_tokens=max_tokens)
    decode.receives(local, prefill)
    decode.ends(prefill)
    prefill.rest(decode)
    prefill.serves(decode)


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_an_abort_between_two_steps_leaves_nothing(who: str, direction: str, node: Callable[..., Node]) -> None:
    """Prefill's while its next chunk is scheduled, decode's while its KV is on the way; the bytes are under way."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK), node(DECODE_FILLING, policy="recompute")
    with pytest.MonkeyPatch.context() as patching:
        gate = mover(direction, prefill, decode).hold_transfers(patching)
        if direction == "push":
            local = decode.registered(prefill)
            computing(prefill, **NAME)
            read = prefill.blocks(PREFILL_ID)[: CHUNK // RESERVED.block_size]
        else:
            local = decode.asked(prefill.prefilled())
        decode.step_until(lambda: gate.kept, prefill)
        (prefill if who == "prefill" else decode).abort(PREFILL_ID if who == "prefill" else DECODE_ID)
        prefill.step()
        decode.step()
        if who == "decode":
            # Its blocks may be another's as soon as nobody writes into them, and not before.
            assert not set(local) & set(free_ids(decode))
        elif direction == "push":
            assert not set(read) & set(free_ids(prefill))
        gate.closed = False
        decode.step_until(lambda: DECODE_ID in decode.ended or who == "decode", prefill)
        prefill.rest(decode)
    prefill.serves(decode)


def free_ids(node: Node) -> list[int]:
    return [
        block.block_id for block in node.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
    ]


def test_blocks_of_a_preempted_request_are_kept_while_they_are_read(
    direction: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next step is under way already, and goes into blocks that are its own no more."""
    if direction == "pull":
        pytest.skip("nothing of a request that computes is read")
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK), node(DECODE_FILLING)
    gate = prefill.hold_transfers(monkeypatch)
    local = decode.registered(prefill)
    computing(prefill, **NAME)
    until(lambda: gate.kept)
    before = prefill.blocks(PREFILL_ID)
    prefill.preempt(PREFILL_ID)
    assert not set(before) & set(free_ids(prefill))
    gate.closed = False
    decode.receives(local, prefill)
    prefill.rest(decode)
