# SPDX-License-Identifier: Apache-2.0
"""What only a push has, on the installed vLLM: decode may ask first, and prefill writes while it still computes."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")

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
    registered,
    rest,
    served,
    transfers_held,
    until_both,
)
from support.internals import outcome_of
from support.transports import until
from vllm.v1.request import RequestStatus
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from kvcached_nixl.scheduler.kept_offers import KeptOffers
from kvcached_nixl.vllm.patches.engine_blocks import EngineBlocks
from kvcached_nixl.wire.causes import FailureCause

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
node, pair = handover_node.node, handover_node.pair


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
    until(lambda: outcome_of(prefill.thread).sent)
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
