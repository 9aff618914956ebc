# SPDX-License-Identifier: Apache-2.0
"""What only a pull has, on the installed vLLM: decode reads blocks, and then the ownership token of prefill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support import attention_engines, engine_node, handover_node
from support.engine_node import DECODE_ID, PREFILL_ID, USABLE
from support.handover_node import (
    ANOTHER_REQUESTS,
    CHUNK,
    DECODE_FILLING,
    PREFILL_FILLING,
    RESERVED,
    SEND,
    Node,
    asked,
    prefilled,
    rest,
    served,
    transfers_held,
    until_both,
)
from support.internals import addresses_of, token_rows_of
from support.transports import until

from kvcached_nixl.patching import Registry
from kvcached_nixl.wire.causes import FailureCause

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
node, pair = handover_node.node, handover_node.pair


@pytest.fixture
def direction() -> str:
    return "pull"


def causes(decode: Node) -> list[FailureCause]:
    return [FailureCause(one) for one in decode.account["kvcached_nixl_failures"]]


def test_the_token_is_there_from_the_last_chunk_until_the_blocks_are_given_back(node: Callable[..., Node]) -> None:
    """Rule R3: as long as it is, decode may read."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK), node(DECODE_FILLING)
    prefill.add(PREFILL_ID, SEND, 1)
    prefill.step()
    prefill.step()
    assert not len(prefill.side.tokens) and PREFILL_ID not in prefill.transfer_params
    prefill.step()
    assert len(prefill.side.tokens) == 1 and PREFILL_ID in prefill.transfer_params
    local = asked(decode, prefill.transfer_params[PREFILL_ID])
    prefill.step_until(lambda: PREFILL_ID in prefill.sent)
    assert not len(prefill.side.tokens) and not token_rows_of(prefill.side.tokens).any()
    decode.step_until(lambda: DECODE_ID in decode.received)
    assert decode.holds(local)
    rest(prefill, decode)


@pytest.mark.parametrize("full", [False, True])
def test_a_request_whose_token_finds_no_room_is_not_used(full: bool, pair: tuple[Node, Node]) -> None:
    """It would take sixty thousand hand-overs; then decode recomputes, and nothing is wrong."""
    prefill, decode = pair
    if full:
        token_rows_of(prefill.side.tokens)[:] = 1
    decode.add(DECODE_ID, prefilled(prefill, PREFILL_ID))
    until_both(prefill, decode, lambda: DECODE_ID in decode.ended)
    decode.step()
    assert causes(decode) == ([FailureCause.LEASE] if full else [])
    assert ("ownership-token table is full" in prefill.log.text) is full


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


def test_a_lost_peer_is_met_at_once_while_another_read_is_in_flight(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding B9: it does not wait for others' READs."""
    slow, lost = node(PREFILL_FILLING), node(PREFILL_FILLING, kv_lease_duration=0.4)
    decode = node(DECODE_FILLING)
    served(lost, decode)
    served(slow, decode, 6)
    (peer,) = (agent for agent in addresses_of(decode.context.peers) if agent == lost.agent.name)
    with monkeypatch.context() as patching:
        gate = transfers_held(decode, patching)
        asked(decode, prefilled(slow, PREFILL_ID))
        until(lambda: gate.kept)
        held, check = list(gate.kept), decode.agent.check_xfer_state
        patching.setattr(gate, "closed", False)
        gate.kept.clear()
        real = type(decode.agent).check_xfer_state.__get__(decode.agent)
        patching.setattr(
            decode.agent, "check_xfer_state", lambda handle: "PROC" if handle in held else str(real(handle))
        )
        decode.agent.remove_remote_agent(peer)
        params = prefilled(lost, "cmpl-z-0-aaaaaaaa", 200)
        decode.add("cmpl-z-0-dddddddd", params, first_token=200, max_tokens=1)
        until_both(lost, decode, lambda: "cmpl-z-0-aaaaaaaa" in lost.sent)
        again = prefilled(lost, "cmpl-z-0-bbbbbbbb", 300)
        local = asked(decode, again, "cmpl-z-0-eeeeeeee", first_token=300)
        until_both(lost, decode, lambda: "cmpl-z-0-eeeeeeee" in decode.received)
        assert decode.holds(local, first_token=300) and decode.waits(DECODE_ID)
        for handle in held:
            decode.agent.transfer(handle)
        patching.setattr(decode.agent, "check_xfer_state", check)
    until_both(slow, decode, lambda: DECODE_ID in decode.ended)
    assert decode.ended[DECODE_ID] == "length"
    rest(slow, lost, decode)
    assert decode.free_blocks == USABLE
