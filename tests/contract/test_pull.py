# SPDX-License-Identifier: Apache-2.0
"""What only a pull has, on the installed vLLM: decode reads blocks, and then the ownership token of prefill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support import attention_engines, engine_node, handover_node
from support.engine_node import DECODE_ID, PREFILL_ID
from support.handover_node import (
    ANOTHER_REQUESTS,
    CHUNK,
    DECODE_FILLING,
    PREFILL_FILLING,
    RESERVED,
    SEND,
    Node,
    asked,
    rest,
)
from support.internals import token_rows_of, tokens_of
from support.transports import until

from kvcached_nixl.patching import Registry

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
node, pair = handover_node.node, handover_node.pair


@pytest.fixture
def direction() -> str:
    return "pull"


def test_the_token_is_there_from_the_last_chunk_until_the_blocks_are_given_back(node: Callable[..., Node]) -> None:
    """Rule R3: as long as it is, decode may read."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK), node(DECODE_FILLING)
    prefill.add(PREFILL_ID, SEND, 1)
    prefill.step()
    prefill.step()
    assert not len(tokens_of(prefill.side.tokens)) and PREFILL_ID not in prefill.transfer_params
    prefill.step()
    assert len(tokens_of(prefill.side.tokens)) == 1 and PREFILL_ID in prefill.transfer_params
    local = asked(decode, prefill.transfer_params[PREFILL_ID])
    prefill.step_until(lambda: PREFILL_ID in prefill.sent)
    assert not len(tokens_of(prefill.side.tokens)) and not token_rows_of(prefill.side.tokens).any()
    decode.step_until(lambda: DECODE_ID in decode.received)
    assert decode.holds(local)
    rest(prefill, decode)


def test_the_stock_connector_hands_out_another_requests_bytes(patched: Registry, node: Callable[..., Node]) -> None:
    """What the tests of leases are about; if this fails, vLLM has learned it."""
    patched.uninstall()
    exact = dataclasses.replace(RESERVED, reserved_blocks=RESERVED.num_blocks)
    prefill, decode = node(PREFILL_FILLING, exact), node(DECODE_FILLING, exact)
    prefill.add(PREFILL_ID, SEND, 1)
    prefill.step_until(lambda: PREFILL_ID in prefill.worker._reqs_to_send)
    params, blocks = prefill.transfer_params[PREFILL_ID], prefill.blocks(PREFILL_ID)
    prefill.worker._reqs_to_send[PREFILL_ID] = 0.0
    # vLLM's own would sleep.
    until(lambda: engine_node.Node.step(prefill) and PREFILL_ID in prefill.sent)
    prefill.fill(blocks, ANOTHER_REQUESTS)
    local = asked(decode, params)
    decode.step_until(lambda: DECODE_ID in decode.received)
    assert decode.are_filled(local, ANOTHER_REQUESTS)
    decode.step_until(lambda: DECODE_ID in decode.ended)
    assert decode.ended[DECODE_ID] == "length"


# ---------------------------------------------------------------------------------------- READs that do not end or fail
