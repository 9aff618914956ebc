# SPDX-License-Identifier: Apache-2.0
"""What only a push has, on the installed vLLM: decode may ask first, and prefill writes while it still computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")

import msgspec
from support import attention_engines, engine_node, handover_node
from support.engine_node import BLOCKS, DECODE_ID, PREFILL_ID, USABLE
from support.handover_node import (
    ANOTHER_REQUESTS,
    BLOCK_SIZE,
    CHUNK,
    DECODE_FILLING,
    NAME,
    PREFILL_FILLING,
    SEND,
    Node,
    asked,
    ends_by_policy,
    notifications_held,
    prefilled,
    registered,
    rest,
    served,
    transfers_held,
    until_both,
)
from support.internals import outcome_of
from support.transports import nixl_side, until
from vllm.v1.request import RequestStatus
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from kvcached_nixl.scheduler.kept_offers import KeptOffers
from kvcached_nixl.vllm.patches.engine_blocks import EngineBlocks
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.messages import Withdrawal, Written, encode
from kvcached_nixl.wire.step import OfferUpdate
from kvcached_nixl.worker.prefill import matching as pairing

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
node, pair = handover_node.node, handover_node.pair

POLICIES = ["fail", "recompute"]


@pytest.fixture
def direction() -> str:
    return "push"


# ----------------------------------------------------------------------------------- who asks first, and by which name

NAMES = {
    "transfer_id": ({"transfer_id": "t1"}, {"transfer_id": "t1"}, DECODE_ID),
    "X-Request-Id": ({}, {}, DECODE_ID),
    "remote_request_id": ({}, {"remote_request_id": PREFILL_ID}, "cmpl-another-0-dddddddd"),
}


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("name", list(NAMES))
def test_the_two_requests_meet_in_either_order(name: str, first: str, pair: tuple[Node, Node]) -> None:
    """With what prefill answers if it comes first, with what a router knows by itself if decode does."""
    prefill, decode = pair
    theirs, own, decode_id = NAMES[name]
    if first == "decode":
        asked(decode, {**prefill.address(), **own}, decode_id)
        until(lambda: prefill.write_tasks)
    # Another request, which nobody asks for.
    prefill.add("cmpl-z-0-aaaaaaaa", {**SEND, **({"transfer_id": "t2"} if theirs else {})}, 1, 200)
    prefill.add(PREFILL_ID, {**SEND, **theirs}, 1)
    prefill.step()
    if first == "prefill":
        answer = prefill.transfer_params[PREFILL_ID]
        assert answer.items() >= {**prefill.address(PREFILL_ID), **theirs, "transfer_mode": "push"}.items()
        asked(decode, answer, decode_id)
    local = decode.blocks(decode_id)
    prefill.step_until(lambda: PREFILL_ID in prefill.sent)
    decode.step_until(lambda: decode_id in decode.received)
    assert decode.holds(local)
    assert "cmpl-z-0-aaaaaaaa" not in prefill.sent and prefill.side_of_engine.num_kept


@pytest.mark.parametrize("order", ["prefill's prompts in the same order", "in the other order"])
@pytest.mark.parametrize("when", ["prefill first", "decode first", "between"])
def test_two_prompts_under_one_name_are_told_apart_by_what_was_computed(
    when: str, order: str, pair: tuple[Node, Node]
) -> None:
    """Finding A2: decode has no manifest. The name proposes, the digest pairs."""
    prefill, decode = pair
    theirs = [("cmpl-x-0-aaaaaaaa", 0), ("cmpl-x-0-bbbbbbbb", 200)]
    own = [("cmpl-x-0-dddddddd", 0), ("cmpl-x-0-eeeeeeee", 200)]
    if order == "in the other order":
        theirs.reverse()
    steps: list[Callable[[], Any]] = []
    asks = [lambda one=one: asked(decode, {**prefill.address(), **NAME}, one[0], first_token=one[1]) for one in own]
    computes = [lambda one=one: prefilled(prefill, one[0], one[1], **NAME) for one in theirs]
    if when == "prefill first":
        steps = [*computes, *asks]
    elif when == "decode first":
        steps = [*asks, lambda: until(lambda: len(prefill.write_tasks) == 2), *computes]
    else:
        steps = [asks[0], computes[0], asks[1], computes[1]]
    for step in steps:
        step()
        prefill.settle()
    seen: dict[str, bool] = {}

    def look() -> bool:
        for request_id, first_token in own:
            if request_id in decode.received and request_id not in seen:
                seen[request_id] = decode.holds(decode.blocks(request_id), first_token=first_token)
        return len(seen) == 2

    until_both(prefill, decode, look)
    assert all(seen.values())
    rest(prefill, decode)
    assert set(decode.ended.values()) == {"length"}


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_equal_prompts_under_one_name_are_one_for_each(first: str, pair: tuple[Node, Node]) -> None:
    """Finding A2: two requests of the same prompt and name, without a manifest, and neither is left over."""
    prefill, decode = pair

    def ask() -> None:
        for own in ("cmpl-x-0-dddddddd", "cmpl-x-0-eeeeeeee"):
            asked(decode, {**prefill.address(), **NAME}, own, max_tokens=1)

    if first == "decode":
        ask()
        until(lambda: len(prefill.write_tasks) == 2)
    for theirs in ("cmpl-x-0-aaaaaaaa", "cmpl-x-0-bbbbbbbb"):
        prefilled(prefill, theirs, **NAME)
    if first == "prefill":
        ask()
    until_both(prefill, decode, lambda: len(decode.ended) == 2)
    assert set(decode.ended.values()) == {"length"}
    rest(prefill, decode)
    assert not prefill.account["num_kv_expired_reqs"]


@pytest.mark.parametrize("before", ["served, then decode first", "not served, then prefill first"])
def test_a_client_may_use_its_request_id_again(before: str, node: Callable[..., Node]) -> None:
    """X-Request-Id is the client's: it may repeat one after a request of it has ended, well or not (finding B11)."""
    prefill, decode = node(PREFILL_FILLING, handover_timeout=0.3), node(DECODE_FILLING)
    decode.add(DECODE_ID, prefill.address())
    if before == "served, then decode first":
        prefill.add(PREFILL_ID, SEND, 1)
    until_both(prefill, decode, lambda: DECODE_ID in decode.ended)
    rest(prefill, decode)
    theirs, own = "cmpl-x-0-bbbbbbbb", "cmpl-x-0-eeeeeeee"
    assert theirs[:-8] == PREFILL_ID[:-8] and own[:-8] == DECODE_ID[:-8]
    if before == "served, then decode first":
        decode.add(own, prefill.address(), first_token=200)
        decode.step()
        prefill.settle()
        prefill.add(theirs, SEND, 1, 200)
    else:
        prefill.add(theirs, SEND, 1, 200)
        prefill.step()
        prefill.settle()
        decode.add(own, prefill.transfer_params[theirs], first_token=200)
    until_both(prefill, decode, lambda: own in decode.ended)
    assert decode.ended[own] == "length"


RETRIES = ["the same prompt, served before", "aborted on decode", "aborted on prefill", "aborted on both"]


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("before", RETRIES)
def test_a_router_may_try_a_name_again(before: str, first: str, node: Callable[..., Node]) -> None:
    """Finding B11: under the very name and with the very prompt of a try that has ended; nothing of it is left over."""
    prefill, decode = node(PREFILL_FILLING, kv_lease_duration=1, tokens_a_step=CHUNK), node(DECODE_FILLING)
    registered(decode, prefill)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    if before == "the same prompt, served before":
        until_both(prefill, decode, lambda: DECODE_ID in decode.ended)
    else:
        prefill.step()
        for one, request_id in ((prefill, PREFILL_ID), (decode, DECODE_ID)):
            if before in ("aborted on both", f"aborted on {'prefill' if one is prefill else 'decode'}"):
                one.abort(request_id)
        if before == "aborted on decode":
            prefill.step_until(lambda: PREFILL_ID in prefill.ended)
    until_both(prefill, decode, lambda: not prefill.write_tasks and not len(decode.receiver))
    theirs, own = "cmpl-x-0-bbbbbbbb", "cmpl-x-0-eeeeeeee"

    def compute() -> None:
        prefill.add(theirs, {**SEND, **NAME}, 1)
        prefill.step_until(lambda: theirs in prefill.transfer_params)

    if first == "prefill":
        compute()
    decode.add(own, {**prefill.address(), **NAME})
    decode.step()
    prefill.settle()
    if first == "decode":
        compute()
    until_both(prefill, decode, lambda: own in decode.ended)
    assert decode.ended[own] == "length" and FailureCause.LOST not in decode.account["kvcached_nixl_failures"]
    rest(prefill, decode)


# ----------------------------------------------------------------------------------------------- while prefill computes


def test_blocks_travel_while_prefill_still_computes(node: Callable[..., Node]) -> None:
    """Chunks end inside blocks: whole blocks go, each before the next chunk is computed, and nothing else."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK), node(DECODE_FILLING)
    local = registered(decode, prefill)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    for computed, whole in ((CHUNK, 1), (2 * CHUNK, 2)):
        prefill.step()
        assert prefill.tokens(PREFILL_ID) == computed
        until(lambda whole=whole: decode.holds(local, end=whole * BLOCK_SIZE))
        prefill.settle()
        assert decode.are_filled(local[whole:], DECODE_FILLING)
        assert prefill.status(PREFILL_ID) == RequestStatus.RUNNING
        decode.step()
        assert decode.waits(DECODE_ID) and DECODE_ID not in decode.received
    prefill.step()
    assert PREFILL_ID in prefill.transfer_params
    until(lambda: decode.moved)
    assert decode.holds(local)
    assert decode.are_filled(decode.all_but(local), DECODE_FILLING)
    decode.step_until(lambda: DECODE_ID in decode.ended)
    rest(prefill, decode)


def test_what_a_step_that_raises_was_to_compute_is_not_written(node: Callable[..., Node]) -> None:
    """vLLM's own code around a model: it calls ``wait_for_save`` in a ``finally``, even if the model has raised."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING, policy="fail")
    local = registered(decode, prefill)
    (writing,) = prefill.write_tasks.values()
    until(lambda: writing.known)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    output = prefill.scheduler.schedule()
    with (
        mock.patch.object(mixin, "get_kv_transfer_group", lambda: prefill.engine.worker),
        mock.patch.object(mixin, "get_forward_context", lambda: None),
        pytest.raises(MemoryError, match="planted"),
        mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(output),
    ):
        raise MemoryError("planted")
    prefill.settle()
    assert writing.offer is not None and not writing.next_token, "no WRITE was made"
    assert decode.are_filled(local, DECODE_FILLING) and decode.waits(DECODE_ID)
    prefill.abort(PREFILL_ID)
    ends_by_policy("fail", decode, prefill)


def test_a_prompt_that_goes_on_behind_what_decode_wants_is_not_written(node: Callable[..., Node]) -> None:
    """Finding A1 (d), decode first: prefill's prompt is longer than decode's, and begins with it."""
    prefill, decode = (
        node(PREFILL_FILLING, tokens_a_step=CHUNK, kv_lease_duration=0.4, handover_timeout=1),
        node(DECODE_FILLING, policy="recompute"),
    )
    registered(decode, prefill)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1, num_tokens=2 * BLOCKS * BLOCK_SIZE)
    ends_by_policy("recompute", decode, prefill)
    assert decode.account["kvcached_nixl_failures"] == [FailureCause.DEADLINE]


@pytest.mark.parametrize("policy", POLICIES)
def test_prefills_request_aborted_while_it_computes_ends_decodes(
    policy: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of both come free when the WRITE that is in flight has ended, and not before."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK), node(DECODE_FILLING, policy=policy)
    registered(decode, prefill)
    gate = transfers_held(prefill, monkeypatch)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    prefill.step()
    until(lambda: gate.kept)
    blocks = prefill.blocks(PREFILL_ID)
    prefill.abort(PREFILL_ID)
    for _ in range(3):
        prefill.step()
        prefill.settle()
        decode.step()
    assert prefill.free_blocks == USABLE - len(blocks) and prefill.side_of_engine.num_kept
    assert decode.waits(DECODE_ID)
    gate.closed = False
    ends_by_policy(policy, decode, prefill)
    assert "ended before it was computed" in decode.log.text
    served(prefill, decode, 8)


@pytest.mark.parametrize("order", ["registered before", "registered after"])
@pytest.mark.parametrize("policy", POLICIES)
def test_prefills_request_aborted_in_its_queue_ends_decodes(
    policy: str, order: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once if decode has registered; else soon, because the router may be trying both again."""
    monkeypatch.setattr(pairing, "GRACE_SECONDS", 0.3)
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING, policy=policy)
    if order == "registered before":
        registered(decode, prefill)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    prefill.abort(PREFILL_ID)
    assert prefill.scheduler.has_requests()
    prefill.step()
    if order == "registered after":
        prefill.settle()
        asked(decode, {**prefill.address(), **NAME})
    ends_by_policy(policy, decode, prefill)
    reason = "ended before it was computed" if order == "registered before" else "no request of this name and prompt"
    assert reason in decode.log.text
    served(prefill, decode, 8)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("whose", ["decode's", "prefill's"])
def test_a_registration_that_is_not_served_in_time_fails(whose: str, policy: str, node: Callable[..., Node]) -> None:
    """Prefill has no such request; ``handover_timeout`` of either side ends it, under vLLM's name, too."""
    short = {"push_registration_timeout": 0.3}
    prefill = node(PREFILL_FILLING, **(short if whose == "prefill's" else {}))
    decode = node(DECODE_FILLING, policy=policy, **(short if whose == "decode's" else {}))
    registered(decode, prefill)
    ends_by_policy(policy, decode, prefill)
    assert ("of prefill stopped" if whose == "prefill's" else "has not come within 0.3 s") in decode.log.text
    assert not prefill.write_tasks and not len(decode.receiver)
    assert decode.account["kvcached_nixl_failures"] == [FailureCause.DEADLINE]
    served(prefill, decode, 8)


def test_decodes_request_aborted_before_prefill_hears_of_it_is_not_written(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill computes the request after that, and writes nothing into the blocks.

    It keeps its own for a lease: the name may be used by a next request of decode.
    """
    prefill, decode = node(PREFILL_FILLING, kv_lease_duration=0.3), node(DECODE_FILLING)
    local = registered(decode, prefill)
    gate = notifications_held(prefill, monkeypatch)
    decode.abort(DECODE_ID)
    decode.step()
    until(lambda: gate.kept)
    for _ in range(3):
        decode.settle()
        decode.step()
    # The client has its answer, the engine sleeps, and the blocks are nobody's.
    assert decode.free_blocks == USABLE - BLOCKS and not decode.scheduler.has_requests()
    assert DECODE_ID not in decode.scheduler.requests
    gate.closed = False
    rest(decode)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    prefill.step()
    assert PREFILL_ID in prefill.transfer_params
    rest(prefill, decode)
    assert decode.are_filled(local, DECODE_FILLING)


# --------------------------------------------------------------------------------------------------------- preemption


@pytest.mark.parametrize("times", [1, 2])
def test_blocks_of_a_preempted_request_are_held_while_a_write_reads_them(
    times: int, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts over in other blocks, and decode gets the right bytes whatever comes to stand in the first ones."""
    # Without prefix caching it does not take the first ones up again.
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK, prefix_caching=False), node(DECODE_FILLING)
    local, gate = registered(decode, prefill), transfers_held(prefill, monkeypatch)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    lost: list[int] = []
    for number in range(times):
        prefill.step()
        if not number:
            until(lambda: gate.kept)
        assert not set(lost) & set(prefill.blocks(PREFILL_ID))
        if not number:
            lost = prefill.blocks(PREFILL_ID)
        prefill.preempt(PREFILL_ID)
        # The second time the worker was not told of its blocks, so they are free at once.
        assert prefill.free_blocks == USABLE - len(lost) and prefill.side_of_engine.pending is not bool(number)
    for _ in range(2):
        prefill.step()
        prefill.settle()
    again = prefill.blocks(PREFILL_ID)
    assert prefill.tokens(PREFILL_ID) == 2 * CHUNK
    assert not set(lost) & set(again) and prefill.free_blocks == USABLE - len(lost) - len(again)

    gate.closed = False
    until(lambda: outcome_of(prefill.thread).idle_holds)
    assert prefill.free_blocks == USABLE - len(lost) - len(again)
    prefill.step()
    assert PREFILL_ID in prefill.transfer_params
    if PREFILL_ID not in prefill.sent:
        assert prefill.free_blocks == USABLE - BLOCKS
    prefill.fill(lost, ANOTHER_REQUESTS)
    prefill.step_until(lambda: PREFILL_ID in prefill.sent)
    until(lambda: decode.moved)
    assert decode.holds(local)
    assert decode.are_filled(decode.all_but(local), DECODE_FILLING)
    decode.step_until(lambda: DECODE_ID in decode.ended)
    rest(prefill, decode)


@pytest.mark.parametrize("times", [1, 2])
def test_blocks_of_a_preempted_request_that_was_only_offered_are_held_until_the_worker_knows(
    times: int, node: Callable[..., Node]
) -> None:
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK, prefix_caching=False), node(DECODE_FILLING)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    for number in range(times):
        prefill.step()
        prefill.settle()
        lost = prefill.blocks(PREFILL_ID)
        prefill.preempt(PREFILL_ID)
        if number:
            # The worker was not told of these.
            assert prefill.free_blocks == USABLE
            continue
        assert prefill.free_blocks == USABLE - len(lost) and prefill.side_of_engine.pending
        # It takes its new blocks before the workers hear of it.
        prefill.step()
        assert not set(lost) & set(prefill.blocks(PREFILL_ID))
        prefill.settle()
    prefill.step()
    again = prefill.blocks(PREFILL_ID)
    assert prefill.free_blocks == USABLE - len(again)
    prefill.fill([block_id for block_id in lost if block_id not in again], ANOTHER_REQUESTS)
    prefill.step_until(lambda: PREFILL_ID in prefill.transfer_params)
    local = asked(decode, prefill.transfer_params[PREFILL_ID])
    until_both(prefill, decode, lambda: DECODE_ID in decode.received)
    assert decode.holds(local)
    decode.step_until(lambda: DECODE_ID in decode.ended)
    rest(prefill, decode)


def test_a_request_of_prefill_that_another_one_starves_arrives_all_the_same(node: Callable[..., Node]) -> None:
    """The scheduler itself preempts it, and it takes its own blocks up again from the prefix cache."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK), node(DECODE_FILLING)
    local = registered(decode, prefill)
    # Its seven blocks are full, so its second token needs one more; the other request wants the last three.
    num_tokens = (USABLE - BLOCKS) * BLOCK_SIZE - 1
    prefill.add("cmpl-y-0-aaaaaaaa", None, 8, 200, num_tokens=num_tokens)
    prefill.step_until(lambda: prefill.scheduler.requests["cmpl-y-0-aaaaaaaa"].num_output_tokens)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    request = prefill.scheduler.requests[PREFILL_ID]
    prefill.step_until(lambda: request.num_preemptions)
    prefill.step_until(lambda: PREFILL_ID in prefill.transfer_params)
    assert "cmpl-y-0-aaaaaaaa" in prefill.ended
    prefill.step()
    until(lambda: decode.moved)
    assert decode.holds(local)
    assert decode.are_filled(decode.all_but(local), DECODE_FILLING)
    decode.step_until(lambda: DECODE_ID in decode.ended)
    rest(prefill, decode)


def test_a_reset_of_the_prefix_cache_revokes_what_is_under_way_and_is_an_error_while_blocks_are_held(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding B12: KV in flight would enter a cache that was cleared. Here no loop waits until it is idle."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK), node(DECODE_FILLING)
    local, gate = registered(decode, prefill), transfers_held(prefill, monkeypatch)
    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    prefill.step()
    until(lambda: gate.kept)
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        decode.scheduler.reset_prefix_cache(reset_running_requests=True)
    gate.closed = False
    until_both(prefill, decode, lambda: DECODE_ID in decode.ended and PREFILL_ID in prefill.ended)
    assert decode.ended[DECODE_ID] == "error" and PREFILL_ID not in prefill.transfer_params
    assert not decode.holds(local)
    rest(prefill, decode)
    for one in (prefill, decode):
        assert one.scheduler.reset_prefix_cache(reset_running_requests=True)
    served(prefill, decode, 8)


# ------------------------------------------------------------------------------------------------ what prefill says


WRITTEN_WRONGLY = {
    "another prompt": ({"digest": "0" * 32}, FailureCause.DIGEST),
    "fewer tokens": ({"num_tokens": BLOCK_SIZE, "groups": ()}, FailureCause.DIGEST),
    "by another start": ({"incarnation": "0" * 16}, FailureCause.RESTARTED),
    "of another request": ({"request_id": "cmpl-z-0-aaaaaaaa"}, FailureCause.PROTOCOL),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("change", "cause"), list(WRITTEN_WRONGLY.values()), ids=list(WRITTEN_WRONGLY))
def test_what_prefill_says_that_it_has_written_is_compared_with_what_was_wanted(
    change: dict[str, Any], cause: FailureCause, policy: str, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Findings A1, A2: decode's own look, should prefill's have failed."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING, policy=policy)
    offer = prefill.registry.offer

    def offer_wrongly(update: OfferUpdate) -> None:
        if update.manifest is not None:
            wrong = msgspec.structs.replace(update.manifest, **change)
            update = msgspec.structs.replace(update, manifest=wrong)
        offer(update)

    with monkeypatch.context() as patching:
        patching.setattr(prefill.registry, "offer", offer_wrongly)
        asked(decode, prefilled(prefill, PREFILL_ID))
        ends_by_policy(policy, decode, prefill)
    assert decode.account["kvcached_nixl_failures"] == [cause]
    served(prefill, decode, 8)


def test_an_engine_that_waits_for_the_other_sleeps(node: Callable[..., Node]) -> None:
    """Registrations and kept blocks do not keep prefill awake; decode wakes at its deadline."""
    prefill, decode = node(PREFILL_FILLING, kv_lease_duration=0.5), node(DECODE_FILLING, handover_timeout=60)
    registered(decode, prefill)
    for _ in range(3):
        decode.settle()
        # A request waits, which vLLM counts; nothing of ours makes it step.
        assert not decode.wakes and not prefill.wakes
        decode.step()
    prefill.add(PREFILL_ID, {**SEND, "transfer_id": "t2"}, 1)
    prefill.step()
    prefill.step()
    assert not prefill.wakes and prefill.free_blocks == USABLE - BLOCKS
    until(lambda: prefill.wakes)
    prefill.step()
    assert PREFILL_ID in prefill.sent
    assert prefill.account["num_kv_expired_reqs"] == [1]
    decode.abort(DECODE_ID)
    assert decode.wakes
    rest(decode)


def test_messages_that_come_twice_or_late_or_from_a_stranger_change_nothing(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both sides, around a push that arrives all the same."""
    prefill, decode = node(PREFILL_FILLING, tokens_a_step=CHUNK), node(DECODE_FILLING)
    local = registered(decode, prefill)
    (writing,) = prefill.write_tasks.values()
    registration, to_decode = writing.registration, decode.agent.name
    to_prefill = prefill.agent.name
    stranger = nixl_side()
    for one in (prefill, decode):
        stranger.transport.add_peer(one.agent.get_agent_metadata())

    def counted(one: Node, say: Callable[..., Any], to: str, notification: bytes, reason: str) -> None:
        before, all_before = one.dropped(reason), one.thread.dropped.total()
        say(to, notif_msg=notification)
        until(lambda: one.dropped(reason) == before + 1)
        assert one.thread.dropped.total() == all_before + 1

    def written(index: int, **changes: Any) -> bytes:
        return encode(msgspec.structs.replace(Written(registration.attempt, 0, index), **changes))

    by_decode, by_prefill = decode.agent.send_notif, prefill.agent.send_notif
    by_stranger = lambda to, notif_msg: stranger.transport.send(to, notif_msg)  # noqa: E731
    counted(prefill, by_decode, to_prefill, encode(registration), "doubled or late registration")
    counted(decode, by_stranger, to_decode, written(0), "not a contributor")
    counted(decode, by_prefill, to_decode, written(0, tp_rank=1), "not a contributor")
    counted(decode, by_prefill, to_decode, written(0, attempt=registration.attempt + 1), "unknown attempt")
    # A stranger's withdrawal is of its own attempts: this one goes on.
    by_stranger(to_prefill, encode(Withdrawal(registration.attempt, registration.decode)))
    until(lambda: prefill.dropped("meant for another agent") == 1)
    assert len(prefill.write_tasks) == 1 and decode.waits(DECODE_ID)

    prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
    prefill.step()
    until(lambda: decode.holds(local, end=BLOCK_SIZE))
    decode.settle()
    by_prefill(to_decode, notif_msg=written(0))
    decode.settle()
    decode.step()
    assert decode.waits(DECODE_ID)
    prefill.step()
    prefill.step()
    prefill.step()
    until(lambda: decode.moved)
    assert decode.holds(local)
    counted(decode, by_prefill, to_decode, written(3), "unknown attempt")
    decode.step_until(lambda: DECODE_ID in decode.ended)
    rest(prefill, decode)
    decode.fill(local, ANOTHER_REQUESTS)
    counted(prefill, by_decode, to_prefill, encode(registration), "doubled or late registration")
    assert decode.are_filled(local, ANOTHER_REQUESTS)
    served(prefill, decode, 8)


@pytest.mark.parametrize("ends", ["decode registers", "decode has taken the rest", "aborted"])
def test_vllm_asks_again_until_a_prompt_may_begin(ends: str, node: Callable[..., Node]) -> None:
    """Decode leaves KV waiting, so prefill computes only what decode has blocks for. The engine rests meanwhile."""
    prefill, decode = node(PREFILL_FILLING), node(DECODE_FILLING)
    other = "cmpl-o-0-oooooooo"
    decode.add(other, {**prefill.address(), "transfer_id": "t0"}, first_token=500)
    decode.step()
    until(lambda: prefill.write_tasks)
    leaves = mock.PropertyMock(return_value=True)
    with mock.patch.object(KeptOffers, "is_left_waiting", leaves):
        prefill.add(PREFILL_ID, {**SEND, **NAME}, 1)
        plain = "cmpl-n-0-nnnnnnnn"
        prefill.add(plain, None, 1, 900)
        prefill.step_until(lambda: plain in prefill.ended)
        prefill.step()
        prefill.settle()
        prefill.step()
        assert prefill.status(PREFILL_ID) is RequestStatus.WAITING and not prefill.tokens(PREFILL_ID)
        blocks = EngineBlocks(prefill.scheduler)
        assert blocks.starved is None and not blocks.stalled and not prefill.wakes
        if ends == "decode has taken the rest":
            leaves.return_value = False
        if ends == "aborted":
            prefill.abort(PREFILL_ID)
        else:
            decode.add(DECODE_ID, {**prefill.address(), **NAME})
            until_both(prefill, decode, lambda: DECODE_ID in decode.received)
            assert decode.holds(decode.blocks(DECODE_ID))
    decode.abort(other)
    rest(prefill, decode)
