# SPDX-License-Identifier: Apache-2.0
"""Decode asks servers that are not what the operator thinks, or that answer what nobody expects.

In no case may a request go on with wrong bytes (the cluster checks each), an engine end, others wait, or memory stay.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
from support.flow_asking import AFTER, DIRECTIONS, OTHER, POLICIES, PULL, PUSH, Asks, is_fetched
from support.flow_cluster import LEASE_SECONDS, TIMEOUT_SECONDS
from support.flow_engine import Kind, Request, Status
from support.flow_pair import PROMPT, is_computed, kind, prompt

from kvcached_nixl.wire.params import MANIFEST_KEY
from kvcached_nixl.wire.question import Outcome

HOUR_SECONDS = 3600.0


def ends(pair: Asks, found: Request, *, recomputes: bool) -> None:
    """A request whose servers give nothing that can be used ends as the policy says."""
    pair.serve()
    pair.pass_time(TIMEOUT_SECONDS)
    assert is_computed(found) if recomputes else found.status is Status.ERROR
    assert pair.causes()


def is_told(pair: Asks, changed: dict[str, Any], seconds: float) -> None:
    """Prefill's answer has other parameters than it would have, and so have all others."""
    for _ in range(3):
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


# ---------------------------------------------------------------------------- requests that may not cost others theirs


@DIRECTIONS
@POLICIES
def test_ids_that_no_manifest_could_name(mode: str, recomputes: bool) -> None:
    """A client's X-Request-Id: decode refused its own ids, and charged that to prefill, which rested."""
    pair = Asks(mode, recomputes=recomputes)
    pair.cluster.answers_at_once = True
    found = [pair.arrives(prompt(seed), name="x" * 1001) for seed in range(3)]
    pair.settle()
    assert all(map(is_fetched, found)) and not pair.causes()


@DIRECTIONS
@POLICIES
def test_an_adapter_that_differs_costs_only_its_own_requests(mode: str, recomputes: bool) -> None:
    pair = Asks(mode, recomputes=recomputes)
    pair.cluster.answers_at_once = True
    pair.prefill.load_again(1)
    for seed in range(3):
        found = pair.arrives(prompt(seed), adapter=1)
        pair.pass_time(TIMEOUT_SECONDS)
        assert is_computed(found) if recomputes else found.status is Status.ERROR
    (server,) = pair.decode.handover.asking.servers.all
    assert not server.num_failures
    found = pair.arrives(prompt(9))
    pair.settle()
    assert is_fetched(found)


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


# ---------------------------------------------------------------------- servers that answer, and whose KV cannot come


def waits_of(pair: Asks, seeds: range) -> list[float]:
    """How long prompts take in seconds, one after the other."""
    found = []
    for seed in seeds:
        one, begun_seconds = pair.arrives(prompt(seed)), pair.clock.now_seconds()
        while not one.status.is_finished:
            pair.pass_time(2.5)
        found.append(pair.clock.now_seconds() - begun_seconds)
    return found


def delay_handshakes(pair: Asks, host: str, seconds: float) -> None:
    """Packets to the side channel of a host are dropped: its engines' handshakes fail after so long."""
    answer, begun_seconds = pair.cluster.answer, dict[Any, float]()

    def dropped(one: Any, *, late: bool = False) -> None:
        if one.host != host:
            answer(one, late=late)
        elif pair.clock.now_seconds() >= begun_seconds.setdefault(one, pair.clock.now_seconds()) + seconds:
            answer(one, late=True)

    pair.cluster.answer = dropped  # type: ignore[method-assign]


@DIRECTIONS
@POLICIES
def test_one_of_two_servers_whose_kv_never_comes(mode: str, recomputes: bool) -> None:
    """A partition in one direction, a path that drops large packets, a device that hangs."""
    pair = Asks(mode, "q", recomputes=recomputes)
    pair.cluster.answers_at_once = True
    waits_of(pair, range(30, 36))
    for worker in pair.prefill.workers:
        pair.wire.vanish(worker.agent_name)
    waits = waits_of(pair, range(20))
    assert sum(one >= TIMEOUT_SECONDS for one in waits) <= 5, waits
    pair.cluster.kill(pair.prefill)
    pair.nothing_is_left(2 * (LEASE_SECONDS + TIMEOUT_SECONDS))


@pytest.mark.parametrize("mode", [AFTER, PUSH])
def test_the_only_server_cannot_reach_decode(mode: str) -> None:
    """A firewall lets decode reach prefill, and prefill does not reach decode's side channel."""
    pair = Asks(mode)
    pair.cluster.answers_at_once = True
    pair.prefill = pair.cluster.restart(pair.prefill)
    delay_handshakes(pair, "host-d", 0.0)
    waits = waits_of(pair, range(12))
    assert sum(one >= TIMEOUT_SECONDS for one in waits) <= 5, waits


def test_a_server_that_has_just_failed_is_not_given_all_prompts() -> None:
    """Handshakes with one of two servers fail after 25 s. Two prompts arrive in each second, for three minutes."""
    pair = Asks(PULL, "q", num_blocks=2001)
    pair.cluster.answers_at_once = True
    pair.prefill = pair.cluster.restart(pair.prefill)
    delay_handshakes(pair, "host-p", 5.0)
    begun_seconds, waits = {}, []
    for seed in range(360):
        begun_seconds[pair.arrives(prompt(1000 + seed))] = pair.clock.now_seconds()
        pair.clock.advance(0.5)
        pair.cluster.settle(3)
        ended = [one for one in begun_seconds if one.status.is_finished]
        waits += [pair.clock.now_seconds() - begun_seconds.pop(one) for one in ended]
    assert sum(one > 10 for one in waits) + len(begun_seconds) < 30


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


# -------------------------------------------------------------------------- sequences that once ended badly


@DIRECTIONS
@pytest.mark.parametrize("is_answered", [False, True])
def test_prompts_that_a_dead_server_leaves_are_computed_a_few_at_a_time(mode: str, is_answered: bool) -> None:
    """The only server dies when it is asked for six prompts, or has answered. Those that wait for its KV are computed
    here at once, in chunks of any size: running streams stood still meanwhile."""
    pair = Asks(mode, caches_prefixes=False, most_unclaimed_tokens=4 * len(PROMPT), budget=64)
    running = pair.arrives((9, 8, 7), max_tokens=60)
    found = [pair.arrives(prompt(seed)) for seed in range(6)]
    if is_answered:
        pair.answers()
    pair.cluster.kill(pair.prefill)
    for one in list(pair.asked):
        one.deliver()
    computed, schedule = [0], pair.decode._schedule

    def counted() -> Any:
        scheduled, progress = schedule()
        computed.append(sum(one.end - one.begin for one in scheduled if one.request in found))
        return scheduled, progress

    with mock.patch.object(pair.decode, "_schedule", counted):
        pair.round(60)
    assert running.num_tokens and all(map(is_computed, found))
    assert max(computed) <= 2 * len(PROMPT), "of one prompt, and the tokens of those that run"
    pair.nothing_is_left(LEASE_SECONDS)


@DIRECTIONS
@pytest.mark.parametrize("is_required", [False, True])
def test_a_prompt_that_is_cached_here_by_the_time_its_kv_comes(mode: str, is_required: bool) -> None:
    """A model with windows or states, and a prompt that ends one token behind a block. While it is asked for, another
    request with the same beginning is computed. So nothing is left to fetch; where prefill is required, it failed."""
    pair = Asks(mode, is_required=is_required, drops_blocks=True)
    found, other = pair.arrives(PROMPT[:17]), pair.arrives((*PROMPT[:16], 1, 2, 3, 4, 5))
    pair.compute()
    pair.of(other).deliver()
    if pair.is_at_once:
        # It is not its turn until the other one is computed.
        pair.decode.waiting.remove(found)
    pair.settle()
    if pair.is_at_once:
        pair.decode.waiting.append(found)
    pair.serve()
    assert other.status is Status.STOPPED and found.status is Status.STOPPED and not pair.causes()
    pair.nothing_is_left(2 * LEASE_SECONDS)


@DIRECTIONS
@POLICIES
@pytest.mark.parametrize("is_asked", [False, True], ids=["down", "dies"])
def test_a_text_that_names_a_placeholder_is_text(mode: str, recomputes: bool, is_asked: bool) -> None:
    """Its client has sent no image, and no router has left one out. Prefill is down, or dies when it was asked."""
    pair = Asks(mode, recomputes=recomputes)
    found = [pair.arrives(lacks_media=True)] if is_asked else []
    pair.decode.step()
    pair.cluster.kill(pair.prefill)
    for one in list(pair.asked):
        one.deliver()
    found += [pair.arrives(prompt(seed), lacks_media=True) for seed in range(2)]
    for one in found:
        ends(pair, one, recomputes=recomputes)
    pair.nothing_is_left(2 * LEASE_SECONDS)


@pytest.mark.parametrize("is_required", [False, True])
def test_whom_it_would_ask_next_has_gone_before_it_is_held_again(is_required: bool) -> None:
    """The only server that is left has refused the prompt: nothing is computed here where that is not wanted."""
    pair = Asks(PUSH, "q", recomputes=is_required, is_required=is_required)
    servers = pair.decode.handover.asking.servers
    known, servers.all = servers.all, [one for one in servers.all if one.engine is not None]
    (refusing,) = servers.all
    found = pair.arrives()
    servers.all = known
    pair.decode.step()
    pair.of(found).ends(Outcome("HTTP 400", is_final=True))
    pair.decode.handover.ask()
    servers.all = [refusing]
    pair.round(40)
    assert found.status is Status.ERROR and not found.num_external
