# SPDX-License-Identifier: Apache-2.0
"""Weights or adapters change on engines that are never idle: vLLM's scheduler, its pool and kvcached's, real NIXL.

Requests that arrive later share nothing with what was computed before, or in part before; they share what they compute
themselves, and it is handed over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support import attention_engines, engine_node, handover_node
from support.engine_node import nodes
from support.handover_node import DECODE_FILLING, PREFILL_FILLING, RESERVED, prefilled, until_both
from support.kvcached_pool import elastic_pool, put_into
from vllm.lora.request import LoRARequest

from kvcached_nixl.vllm.patches.engine_blocks import EngineBlocks
from kvcached_nixl.wire.handshake import Tensors, Weights
from kvcached_nixl.wire.params import CACHED_TOKENS_KEY

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
direction = handover_node.direction

GEOMETRY = dataclasses.replace(RESERVED, num_blocks=41, reserved_blocks=50)
BLOCK = GEOMETRY.block_size
SHARED = 2 * BLOCK
OTHER = Weights(Tensors("1" * 32, "8" * 32), files="9" * 32)
ADAPTER = LoRARequest("a", 1, "/nowhere", load_inplace=True)
BUSY = "cmpl-b-0-bbbbbbbb"


class Node(handover_node.Node):
    """An engine that is never idle: the model takes for ever to compute the first token of the request `BUSY`."""

    adapter: LoRARequest | None = None

    def run(self, output: Any) -> Any:
        result = super().run(output)
        for place, request_id in enumerate(result.req_ids):
            if request_id == BUSY:
                result.sampled_token_ids[place] = []
        return result

    def add(self, request_id: str, *arguments: Any, **options: Any) -> None:
        add_request = self.scheduler.add_request

        def with_adapter(request: Any) -> None:
            if self.adapter is not None:
                request.lora_request = self.adapter
                request.block_hashes.clear()
                request.update_block_hashes()
            add_request(request)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.scheduler, "add_request", with_adapter)
            super().add(request_id, *arguments, **options)

    def ends(self, request_id: str) -> None:
        self.step_until(lambda: request_id in self.ended)

    def cached_tokens(self, request_id: str) -> int:
        """Returns how many tokens of a request are in the prefix cache now."""
        manager = self.scheduler.kv_cache_manager
        return int(manager.get_computed_blocks(self.scheduler.requests[request_id])[1])

    def blocks_in_use(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return sum(block.ref_cnt > 0 for block in pool.blocks if not block.is_null)


class Content:
    """Of the weights, or of the adapter: the model's bytes follow from it, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        kv = handover_node.kv
        monkeypatch.setattr(handover_node, "kv", lambda *found: (kv(*found) + 17 * self.now) % 241)

    def change(self, *both: Node) -> None:
        self.now += 1
        for node in both:
            revocations = node.side_of_engine.revocations
            if node.adapter is not None:
                revocations.adapters_changed(node.adapter.lora_int_id)
                continue
            revocations.weights_changed()
            node.engine.weights = OTHER
            node.listen()


@pytest.fixture
def content(monkeypatch: pytest.MonkeyPatch) -> Content:
    return Content(monkeypatch)


@pytest.fixture(params=["vLLM's pool", "kvcached's pool"])
def make(
    request: pytest.FixtureRequest,
    direction: str,
    tmp_path: Any,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Node]]:
    with nodes(Node, tmp_path, log) as made:

        def one(filling: int, **options: Any) -> Node:
            node = made(filling, GEOMETRY, transfer_mode=direction, **options)
            if "kvcached" in request.param:
                put_into(node.scheduler, elastic_pool(monkeypatch, GEOMETRY.num_blocks, BLOCK))
            return node

        yield one


@pytest.fixture
def busy(make: Callable[..., Node]) -> tuple[Node, Node]:
    both = make(PREFILL_FILLING), make(DECODE_FILLING)
    for node in both:
        node.add(BUSY, None, num_tokens=SHARED + 6)
        node.step()
        assert node.blocks_in_use() == 3
    return both


def handed_over(prefill: Node, decode: Node, num_tokens: int) -> tuple[int, int]:
    """Hands a prompt over that begins as `BUSY` does. Returns how many tokens of it each side had cached."""
    theirs, ours = f"cmpl-{num_tokens}-0-aaaaaaaa", f"cmpl-{num_tokens}-0-dddddddd"
    params = prefilled(prefill, theirs, num_tokens=num_tokens)
    assert params is not None and not decode.account["kvcached_nixl_failures"]
    decode.add(ours, params, num_tokens=num_tokens)
    cached = decode.cached_tokens(ours)
    decode.step()
    blocks = decode.blocks(ours)
    until_both(prefill, decode, lambda: ours in decode.received)
    assert decode.holds(blocks, 0, num_tokens)
    until_both(prefill, decode, lambda: ours in decode.ended)
    assert decode.ended[ours] == "length" and not decode.account["kvcached_nixl_failures"]
    return params[CACHED_TOKENS_KEY], cached


def test_a_shared_prompt_is_served_on_at_once(busy: tuple[Node, Node], content: Content) -> None:
    prefill, decode = busy
    assert handed_over(prefill, decode, SHARED + 10) == (SHARED, SHARED)
    for turn in range(2):
        content.change(*busy)
        assert handed_over(prefill, decode, SHARED + 14 + turn) == (0, 0)
        assert handed_over(prefill, decode, SHARED + 18 + turn) == (SHARED, SHARED)
    assert all(BUSY in node.scheduler.requests for node in busy)
    for node in busy:
        node.abort(BUSY)
        until_both(*busy, lambda node=node: not node.blocks_in_use())  # type: ignore[misc]


@pytest.mark.parametrize("has_adapter", [False, True], ids=["weights", "adapter"])
@pytest.mark.parametrize("window", [None, 2 * BLOCK])
def test_nobody_shares_what_was_computed_in_part_before(
    window: int | None, has_adapter: bool, make: Callable[..., Node], content: Content
) -> None:
    """Of a request that was running then: neither what it had, nor what it goes on to compute. With a sliding window
    vLLM looks for the last blocks of a prompt first, whether the first ones are cached or not."""
    prefill = make(PREFILL_FILLING, tokens_a_step=BLOCK, windows=[window])
    prefill.adapter = ADAPTER if has_adapter else None
    whole = 4 * BLOCK
    prefill.add("cmpl-s-0-aaaaaaaa", {"do_remote_decode": True}, 1, num_tokens=whole + 1)
    prefill.step()
    prefill.step()
    content.change(prefill)
    prefill.ends("cmpl-s-0-aaaaaaaa")
    assert "cmpl-s-0-aaaaaaaa" not in prefill.transfer_params, "it is offered to nobody"
    for number, (num_tokens, cached) in enumerate([(2 * BLOCK + 1, 0), (whole + 1, 2 * BLOCK), (whole + 2, whole)]):
        first = 0 if window is None else num_tokens // BLOCK
        name = f"cmpl-n{number}-0-aaaaaaaa"
        prefill.add(name, None, 2, num_tokens=num_tokens)
        output = prefill.scheduler.schedule()
        assert [one.num_computed_tokens for one in output.scheduled_new_reqs] == [cached]
        prefill.take(output, prefill.run(output))
        while prefill.tokens(name) < num_tokens:
            prefill.step()
        assert prefill.holds(prefill.blocks(name)[first:], first * BLOCK, num_tokens)
        prefill.ends(name)


def test_an_adapter_leaves_what_others_share_now(busy: tuple[Node, Node]) -> None:
    """And a name that is given to another adapter parts those that wait, too."""
    prefill, _ = busy
    blocks = EngineBlocks(prefill.scheduler)
    asked: list[tuple[int, str]] = []
    assert blocks.outdate(lambda *one: bool(asked.append(one))) == set() and asked == [(0, "")]
    assert prefill.cached_tokens(BUSY) == SHARED
    prefill.adapter = ADAPTER
    prefill.add("cmpl-w-0-aaaaaaaa", None, num_tokens=SHARED + 6)
    waiting = prefill.scheduler.requests["cmpl-w-0-aaaaaaaa"]
    before = list(waiting.block_hashes)
    assert blocks.outdate(lambda _, name: name == "a") == set() and waiting.block_hashes == before
    blocks.outdate(lambda _, name: name == "a", even_waiting=True)
    assert len(waiting.block_hashes) == 2 and not {*before} & {*waiting.block_hashes}
    prefill.adapter = None
    assert blocks.outdate(lambda *_: True) == {BUSY}
    assert prefill.cached_tokens(BUSY) == 0
