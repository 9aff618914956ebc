# SPDX-License-Identifier: Apache-2.0
"""Sequences with whole requests that were once found to end badly."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from support.flow_asking import DIRECTIONS, PULL, PUSH, Asks, is_computed, prompt
from support.flow_cluster import LEASE_SECONDS
from support.flow_engine import Status
from support.flow_pair import PROMPT

from kvcached_nixl.wire.question import Outcome


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
        for _ in range(60):
            pair.round()
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


def test_placeholders_without_their_media_are_not_computed_in_turn() -> None:
    """Prefill dies when its prompt's blocks are here: another one of the kind fails at once."""
    pair = Asks(PUSH)
    found = pair.arrives(lacks_media=True)
    pair.decode.step()
    pair.cluster.kill(pair.prefill)
    for one in list(pair.asked):
        one.deliver()
    for _ in range(40):
        pair.round()
    assert found.status is Status.ERROR
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
    for _ in range(40):
        pair.round()
    assert found.status is Status.ERROR and not found.num_external


def test_prompts_that_wait_to_be_computed_here_keep_nothing_at_prefill() -> None:
    """Each answer is of another prompt. They were renewed for as long as the prompts waited for their turn."""
    pair = Asks(PULL, caches_prefixes=False, most_unclaimed_tokens=4 * len(PROMPT), budget=4)
    found = [pair.arrives(prompt(seed)) for seed in range(6)]
    pair.compute()
    asked = [pair.of(one) for one in found]
    answers = [one.request.answer for one in asked if one.request is not None]
    for one, other in zip(asked, [*answers[1:], answers[0]], strict=True):
        one.say(other)
    pair.decode.handover.ask()
    for _ in range(4):
        pair.round()
    pair.decode.admits = False
    pair.pass_time(3 * LEASE_SECONDS)
    assert not pair.prefill.handover.num_kept
    pair.decode.admits = True
    pair.serve()
    assert all(map(is_computed, found))
