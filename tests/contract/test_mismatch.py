# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode disagree about a request, on the installed vLLM: right bytes or the policy, never wrong bytes.

Sections A and B of the review of the earlier implementation; each test names its finding.
"""

from __future__ import annotations

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
from vllm.v1.request import RequestStatus

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.wire.causes import FailureCause

pytestmark = pytest.mark.long

parallel_state, log, patched = engine_node.parallel_state, engine_node.log, attention_engines.patched
direction, node, pair = handover_node.direction, handover_node.node, handover_node.pair

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


# ------------------------------------------------------------------------ A6, B1, B2, B4: what a client or router sends


def manifest_of(params: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = params["kvcached_nixl"]
    return found


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


# ------------------------------------------------------------------------------------------------- prefill's requests


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
