# SPDX-License-Identifier: Apache-2.0
"""Prefill has another connector beside NixlConnector, whose loads may fail later. On the installed vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support import attention_engines, engine_node, handover_node
from support.engine_node import DECODE_ID, PREFILL_ID, nodes
from support.handover_node import (
    BLOCK_SIZE,
    DECODE_FILLING,
    NAME,
    PREFILL_FILLING,
    RESERVED,
    SEND,
    Node,
    all_free,
    asked,
    ends_by_policy,
    prefilled,
    registered,
    rest,
    served,
    transfers_held,
    until_both,
)
from support.internals import fetching_of, leftovers
from support.shelf_connector import Shelf
from support.transports import until

from kvcached_nixl.vllm.adapter.attributes import side_of

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
direction, node = handover_node.direction, handover_node.node


def first_of(several: Any) -> Any:
    """Returns the first connector of vLLM's ``MultiConnector``."""
    return several._connectors[0]


class SharedNode(Node):
    """Its connectors are NixlConnector and a shelf."""

    connector = "MultiConnector"

    @property
    def worker(self) -> Any:
        return first_of(self.engine.worker).connector_worker

    @property
    def connector_scheduler(self) -> Any:
        return first_of(self.engine.scheduler).connector_scheduler

    @property
    def side(self) -> Any:
        return side_of(first_of(self.engine.worker))

    @property
    def side_of_engine(self) -> Any:
        return side_of(first_of(self.engine.scheduler))


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
        shelf = {"kv_connector": "Shelf", "kv_connector_module_path": "support.shelf_connector", "kv_role": "kv_both"}
        return make(
            filling,
            RESERVED,
            connectors=[nixl, shelf],
            trusted_connectors=["Shelf"],
            **{"policy": "recompute", **options},
        )

    for told in (Shelf.promises, Shelf.broken, Shelf.saves, Shelf.saved):
        told.clear()
    with nodes(SharedNode, tmp_path, log) as make:
        yield one


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_the_engine_s_role_counts_not_that_of_its_connector(
    policy: str, direction: str, shared: Callable[..., SharedNode], node: Callable[..., Node]
) -> None:
    """Finding F3: vLLM frees blocks of a pure producer early, whatever a child of its MultiConnector says of itself."""
    prefill, decode = node(PREFILL_FILLING), shared(DECODE_FILLING, kv_role="kv_producer", policy=policy)
    decode.add(DECODE_ID, prefilled(prefill, PREFILL_ID))
    ends_by_policy(policy, decode, prefill)
    assert "this engine's kv_role is kv_producer" in decode.log.text


@pytest.mark.parametrize("broken", [0, 1])
def test_tokens_that_another_connector_has_taken_back_are_handed_over_as_they_were_computed_in_the_end(
    broken: int, direction: str, shared: Callable[..., SharedNode], node: Callable[..., Node]
) -> None:
    """Finding A8: two blocks are promised, one of them is missing, and vLLM recomputes from there on."""
    prefill, decode = shared(PREFILL_FILLING, tokens_a_step=BLOCK_SIZE), node(DECODE_FILLING)
    local = registered(decode, prefill) if direction == "push" else []
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
        local = asked(decode, prefill.transfer_params[PREFILL_ID])
    until_both(prefill, decode, lambda: DECODE_ID in decode.received)
    assert decode.holds(local)
    until_both(prefill, decode, lambda: DECODE_ID in decode.ended)
    assert decode.ended[DECODE_ID] == "length"
    rest(prefill, decode)


@pytest.mark.parametrize("order", ["ours first", "theirs first", "at once"])
def test_an_aborted_request_that_another_connector_saves_is_freed_once_and_when_both_have_let_go(
    order: str,
    shared: Callable[..., SharedNode],
    node: Callable[..., Node],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vllm#46240: it is received and sent, in any order. vLLM frees it at the first, and ends at the second."""
    prefill, decode = node(PREFILL_FILLING), shared(DECODE_FILLING)
    # Prefill writes, in pull, too, where KV is staged.
    gates = [transfers_held(one, monkeypatch) for one in (prefill, decode)]
    asked(decode, prefilled(prefill, PREFILL_ID))
    until(lambda: prefill.step() and decode.step() and any(gate.kept for gate in gates))
    Shelf.saves.add(DECODE_ID)
    decode.abort(DECODE_ID)
    attempts = fetching_of(decode.side_of_engine).attempts
    if order == "theirs first":
        Shelf.saved.add(DECODE_ID)
        decode.step_until(lambda: DECODE_ID not in decode.scheduler.requests)
        assert attempts and not all_free(decode)
    else:
        decode.step()
        assert DECODE_ID in decode.scheduler.requests
    for gate in gates:
        gate.closed = False
    if order == "ours first":
        until_both(prefill, decode, lambda: not attempts)
        decode.step()
        assert DECODE_ID in decode.scheduler.requests and not all_free(decode)
    if order == "at once":
        until(lambda: prefill.step() and decode.moved)
    if order != "theirs first":
        Shelf.saved.add(DECODE_ID)
    step = functools.partial(engine_node.Node.step, decode)
    until(lambda: step() and prefill.step() and DECODE_ID not in decode.scheduler.requests and all_free(decode))
    assert not leftovers(attempts) and not decode.side_of_engine.num_held_blocks
    rest(prefill, decode)
    served(prefill, decode)
