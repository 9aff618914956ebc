# SPDX-License-Identifier: Apache-2.0
"""Hand-overs between two engines, for every direction and kind of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from vllm.v1.request import RequestStatus

from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.worker.transfer import peers
from support import handover_node
from support.attention_engines import ERAS
from support.engine_node import BLOCKS, DECODE_ID, PREFILL_ID, PROMPT, USABLE, same
from support.handover_node import (
    ANOTHER_REQUESTS,
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
    until_both,
)
from support.internals import leftovers
from support.transports import until

direction, node, pair = handover_node.direction, handover_node.node, handover_node.pair
SHORT_SECONDS = 0.4
POLICIES = ["fail", "recompute"]


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
    params = prefilled(prefill, PREFILL_ID)
    blocks = prefill.blocks(PREFILL_ID)
    local = asked(decode, params)
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
    rest(prefill, decode)


def test_prefill_lets_go_of_what_decode_has_cached_altogether(pair: tuple[Node, Node]) -> None:
    """Prefill frees its blocks long before the lease ends: decode tells it that it needs nothing (vllm#41269)."""
    prefill, decode = pair
    decode.add("cmpl-y-0-dddddddd", None, num_tokens=PROMPT + 1)
    decode.step_until(lambda: "cmpl-y-0-dddddddd" in decode.ended)
    params = prefilled(prefill, PREFILL_ID)
    assert prefill.free_blocks == USABLE - BLOCKS
    decode.add(DECODE_ID, params, num_tokens=PROMPT + 4)
    decode.step()
    assert decode.status(DECODE_ID) == RequestStatus.RUNNING
    assert decode.holds(decode.blocks(DECODE_ID), end=PROMPT + 4)
    until_both(prefill, decode, lambda: PREFILL_ID in prefill.sent)
    rest(prefill, decode)


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
    local = asked(decode, params)
    until_both(prefill, decode, lambda: DECODE_ID in decode.received)
    assert decode.holds(local)
    rest(prefill, decode)


def test_decodes_request_aborted_in_its_queue_frees_prefills_blocks(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    params = prefilled(prefill, PREFILL_ID)
    assert prefill.free_blocks == USABLE - BLOCKS
    decode.add(DECODE_ID, params)
    decode.abort(DECODE_ID)
    assert decode.scheduler.has_requests()
    decode.step()
    prefill.step_until(lambda: PREFILL_ID in prefill.sent)
    rest(prefill, decode)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("known", [False, True], ids=["strangers", "peers"])
def test_parameters_of_a_lease_that_has_ended_give_no_bytes(
    policy: str, known: bool, node: Callable[..., Node]
) -> None:
    """The blocks hold another request's KV by then."""
    prefill, decode = node(PREFILL_FILLING, kv_lease_duration=SHORT_SECONDS), node(DECODE_FILLING, policy=policy)
    if known:
        served(prefill, decode)
    params = prefilled(prefill, PREFILL_ID)
    blocks = prefill.blocks(PREFILL_ID)
    rest(prefill)
    assert PREFILL_ID in prefill.sent
    # A staged offer keeps no blocks, so its lease may end after the last step.
    until(lambda: prefill.step() and prefill.account["num_kv_expired_reqs"] == [1])
    prefill.fill(blocks, ANOTHER_REQUESTS)
    decode.add(DECODE_ID, params)
    ends_by_policy(policy, decode, prefill)
    assert decode.account["kvcached_nixl_failures"] == [FailureCause.LEASE]
    served(prefill, decode, 8)


def test_a_peer_that_was_forgotten_is_met_again(pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """No request has named the peer for a while, and neither side keeps any state of it (finding C5)."""
    prefill, decode = pair
    monkeypatch.setattr(peers, "FORGOTTEN_SECONDS", 0.3)
    served(prefill, decode)
    until(lambda: not any(len(one.context.peers) for one in pair))
    until(lambda: not leftovers(*(one.context.peers for one in pair)))
    served(prefill, decode, 8)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("known", [False, True], ids=["strangers", "peers"])
def test_parameters_from_before_prefills_restart_give_no_bytes(
    known: bool, policy: str, node: Callable[..., Node]
) -> None:
    """The restarted engine has the same id and address and, in the same blocks, another request."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING, policy=policy, handover_timeout=10)
    if known:
        served(prefill, decode)
    params = prefilled(prefill, PREFILL_ID)
    prefill.die()
    again = node(ANOTHER_REQUESTS, replaces=prefill, kv_lease_duration=SHORT_SECONDS)
    assert again.engine.engine_id == params["remote_engine_id"]
    prefilled(again, PREFILL_ID, 200)
    decode.add(DECODE_ID, params)
    ends_by_policy(policy, decode, again)
    (cause,) = decode.account["kvcached_nixl_failures"]
    assert cause in (FailureCause.RESTARTED, FailureCause.LOST) if known else cause == FailureCause.RESTARTED
    served(again, decode, 8)
