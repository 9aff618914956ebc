# SPDX-License-Identifier: Apache-2.0
"""Prefill has another connector beside NixlConnector, whose loads may fail later. On the installed vLLM."""

from __future__ import annotations

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
    asked,
    registered,
    rest,
    until_both,
)
from support.odd_connectors import Shelf

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
