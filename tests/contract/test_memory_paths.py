# SPDX-License-Identifier: Apache-2.0
"""Each way of memory between two engines, and what another connector has taken back: right bytes, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import nodes as support_nodes
from support.attention_engines import ERAS
from support.nodes import (
    ANOTHER_REQUESTS,
    BLOCK_SIZE,
    CHUNK,
    DECODE_FILLING,
    DECODE_ID,
    NAME,
    PREFILL_FILLING,
    PREFILL_ID,
    PROMPT,
    RESERVED,
    SEND,
    Node,
    nodes,
    same,
)
from support.odd_connectors import Shelf
from support.waiting import until

from kvcached_nixl.transport.agent import Transport
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.worker import memory_registration as sizing
from kvcached_nixl.worker.transfer.checksums import Content
from kvcached_nixl.worker.transfer.slab import Use

SHORT = {"kv_lease_duration": 0.4}


class Paths(NamedTuple):
    """The memory paths of prefill and of decode, and whether hand-overs are verified."""

    prefill: str
    decode: str
    is_verified: bool = False


STAGED = {
    "P staged": Paths("host", "direct"),
    "D staged": Paths("direct", "device"),
    "both staged": Paths("device", "host"),
}
VERIFIED = {
    "verified": Paths("direct", "direct", True),
    "P staged, verified": Paths("host", "direct", True),
    "D staged, verified": Paths("direct", "device", True),
}
LONG = [pytest.param(one, id=name, marks=pytest.mark.long) for name, one in {**STAGED, **VERIFIED}.items()]


@pytest.fixture(params=[pytest.param(Paths("direct", "direct"), id="direct"), *LONG])
def paths(request: pytest.FixtureRequest) -> Paths:
    found: Paths = request.param
    return found


@pytest.fixture
def node(
    direction: str, paths: Paths, tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Node]]:
    """Creates nodes, and fails if NIXL gets an address of a staged cache, or if bytes move that are not verified."""
    caches: dict[int, list[range]] = {}
    finders, moved = set[int](), list[int]()
    post, digest = Transport.post, Content.digest

    def watched(self: Transport, operation: Any, peer: str, local: Any, *arguments: Any, **named: Any) -> Any:
        if not named.get("is_host"):
            moved.append(len(local))
            for storage in caches.get(id(self._agent), ()):
                assert not any(begin in storage for begin in local[:, 0].tolist()), "a staged cache is named to NIXL"
        return post(self, operation, peer, local, *arguments, **named)

    def noted(self: Content, *arguments: Any, **options: Any) -> str:
        finders.add(id(self))
        return digest(self, *arguments, **options)

    monkeypatch.setattr(Transport, "post", watched)
    monkeypatch.setattr(Content, "digest", noted)
    with nodes(Node, tmp_path, log) as make:

        def made(filling: int, geometry: Any = RESERVED, **options: Any) -> Node:
            path = paths.prefill if filling == PREFILL_FILLING else paths.decode
            given = {"transfer_mode": direction, "memory_path": path, "verify_fraction": float(paths.is_verified)}
            found = make(filling, geometry, **given, **options)
            if path != "direct":
                storages = [cache.untyped_storage() for cache in found.caches.values()]
                caches[id(found.agent)] = [range(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]
            return found

        yield made
        assert not moved or (len(finders) >= 2) is paths.is_verified


@pytest.mark.parametrize(
    ("era", "contiguous"),
    [(era, contiguous) for era in ERAS if era not in ("mla", "latent") for contiguous in (False, True)],
)
def test_the_missing_blocks_arrive_and_no_other_changes(era: str, contiguous: bool, node: Callable[..., Node]) -> None:
    geometry = dataclasses.replace(RESERVED, era=era, contiguous=contiguous)
    prefill, decode = node(PREFILL_FILLING, geometry), node(DECODE_FILLING, geometry)
    # Makes the block ids of the two sides differ.
    decode.add("cmpl-y-0-dddddddd", None, first_token=200, num_tokens=PROMPT - 8)
    decode.step()
    others = decode.blocks("cmpl-y-0-dddddddd")
    params = prefill.prefilled()
    blocks = prefill.blocks(PREFILL_ID)
    local = decode.asked(params)
    before = decode.content(others)
    assert not set(local) & {*blocks, *others}

    prefill.step_until(lambda: PREFILL_ID in prefill.sent)
    until(lambda: decode.moved)
    assert prefill.holds(blocks) and decode.holds(local)
    assert same(decode.content(local), prefill.content(blocks))
    assert same(decode.content(others), before)
    assert decode.are_filled(decode.all_but([*local, *others]), DECODE_FILLING)
    assert prefill.are_filled(prefill.all_but(blocks), PREFILL_FILLING)
    decode.step_until(lambda: DECODE_ID in decode.ended)
    assert decode.ended[DECODE_ID] == "length"
    prefill.rest(decode)


def test_a_prompt_that_prefill_computed_in_chunks_arrives(node: Callable[..., Node]) -> None:
    """Chunks end inside blocks, and prefill is preempted once and starts again without its prefix cache."""
    prefill = node(PREFILL_FILLING, tokens_a_step=CHUNK, prefix_caching=False)
    decode = node(DECODE_FILLING, tokens_a_step=CHUNK)
    prefill.add(PREFILL_ID, SEND, 1)
    prefill.step()
    prefill.preempt(PREFILL_ID)
    params = None
    prefill.step_until(lambda: PREFILL_ID in prefill.transfer_params)
    params = prefill.transfer_params[PREFILL_ID]
    local = decode.asked(params)
    decode.receives(local, prefill)
    prefill.rest(decode)


@pytest.mark.parametrize(("policy", "known"), [("fail", False), ("recompute", True)], ids=["strangers", "peers"])
def test_parameters_of_a_lease_that_has_ended_give_no_bytes(
    policy: str, known: bool, node: Callable[..., Node]
) -> None:
    """The blocks hold another request's KV by then (R3)."""
    prefill, decode = node(PREFILL_FILLING, **SHORT), node(DECODE_FILLING, policy=policy, **SHORT)
    if known:
        prefill.serves(decode)
    params = prefill.prefilled()
    blocks = prefill.blocks(PREFILL_ID)
    prefill.rest()
    assert PREFILL_ID in prefill.sent
    # A staged offer keeps no blocks, so its lease may end after the last step.
    until(lambda: prefill.step() and prefill.account["num_kv_expired_reqs"] == [1])
    prefill.fill(blocks, ANOTHER_REQUESTS)
    decode.add(DECODE_ID, params)
    decode.ends_by(policy, prefill)
    assert decode.account["kvcached_nixl_failures"] == [FailureCause.LEASE]
    prefill.serves(decode, 8)


@pytest.mark.parametrize("paths", [pytest.param(one, id=name, marks=pytest.mark.long) for name, one in STAGED.items()])
def test_a_request_that_no_slab_could_hold_goes_through_range_by_range(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "_LARGEST_BLOCK_TOKENS", BLOCK_SIZE)
    monkeypatch.setattr(sizing, "num_slots", lambda layout, load, _, **__: load.fewest_slots)
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    slabs = [one.context.staging for one in (prefill, decode)]
    assert {slab.slots.count for slab in slabs if slab is not None} == {4}
    params = prefill.prefilled()
    local = decode.asked(params)
    until(lambda: prefill.step() and decode.step() and DECODE_ID in decode.received)
    assert decode.holds(local)
    prefill.serves(decode)
    assert not any(slab.slots.used(use) for slab in slabs if slab is not None for use in Use)


shared_node = support_nodes.node


class SharedNode(Node):
    """Its connectors are NixlConnector and a shelf."""

    connector = "MultiConnector"


@pytest.fixture
def shared(direction: str, tmp_path: Path, log: pytest.LogCaptureFixture) -> Iterator[Callable[..., SharedNode]]:
    def one(filling: int, **options: Any) -> SharedNode:
        nixl = {
            # vLLM's own name for push, without a transfer_mode.
            "kv_connector": "NixlPushConnector" if direction == "push" else "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"num_threads": 0},
        }
        shelf = {"kv_connector": "Shelf", "kv_connector_module_path": "support.odd_connectors", "kv_role": "kv_both"}
        return make(
            filling,
            RESERVED,
            connectors=[nixl, shelf],
            trusted_connectors=["Shelf"],
            **{"policy": "recompute", **options},
        )

    for told in (Shelf.promises, Shelf.broken):
        told.clear()
    with nodes(SharedNode, tmp_path, log) as make:
        yield one


@pytest.mark.parametrize("broken", [0, 1])
def test_tokens_that_another_connector_has_taken_back_are_handed_over_as_they_were_computed_in_the_end(
    broken: int, direction: str, shared: Callable[..., SharedNode], shared_node: Callable[..., Node]
) -> None:
    """Finding A8: two blocks are promised, one of them is missing, and vLLM recomputes from there on."""
    prefill, decode = shared(PREFILL_FILLING, tokens_a_step=BLOCK_SIZE), shared_node(DECODE_FILLING)
    local = decode.registered(prefill) if direction == "push" else []
    Shelf.promises[PREFILL_ID] = 2 * BLOCK_SIZE
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    compute = prefill.compute

    def compute_and_break(output: Any) -> None:
        # What the shelf has loaded rightly.
        request = prefill.scheduler.requests[PREFILL_ID]
        blocks = prefill.blocks(PREFILL_ID)
        for block, (cells, expected) in enumerate(
            prefill.cells(list(request.all_token_ids[: 2 * BLOCK_SIZE]), blocks, 0)
        ):
            if block // RESERVED.num_pools < broken:
                cells.copy_(expected)
        Shelf.broken.update(blocks[broken:2])
        prefill.compute = compute  # type: ignore[method-assign]
        compute(output)

    prefill.compute = compute_and_break  # type: ignore[method-assign]
    prefill.step()
    assert prefill.tokens(PREFILL_ID) == broken * BLOCK_SIZE
    prefill.settle()
    assert not local or decode.are_filled(local, DECODE_FILLING)
    prefill.step_until(lambda: PREFILL_ID in prefill.transfer_params)
    if direction == "pull":
        local = decode.asked(prefill.transfer_params[PREFILL_ID])
    decode.receives(local, prefill)
    decode.ends(prefill)
    prefill.rest(decode)
