# SPDX-License-Identifier: Apache-2.0
"""Sequences with whole requests that were once found to end badly."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from support.flow_asking import DIRECTIONS, Asks, is_computed, prompt
from support.flow_cluster import LEASE_SECONDS
from support.flow_engine import Status
from support.flow_pair import PROMPT


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
