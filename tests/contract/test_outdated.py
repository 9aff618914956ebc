# SPDX-License-Identifier: Apache-2.0
"""Weights or an adapter change while a request runs: vLLM's scheduler, its pool and kvcached's.

Requests that arrive later share nothing with what was computed before, or in part before; they share what they compute
themselves. tests/flow/test_revocation.py has the hand-overs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support import nodes as support_nodes
from support.kvcached_pool import elastic_pool, put_into
from support.nodes import PREFILL_FILLING, RESERVED, core_request, nodes
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from kvcached_nixl.vllm.patches import engine_blocks
from kvcached_nixl.vllm.patches.engine_blocks import EngineBlocks
from kvcached_nixl.wire.handshake import Tensors, Weights

GEOMETRY = dataclasses.replace(RESERVED, num_blocks=41, reserved_blocks=50)
BLOCK = GEOMETRY.block_size
OTHER = Weights(Tensors("1" * 32, "8" * 32), files="9" * 32)
ADAPTER = LoRARequest("a", 1, "/nowhere", load_inplace=True)


class Node(support_nodes.Node):
    adapter: LoRARequest | None = None

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

    def until_ended(self, request_id: str) -> None:
        self.step_until(lambda: request_id in self.ended)


class Content:
    """Of the weights, or of the adapter: the model's bytes follow from it, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        kv = support_nodes.kv
        monkeypatch.setattr(support_nodes, "kv", lambda *found: (kv(*found) + 17 * self.now) % 241)

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
    tmp_path: Any,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Node]]:
    with nodes(Node, tmp_path, log) as made:

        def one(filling: int, **options: Any) -> Node:
            node = made(filling, GEOMETRY, **options)
            if "kvcached" in request.param:
                put_into(node.scheduler, elastic_pool(monkeypatch, GEOMETRY.num_blocks, BLOCK))
            return node

        yield one


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
    prefill.until_ended("cmpl-s-0-aaaaaaaa")
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
        prefill.until_ended(name)


def test_embeddings_of_images_are_computed_again(make: Callable[..., Node], content: Content) -> None:
    """vLLM keeps them by the image's content, and would give them to the next request with that image."""
    prefill, told = make(PREFILL_FILLING), []
    core = prefill.core
    core.model_executor = SimpleNamespace(reset_encoder_cache=lambda: told.append("workers"))
    core.preprocess_add_request(core_request("cmpl-f-0-aaaaaaaa"))
    content.change(prefill)
    assert not told, "there were no images"
    prefill.add("cmpl-i-0-aaaaaaaa", None, 2, num_tokens=2 * BLOCK)
    request, encoders = prefill.scheduler.requests["cmpl-i-0-aaaaaaaa"], prefill.scheduler.encoder_cache_manager
    encoders.cache_size = encoders.num_free_slots = encoders.num_freeable_slots = 64
    places = [PlaceholderRange(offset=8 * number, length=8) for number in range(2)]
    request.mm_features = [MultiModalFeatureSpec(None, "image", f"image {one.offset}", one) for one in places]
    for number in range(2):
        encoders.allocate(request, number)
    encoders.free_encoder_input(request, 0)
    content.change(prefill)
    assert told == ["workers"] and encoders.num_free_slots == 64
    assert not any(encoders.check_and_update_cache(request, number) for number in range(2))
    encoders.free(request)


def test_other_connectors_forget_what_they_keep(make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself: what is around them would tell NIXL's, too, and a tier that is copying."""
    prefill, told = make(PREFILL_FILLING), []
    other, around = (SimpleNamespace(reset_cache=lambda name=name: told.append(name)) for name in ("other", "around"))
    failing = SimpleNamespace(reset_cache=lambda: 1 // 0)
    around._connectors = [prefill.scheduler.connector, failing, other]
    monkeypatch.setattr(engine_blocks, "connectors", lambda _: [around, *around._connectors])
    EngineBlocks(prefill.scheduler).outdate(lambda *_: True)
    assert told == ["other"]


def test_a_name_that_is_given_to_another_adapter_parts_those_that_wait_too(make: Callable[..., Node]) -> None:
    """Else one that waits would find blocks of the new adapter under its name."""
    prefill = make(PREFILL_FILLING)
    prefill.adapter = ADAPTER
    prefill.add("cmpl-w-0-aaaaaaaa", None, num_tokens=2 * BLOCK + 1)
    waiting, blocks = prefill.scheduler.requests["cmpl-w-0-aaaaaaaa"], EngineBlocks(prefill.scheduler)
    before = list(waiting.block_hashes)
    assert blocks.outdate(lambda _, name: name == "a") == set() and waiting.block_hashes == before
    blocks.outdate(lambda _, name: name == "a", even_waiting=True)
    assert len(waiting.block_hashes) == len(before) == 2 and not {*before} & {*waiting.block_hashes}
