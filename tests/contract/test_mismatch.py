# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode disagree about a request, on the installed vLLM: right bytes or the policy, never wrong bytes.

Sections A and B of the review of the earlier implementation; each test names its finding.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support import attention_engines, engine_node, handover_node
from support.engine_node import BLOCKS, DECODE_ID, PREFILL_ID, PROMPT
from support.handover_node import (
    BLOCK_SIZE,
    DECODE_FILLING,
    NAME,
    PREFILL_FILLING,
    SEND,
    Node,
    asked,
    ends_by_policy,
    prefilled,
    rest,
    served,
    until_both,
)
from support.internals import unfinished_handshakes
from support.transports import until
from vllm.v1.request import RequestStatus

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.wire.causes import FailureCause

pytestmark = pytest.mark.long

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
direction, node, pair = handover_node.direction, handover_node.node, handover_node.pair

SHORT_SECONDS = 0.4
POLICIES = ["fail", "recompute"]


@pytest.fixture
def both(node: Callable[..., Node]) -> Callable[[str], tuple[Node, Node]]:
    """both(policy): prefill and decode."""
    return lambda policy: (node(PREFILL_FILLING), node(DECODE_FILLING, policy=policy))


def causes(decode: Node) -> list[FailureCause]:
    return [FailureCause(one) for one in decode.account["kvcached_nixl_failures"]]


def runs_rightly(prefill: Node, decode: Node, num_tokens: int, first_token: int = 0) -> None:
    """Decode's request gets as far as its own tokens, and all before them are what they must be."""
    until_both(prefill, decode, lambda: DECODE_ID in decode.ended or decode.status(DECODE_ID) == RequestStatus.RUNNING)
    assert decode.holds(decode.blocks(DECODE_ID), 0, num_tokens, first_token)
    until_both(prefill, decode, lambda: DECODE_ID in decode.ended)
    assert decode.ended[DECODE_ID] == "length"


# ------------------------------------------------------------------------------------ A1: blocks, counted from the tail


@pytest.mark.parametrize("computed", [PROMPT, PROMPT - 2, PROMPT - BLOCK_SIZE + 1])
def test_prefill_may_compute_more_than_the_prompt(computed: int, pair: tuple[Node, Node]) -> None:
    """Finding A1 (a): ``max_tokens`` above 1 ends in another block; only the prompt is handed over."""
    prefill, decode = pair
    params = prefilled(prefill, PREFILL_ID, num_tokens=computed, max_tokens=BLOCK_SIZE + 4)
    assert len(prefill.blocks(PREFILL_ID)) > -(-computed // BLOCK_SIZE)
    asked(decode, params, num_tokens=computed)
    runs_rightly(prefill, decode, computed)
    rest(prefill, decode)
    assert causes(decode) == []


def cache(decode: Node, num_tokens: int, first_token: int = 0) -> None:
    """Decode has computed so many tokens of a prompt, and nothing of any other."""
    assert decode.scheduler.reset_prefix_cache()
    if num_tokens:
        decode.add("cmpl-y-0-dddddddd", None, 1, first_token, num_tokens=num_tokens + 1)
        decode.step_until(lambda: "cmpl-y-0-dddddddd" in decode.ended)
    decode.ended.clear()
    decode.received.clear()


def test_decodes_prompt_may_go_on_where_prefills_ends(pair: tuple[Node, Node]) -> None:
    """Finding A1 (b): a router appends what prefill has generated; with a prefix hit and without one."""
    prefill, decode = pair
    computed = PROMPT - 5
    for cached, more in itertools.product([0, BLOCK_SIZE, 2 * BLOCK_SIZE], [1, 7, BLOCK_SIZE, BLOCK_SIZE + 9]):
        cache(decode, cached)
        params = prefilled(prefill, PREFILL_ID, num_tokens=computed)
        local = asked(decode, params, num_tokens=computed + more)
        until_both(prefill, decode, lambda: DECODE_ID in decode.received)
        assert decode.holds(local, 0, computed), (cached, more)
        runs_rightly(prefill, decode, computed + more)
        rest(prefill, decode)
        prefill.transfer_params.clear()
    assert causes(decode) == []


OTHERS: dict[str, dict[str, Any]] = {
    "another prompt": {"first_token": 100},
    "a shorter prompt": {"num_tokens": PROMPT - 3},
    "a prompt of fewer blocks": {"num_tokens": BLOCK_SIZE},
    "a longer prompt that begins otherwise": {"first_token": 1, "num_tokens": PROMPT + 9},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_another_prompt_than_prefills_gets_none_of_its_kv(
    policy: str, both: Callable[[str], tuple[Node, Node]]
) -> None:
    """Finding A1 (d), with a prefix hit and without one."""
    prefill, decode = both(policy)
    params = prefilled(prefill, PREFILL_ID)
    for number, (cached, other) in enumerate(itertools.product([0, BLOCK_SIZE], OTHERS.values()), 1):
        wanted = {"first_token": 0, "num_tokens": PROMPT, **other}
        cache(decode, min(cached, wanted["num_tokens"] - BLOCK_SIZE), wanted["first_token"])
        decode.add(DECODE_ID, params, **wanted)
        ends_by_policy(policy, decode, prefill, **wanted)
        assert causes(decode) == [FailureCause.DIGEST] * number, other
    cache(decode, 0)
    served(prefill, decode, 8)


def test_the_same_tokens_of_another_salt_are_another_prompt(both: Callable[[str], tuple[Node, Node]]) -> None:
    """What the KV is said to follow from is all that vLLM's own prefix cache asks for."""
    prefill, decode = both("fail")
    params = prefilled(prefill, PREFILL_ID)
    decode.add(DECODE_ID, params)
    decode.scheduler.requests[DECODE_ID].cache_salt = "theirs"
    ends_by_policy("fail", decode, prefill)
    assert causes(decode) == [FailureCause.DIGEST]


# ----------------------------------------------------------------------------------- A2: one name, more than one prompt


def test_two_prompts_under_one_name_each_get_their_own_kv(pair: tuple[Node, Node]) -> None:
    """Finding A2, prefill first: both have the client's ``transfer_id``, and decode asks in the other order."""
    prefill, decode = pair
    ids = [("cmpl-x-0-aaaaaaaa", "cmpl-x-0-dddddddd", 0), ("cmpl-x-0-bbbbbbbb", "cmpl-x-0-eeeeeeee", 200)]
    params = {theirs: prefilled(prefill, theirs, first, **NAME) for theirs, _, first in ids}
    local = {own: asked(decode, params[theirs], own, first_token=first) for theirs, own, first in reversed(ids)}
    until_both(prefill, decode, lambda: {own for _, own, _ in ids} <= decode.received)
    for _, own, first in ids:
        assert decode.holds(local[own], first_token=first)
    rest(prefill, decode)


def test_two_equal_prompts_under_one_name_both_arrive(pair: tuple[Node, Node]) -> None:
    """Finding A2: retried at once, or sent twice; neither waits for the other's end."""
    prefill, decode = pair
    ids = [("cmpl-x-0-aaaaaaaa", "cmpl-x-0-dddddddd"), ("cmpl-x-0-bbbbbbbb", "cmpl-x-0-eeeeeeee")]
    params = [prefilled(prefill, theirs, **NAME) for theirs, _ in ids]
    local = {own: asked(decode, one, own) for one, (_, own) in zip(params, ids, strict=True)}
    until_both(prefill, decode, lambda: {own for _, own in ids} <= decode.received)
    assert all(decode.holds(blocks) for blocks in local.values())
    rest(prefill, decode)


# ------------------------------------------------------------------------ A6, B1, B2, B4: what a client or router sends


def manifest_of(params: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = params["kvcached_nixl"]
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("changed", ["block ids", "request id", "digest", "first token"])
def test_a_manifest_of_one_request_with_a_part_of_anothers_gives_no_bytes(
    changed: str, policy: str, direction: str, both: Callable[[str], tuple[Node, Node]]
) -> None:
    """Finding A6: the ownership token stands for the whole manifest, so a changed one has a token that no rank has."""
    prefill, decode = both(policy)
    params, other = prefilled(prefill, PREFILL_ID), prefilled(prefill, "cmpl-z-0-aaaaaaaa", 200)
    mixed, theirs = copy.deepcopy(params), manifest_of(other)
    if changed == "block ids":
        # Of which a WRITE takes no notice: prefill knows the blocks itself.
        manifest_of(mixed)["groups"] = theirs["groups"]
    elif changed == "request id":
        manifest_of(mixed)["request_id"] = mixed["remote_request_id"] = theirs["request_id"]
    elif changed == "digest":
        manifest_of(mixed)["digest"] = theirs["digest"]
    else:
        group = manifest_of(mixed)["groups"][0]
        group.update(first_token=BLOCK_SIZE, block_ids=group["block_ids"][1:])
    first_token = 200 if changed == "digest" else 0
    if direction == "push" and changed == "block ids":
        local = asked(decode, mixed)
        until_both(prefill, decode, lambda: DECODE_ID in decode.received)
        assert decode.holds(local)
        return
    decode.add(DECODE_ID, mixed, first_token=first_token)
    ends_by_policy(policy, decode, prefill, first_token=first_token)
    expected = {"pull": FailureCause.LEASE, "push": FailureCause.DIGEST}[direction]
    assert causes(decode) == [FailureCause.RANGE if changed == "first token" else expected]
    if direction == "push" and policy == "fail":
        # Prefill has seen it before it wrote anything.
        assert decode.are_filled(decode.all_but([]), DECODE_FILLING)
    served(prefill, decode, 8)


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "B1 a role and nothing else": lambda _: {"do_remote_prefill": True},
    "B1 no port": lambda given: {key: one for key, one in given.items() if key != "remote_port"},
    "B1 no host": lambda given: {**given, "remote_host": None},
    "B1 no engine": lambda given: {**given, "remote_engine_id": ""},
    "B1 no engine's id": lambda given: {**given, "remote_engine_id": 7},
    "a port out of range": lambda given: {**given, "remote_port": 70_000},
    "a port that is text": lambda given: {**given, "remote_port": "5600"},
    "a name that is no string": lambda given: {**given, "transfer_id": 7},
    "an empty name": lambda given: {**given, "transfer_id": ""},
    "a name that is no text": lambda given: {**given, "transfer_id": "\ud800"},
    "a name without end": lambda given: {**given, "transfer_id": "x" * 100_000},
    "B2 both roles": lambda given: {**given, "do_remote_decode": True},
    "a role that is no boolean": lambda given: {**given, "do_remote_prefill": "yes"},
    "B4 as many ranks as there are people": lambda given: {**given, "tp_size": 10**9},
    "no rank": lambda given: {**given, "tp_size": 0},
    "half a rank": lambda given: {**given, "tp_size": 0.5},
    "a manifest that is text": lambda given: {**given, "kvcached_nixl": "manifest"},
    "an empty manifest": lambda given: {**given, "kvcached_nixl": {}},
    "B1 too few blocks": lambda given: changed(given, groups=[{"first_token": 0, "block_ids": [1]}]),
    "too many blocks": lambda given: changed(given, groups=[{"first_token": 0, "block_ids": list(range(1, 9))}]),
    "a block twice": lambda given: changed(given, groups=[{"first_token": 0, "block_ids": [1, 1, 2]}]),
    "blocks out of range": lambda given: changed(given, groups=[{"first_token": 0, "block_ids": [1, 2, 2**40]}]),
    "a block below zero": lambda given: changed(given, groups=[{"first_token": 0, "block_ids": [1, 2, -1]}]),
    "no tokens": lambda given: changed(given, num_tokens=0),
    "tokens below zero": lambda given: changed(given, num_tokens=-PROMPT),
    "blocks of nothing": lambda given: changed(given, block_sizes=[0]),
    "another protocol": lambda given: changed(given, protocol=3),
    "A5 context parallelism": lambda given: changed(given, context_parallel=[2, 1]),
    "a lease without end": lambda given: changed(given, lease_seconds=1e300),
    "more than is known": lambda given: changed(given, more=1),
    "a digest that is none": lambda given: changed(given, digest="f" * 31),
    "a start that is none": lambda given: changed(given, incarnation="\U0001f600" * 4),
}


def changed(given: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**given, "kvcached_nixl": {**manifest_of(given), **changes}}


@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_that_cannot_be_used_end_the_request_by_policy(
    policy: str, both: Callable[[str], tuple[Node, Node]]
) -> None:
    """Findings B1, B2, B4 and their neighbours, one after the other on the same two engines. No handshake is begun."""
    prefill, decode = both(policy)
    given = prefilled(prefill, PREFILL_ID)
    for number, (what, make) in enumerate(WRONG.items(), 1):
        decode.ended.pop(DECODE_ID, None)
        decode.add(DECODE_ID, make(given), first_token=3 * number)
        ends_by_policy(policy, decode, prefill, first_token=3 * number)
        assert causes(decode) == [FailureCause.PARAMETERS] * number, what
    assert not len(decode.context.peers)
    served(prefill, decode, 8)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tp_size", [2, 64])
def test_a_wrong_number_of_ranks_costs_the_request_that_names_it(
    tp_size: int, policy: str, both: Callable[[str], tuple[Node, Node]]
) -> None:
    """Findings B4, B8: prefill has one."""
    prefill, decode = both(policy)
    decode.add(DECODE_ID, {**prefilled(prefill, PREFILL_ID), "tp_size": tp_size})
    ends_by_policy(policy, decode, prefill)
    assert causes(decode) == [FailureCause.REFUSED]
    until(lambda: not unfinished_handshakes(decode.context.peers))
    served(prefill, decode, 8)


def test_tensor_parallel_sizes_that_do_not_divide_end_the_request_by_policy(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    decode.context.local = dataclasses.replace(decode.context.local, tp_size=2)
    decode.add(DECODE_ID, {**prefilled(prefill, PREFILL_ID), "tp_size": 3})
    decode.step_until(lambda: DECODE_ID in decode.ended)
    assert decode.ended[DECODE_ID] == "error"
    assert "tensor-parallel size 3 and decode's 2 do not divide" in decode.log.text


@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_that_a_router_made_itself_are_refused_with_the_remedy(
    policy: str, direction: str, both: Callable[[str], tuple[Node, Node]]
) -> None:
    """Field by field, as vLLM's own examples do. A push may find its prefill by name all the same."""
    prefill, decode = both(policy)
    given = prefilled(prefill, PREFILL_ID)
    rebuilt = {key: one for key, one in given.items() if key != "kvcached_nixl"}
    decode.add(DECODE_ID, {**rebuilt, "remote_block_ids": [[1, 2, 3]]})
    if direction == "push":
        decode.step()
        local = decode.blocks(DECODE_ID)
        until_both(prefill, decode, lambda: DECODE_ID in decode.received)
        assert decode.holds(local)
        return
    ends_by_policy(policy, decode, prefill)
    assert causes(decode) == [FailureCause.NO_MANIFEST]
    assert "Let the router pass the whole kv_transfer_params" in decode.log.text


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", [2, 3])
def test_each_child_of_a_request_is_a_hand_over_of_its_own(
    n: int, policy: str, both: Callable[[str], tuple[Node, Node]]
) -> None:
    """Finding B13: ``n`` > 1 and prompt lists share one ``kv_transfer_params``. None hangs, and none is wrong.

    Prefill lets go when one of them has what it needs: whichever of their READs ends first is served.
    """
    prefill, decode = both(policy)
    params = prefilled(prefill, PREFILL_ID)
    ids = [f"{number}_{DECODE_ID}" for number in range(n)]
    for request_id in ids:
        decode.add(request_id, copy.deepcopy(params), max_tokens=2)
    held: dict[str, bool] = {}

    def look() -> bool:
        for request_id in ids:
            running = request_id in decode.scheduler.requests and decode.status(request_id) == RequestStatus.RUNNING
            if running and request_id not in held:
                held[request_id] = decode.holds(decode.blocks(request_id))
        return set(ids) <= set(decode.ended)

    until_both(prefill, decode, look)
    ends = [decode.ended[request_id] for request_id in ids]
    assert "length" in ends and set(ends) <= {"length", "error" if policy == "fail" else "length"}
    assert held and all(held.values())
    assert set(causes(decode)) <= {FailureCause.LEASE}
    rest(prefill, decode)


def test_a_prompt_list_is_a_hand_over_each_or_by_policy(both: Callable[[str], tuple[Node, Node]]) -> None:
    """Finding B13: prefill's two prompts have parameters of their own, of which a router may give decode only one."""
    prefill, decode = both("recompute")
    params = prefilled(prefill, PREFILL_ID)
    prefilled(prefill, "cmpl-x-1-aaaaaaaa", 200)
    decode.add(DECODE_ID, params)
    decode.add("cmpl-x-1-dddddddd", params, first_token=200)
    until_both(prefill, decode, lambda: {DECODE_ID, "cmpl-x-1-dddddddd"} <= set(decode.ended))
    assert set(decode.ended.values()) == {"length"} and causes(decode) == [FailureCause.DIGEST]
    rest(prefill, decode)


# ------------------------------------------------------------------------------------------------- prefill's requests


@pytest.mark.parametrize(
    "change",
    [{"transfer_id": 7}, {"do_remote_decode": "yes"}, {"do_remote_prefill": "no"}, {"transfer_id": ""}],
    ids=str,
)
def test_prefills_request_that_cannot_be_used_is_not_offered(
    change: dict[str, Any], both: Callable[[str], tuple[Node, Node]]
) -> None:
    """It is computed and answered as any other, and its blocks come free at its end."""
    prefill, decode = both("fail")
    prefill.add(PREFILL_ID, {**SEND, **change}, 1)
    prefill.step_until(lambda: PREFILL_ID in prefill.ended)
    if "do_remote_prefill" not in change:
        assert prefill.ended[PREFILL_ID] == "length"
    assert PREFILL_ID not in prefill.transfer_params
    rest(prefill)
    assert causes(prefill) == [FailureCause.PARAMETERS]
    served(prefill, decode)


def test_what_is_no_mapping_is_no_parameters(pair: tuple[Node, Node]) -> None:
    """The API server lets anything through that JSON can say."""
    for one in pair:
        for number, params in enumerate([[], "do_remote_prefill", 7, True, [["do_remote_prefill", True]]]):
            one.add(f"cmpl-{number}-0-aaaaaaaa", params, 1, first_token=200)  # type: ignore[arg-type]
            one.step_until(lambda number=number, one=one: f"cmpl-{number}-0-aaaaaaaa" in one.ended)
            assert one.ended[f"cmpl-{number}-0-aaaaaaaa"] == "length"
    served(*pair)


def test_a_manifest_survives_json(pair: tuple[Node, Node]) -> None:
    """As it goes through routers: none of its numbers is one that another language rounds."""
    prefill, _ = pair
    prefill.add(PREFILL_ID, SEND, 1)
    prefill.step_until(lambda: PREFILL_ID in prefill.transfer_params)
    given = prefill.transfer_params[PREFILL_ID]
    again = json.loads(json.dumps(given, allow_nan=False))

    def numbers(value: Any) -> list[float]:
        if isinstance(value, dict):
            return [one for inner in value.values() for one in numbers(inner)]
        if isinstance(value, list):
            return [one for inner in value for one in numbers(inner)]
        return [value] if isinstance(value, (int, float)) else []

    assert max(numbers(again)) < 2**53
    assert again["remote_block_ids"] == [[]] and len(manifest_of(again)["groups"][0]["block_ids"]) == BLOCKS


# ------------------------------------------------------------------------------------------------------------ at start


def test_bidirectional_transfers_are_refused_at_start(node: Callable[..., Node]) -> None:
    """Finding B2: vLLM's own mode sends both roles."""
    with pytest.raises(SettingsError) as raised:
        node(PREFILL_FILLING, bidirectional_kv_xfer=True)
    assert "bidirectional_kv_xfer" in raised.value.found
