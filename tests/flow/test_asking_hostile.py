# SPDX-License-Identifier: Apache-2.0
"""Decode asks servers that are not what the operator thinks, or that answer what nobody expects.

In no case may a request go on with wrong bytes (the cluster checks each), an engine end, others wait, or memory stay.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.flow_asking import AFTER, DIRECTIONS, OTHER, POLICIES, PULL, Asks, is_computed, is_fetched, prompt
from support.flow_cluster import LEASE_SECONDS, TIMEOUT_SECONDS
from support.flow_engine import Kind, Request, Status
from support.flow_pair import kind
from support.parameter_ids import plain_id

from kvcached_nixl.wire.params import MANIFEST_KEY

HOUR_SECONDS = 3600.0


def ends(pair: Asks, found: Request, *, recomputes: bool) -> None:
    """A request whose servers give nothing that can be used ends as the policy says."""
    pair.serve()
    pair.pass_time(TIMEOUT_SECONDS)
    assert is_computed(found) if recomputes else found.status is Status.ERROR
    assert pair.causes()


def is_told(pair: Asks, changed: dict[str, Any], seconds: float) -> None:
    """Prefill's answer has other parameters than it would have, and so has the next one."""
    for _ in range(2):
        pair.compute()
        if pair.asked:
            asked = pair.asked[0]
            asked.say({**copy.deepcopy(asked.request.answer), **changed})
        pair.pass_time(seconds)


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = {"a": found}
    return found


# --------------------------------------------------------------------------------------------------- odd parameters


@DIRECTIONS
@POLICIES
@pytest.mark.parametrize(
    "changed",
    [
        {"more": nested(500)},
        {"remote_engine_id": nested(500)},
        {"do_remote_decode": nested(500)},
        {MANIFEST_KEY: nested(500)},
        {"remote_port": 10**1000},
        {"tp_size": 2**40},
        {"remote_num_tokens": 10**300},
        {"remote_host": "h" * 1_000_000},
    ],
    ids=["ignored", "engine", "role", "manifest", "port", "ranks", "tokens", "host"],
)
def test_parameters_that_nobody_expects(mode: str, recomputes: bool, changed: dict[str, Any]) -> None:
    """Those of this prompt, with one field changed. If KV is sent meanwhile, they only have to name prefill."""
    pair = Asks(mode, recomputes=recomputes)
    found = pair.arrives()
    is_told(pair, changed, 0.0)
    names = {"remote_engine_id", "remote_host", "remote_port", "tp_size"} & changed.keys()
    if "more" in changed or (pair.is_at_once and not names):
        pair.serve()
        assert is_fetched(found)
    else:
        ends(pair, found, recomputes=recomputes)
    pair.nothing_is_left(2 * (LEASE_SECONDS + TIMEOUT_SECONDS))


@DIRECTIONS
@POLICIES
@pytest.mark.parametrize(
    ("field", "value"),
    [("remote_engine_id", "nobody"), ("remote_engine_id", "\x00"), ("remote_host", "nowhere"), ("remote_port", 1)],
    ids=plain_id,
)
def test_parameters_that_name_nobody(mode: str, recomputes: bool, field: str, value: Any) -> None:
    pair = Asks(mode, recomputes=recomputes)
    found = pair.arrives()
    is_told(pair, {field: value}, TIMEOUT_SECONDS)
    ends(pair, found, recomputes=recomputes)
    pair.nothing_is_left(2 * (LEASE_SECONDS + TIMEOUT_SECONDS))


# -------------------------------------------------------------------------------------- servers that are something else


@DIRECTIONS
@POLICIES
@pytest.mark.parametrize("other", [kind(model="another"), kind(weights=OTHER)], ids=["tag", "weights"])
def test_a_server_that_is_started_again_as_another(mode: str, recomputes: bool, other: Kind) -> None:
    """What it computes in vain is kept for a lease at most: it does not hear decode, or decode does not trust it."""
    pair = Asks(mode, recomputes=recomputes)
    pair.cluster.kill(pair.prefill)
    pair.prefill = pair.cluster.engine("p", other)
    found = [pair.arrives(prompt(seed)) for seed in range(4)]
    for one in found:
        ends(pair, one, recomputes=recomputes)
    pair.nothing_is_left(LEASE_SECONDS)


@DIRECTIONS
def test_of_two_servers_one_is_another_model(mode: str) -> None:
    pair = Asks(mode, "q", recomputes=False)
    pair.cluster.kill(pair.prefill)
    pair.prefill = pair.cluster.engine("p", kind(model="another"))
    pair.cluster.answers_at_once = True
    found = [pair.arrives(prompt(seed)) for seed in range(12)]
    pair.pass_time(TIMEOUT_SECONDS)
    assert all(map(is_fetched, found))
    pair.nothing_is_left(LEASE_SECONDS)


@DIRECTIONS
@POLICIES
@pytest.mark.parametrize("others", [(), ("q",)], ids=["alone", "another"])
def test_a_list_that_names_decode_itself(mode: str, recomputes: bool, others: tuple[str, ...]) -> None:
    """It finds in its prefix cache what it has computed for itself, and learns to ask the others."""
    pair = Asks(mode)
    room = {"recomputes": recomputes, "num_blocks": 20}
    itself = pair.cluster.engine("x", kind(asks=("x", *others), **room))
    for name in others:
        pair.cluster.engine(name)
    found = [pair.arrives(prompt(seed), engine=itself) for seed in range(6)]
    pair.cluster.answers_at_once = True
    pair.pass_time(5 * TIMEOUT_SECONDS)
    assert all(one.status.is_finished for one in found)
    assert all(one.status is Status.STOPPED for one in found if others or recomputes)
    assert any(map(is_fetched, found)) is bool(others)
    pair.nothing_is_left(LEASE_SECONDS)


@DIRECTIONS
@POLICIES
def test_a_server_whose_answers_name_no_manifest(mode: str, recomputes: bool) -> None:
    """As a stock vLLM's. In push prefill compares what was computed, before it writes."""
    pair = Asks(mode, recomputes=recomputes)
    found = pair.arrives()
    for _ in range(1 if mode != PULL else 2):
        pair.settle()
        answer = dict(pair.asked[0].request.answer)
        del answer[MANIFEST_KEY]
        pair.asked[0].say({**answer, "remote_block_ids": [[1, 2, 3, 4, 5]]})
    if mode != PULL:
        pair.settle()
        assert is_fetched(found)
    else:
        ends(pair, found, recomputes=recomputes)
    pair.nothing_is_left(LEASE_SECONDS + TIMEOUT_SECONDS)


# ------------------------------------------------------------------------------------------------------------- clocks


@DIRECTIONS
@pytest.mark.parametrize("ahead", [(0.0, HOUR_SECONDS), (HOUR_SECONDS, 0.0)], ids=["prefill", "decode"])
def test_clocks_that_differ_by_an_hour(mode: str, ahead: tuple[float, float]) -> None:
    """Two decode and two prefill engines: nothing ends early, and leases end in time."""
    pair = Asks(mode)
    names = ("v_dp0", "w_dp0") if mode == AFTER else ("v", "w")
    prefills = [pair.cluster.engine(name, kind(clock_seconds=one)) for name, one in zip(names, ahead, strict=True)]
    decodes = [
        pair.cluster.engine(name, kind(asks=names, clock_seconds=one))
        for name, one in zip("xy", reversed(ahead), strict=True)
    ]
    found = [pair.arrives(prompt(seed), engine=decodes[seed % 2], max_tokens=4) for seed in range(8)]
    for one in decodes:
        one.handover.ask()
    assert {one.server for one in pair.asked} == set(prefills)
    pair.settle()
    for one in decodes:
        one.admits = False
    for asked in list(pair.asked):
        asked.deliver()
    pair.pass_time(2 * LEASE_SECONDS)
    for one in decodes:
        one.admits = True
    pair.serve()
    assert all(map(is_fetched, found))
    assert not any(pair.causes(one) for one in decodes)
    lost = pair.arrives(prompt(20), engine=decodes[0])
    for one in (*prefills, *prefills):
        one.step()
    pair.cluster.kill(decodes[0])
    assert not lost.status.is_finished
    pair.nothing_is_left(LEASE_SECONDS + TIMEOUT_SECONDS)


# -------------------------------------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("mode", [PULL, AFTER])
def test_what_is_on_its_way_to_a_client_that_left_is_not_kept_for_a_lease(mode: str) -> None:
    """The connection is closed when prefill has computed the prompt, before decode has its answer."""
    pair = Asks(mode)
    found = pair.arrives()
    pair.compute()
    pair.decode.abort(found)
    pair.settle()
    assert not pair.prefill.requests


# --------------------------------------------------------------------------------------- one client, and all others


def test_small_prompts_behind_one_that_finds_no_room_any_more() -> None:
    """Memory was taken away since: the large one fails, and the others wait no longer than that."""
    pair = Asks(PULL, caches_prefixes=False, allocation_seconds=20.0)
    pair.decode.pool.limit_blocks = 12
    pair.decode.pool.apply_limit()
    first = pair.arrives(prompt(1))
    large = pair.arrives(tuple(one % 50 for one in range(100)))
    small = [pair.arrives(prompt(2 + seed)) for seed in range(20)]
    pair.cluster.answers_at_once = True
    pair.pass_time(30.0)
    assert large.status is Status.ERROR and pair.causes() == {"no_blocks": 1}
    assert not pair.prefill.requests, "what was computed is given back at once, not after a lease"
    assert all(map(is_fetched, (first, *small)))
    pair.nothing_is_left(LEASE_SECONDS)


@DIRECTIONS
def test_what_a_client_wants_to_be_generated_steers_nobody(mode: str) -> None:
    """Servers and room are chosen by prompts: one client's ``max_tokens`` keeps no other one waiting."""
    pair = Asks(mode, "q")
    found = [pair.arrives(prompt(seed), max_tokens=10**9 if seed == 3 else 4) for seed in range(6)]
    assert sorted(one.server.own.engine_id for one in pair.asked) == 3 * [pair.prefill.own.engine_id] + 3 * [
        pair.others[0].own.engine_id
    ]
    assert all(one.request.max_tokens == 1 for one in pair.asked)
    pair.decode.abort(found.pop(3))
    pair.serve()
    assert all(map(is_fetched, found))
    pair.nothing_is_left(LEASE_SECONDS)


def test_a_client_whose_prompts_are_all_equal_keeps_nobody_waiting() -> None:
    """Those behind the first one wait for it, and for nothing else; when it leaves, the next one is asked for."""
    pair = Asks(PULL)
    equal = [pair.arrives() for _ in range(50)]
    others = [pair.arrives(prompt(1 + seed)) for seed in range(5)]
    assert len(pair.asked) == 6
    for one in [one for one in pair.asked if one is not pair.asked[0]]:
        pair.settle()
        one.deliver()
    pair.settle()
    assert all(map(is_fetched, others))
    for one in equal[:-1]:
        pair.decode.abort(one)
    pair.decode.handover.ask()
    assert len(pair.asked) == 1
    pair.serve()
    assert is_fetched(equal[-1])
    pair.nothing_is_left(LEASE_SECONDS)
