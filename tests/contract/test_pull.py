# SPDX-License-Identifier: Apache-2.0
"""What only a pull has, on the installed vLLM: decode reads blocks, and then the ownership token of prefill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support import attention_engines, engine_node, handover_node
from support.engine_node import DECODE_ID, PREFILL_ID, USABLE
from support.handover_node import (
    ANOTHER_REQUESTS,
    BLOCK_SIZE,
    CHUNK,
    DECODE_FILLING,
    PREFILL_FILLING,
    RESERVED,
    SEND,
    Node,
    asked,
    ends_by_policy,
    prefilled,
    rest,
    served,
    transfers_held,
    until_both,
)
from support.internals import addresses_of, free_buffers_of, token_rows_of, tokens_of
from support.transports import until

from kvcached_nixl.patching import Registry
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.worker.transfer.ownership_tokens import BUCKETS

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
node, pair = handover_node.node, handover_node.pair

POLICIES = ["fail", "recompute"]


@pytest.fixture
def direction() -> str:
    return "pull"


def causes(decode: Node) -> list[FailureCause]:
    return [FailureCause(one) for one in decode.account["kvcached_nixl_failures"]]


class TokenArray:
    """READs of ownership tokens on a node, recognised by their single row. Each waits until ``look`` allows it."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch, look: Callable[[], bool]) -> None:
        self.posted = 0
        transport = node.context.transport
        post, state, release = transport.post, transport.state, transport.release
        waiting: list[Any] = []

        def transfer_queue(
            operation: str, peer: str, local: Any, remote: Any, *said: Any, is_host: bool = False
        ) -> Any:
            if not is_host:
                return post(operation, peer, local, remote, *said)
            self.posted += 1
            waiting.append([lambda: post(operation, peer, local, remote, *said, is_host=True), None])
            return waiting[-1]

        def looking(handle: Any) -> Any:
            if not isinstance(handle, list):
                return state(handle)
            if handle[1] is None:
                if not look():
                    return type(state(None)).IN_FLIGHT
                handle[1] = handle[0]()
            return state(handle[1])

        monkeypatch.setattr(transport, "post", transfer_queue)
        monkeypatch.setattr(transport, "state", looking)
        monkeypatch.setattr(transport, "release", lambda one: release(one[1] if isinstance(one, list) else one))


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


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_that_are_given_back_while_they_are_read_are_not_used(
    policy: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes have arrived; only the missing ownership token shows that they may be another request's."""
    prefill, decode = node(PREFILL_FILLING, kv_lease_duration=0.3), node(DECODE_FILLING, policy=policy)
    params = prefilled(prefill, PREFILL_ID)
    given_back: list[bool] = []
    with monkeypatch.context() as patching:
        words = TokenArray(decode, patching, lambda: bool(given_back))
        # Nor does prefill hear that decode still waits.
        patching.setattr(decode.agent, "send_notif", lambda *_, **__: None)
        local = asked(decode, params)
        until(lambda: words.posted)
        assert decode.holds(local)
        prefill.step_until(lambda: PREFILL_ID in prefill.sent)
        given_back.append(True)
        ends_by_policy(policy, decode, prefill)
    assert causes(decode) == [FailureCause.LEASE]
    served(prefill, decode, 8)


def test_more_hand_overs_than_tokens_can_be_looked_at_end_one_after_the_other(node: Callable[..., Node]) -> None:
    """Half of them are not kept any more, and only those fail."""
    geometry = dataclasses.replace(RESERVED, num_blocks=29, reserved_blocks=40)
    prefill, decode = node(PREFILL_FILLING, geometry), node(DECODE_FILLING, geometry)
    free_buffers = free_buffers_of(decode.context.token_buffers)
    del free_buffers[2:]
    params = [prefilled(prefill, f"cmpl-{n}-0-aaaaaaaa", 60 * n, BLOCK_SIZE) for n in range(8)]
    rest(prefill)
    params[::2] = [prefilled(prefill, f"cmpl-{n}-0-bbbbbbbb", 60 * n, BLOCK_SIZE) for n in range(0, 8, 2)]
    for n, one in enumerate(params):
        decode.add(f"cmpl-{n}-0-dddddddd", one, first_token=60 * n, num_tokens=BLOCK_SIZE, max_tokens=1)
    until_both(prefill, decode, lambda: len(decode.ended) == 8)
    decode.step()
    ends = [decode.ended[f"cmpl-{n}-0-dddddddd"] for n in range(8)]
    assert ends == ["length", "error"] * 4 and causes(decode) == [FailureCause.LEASE] * 4
    assert len(free_buffers) == 2 and not decode.context.waiting_for_buffer


def test_another_token_in_the_same_bucket_does_not_stand_for_it(node: Callable[..., Node]) -> None:
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    params = prefilled(prefill, PREFILL_ID)
    (word,) = tokens_of(prefill.side.tokens).values()
    rest(prefill)
    for owner in range(1, 20):
        assert prefill.side.tokens.publish(owner, word + owner * BUCKETS)
    decode.add(DECODE_ID, params)
    ends_by_policy("fail", decode, prefill)
    assert causes(decode) == [FailureCause.LEASE]


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
