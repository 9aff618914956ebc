# SPDX-License-Identifier: Apache-2.0
"""Sequences with whole requests that were once found to end badly."""

from __future__ import annotations

import pytest
from support.flow_asking import AFTER, PULL, PUSH, Asks, is_computed, prompt
from support.flow_cluster import LEASE_SECONDS
from support.flow_pair import PROMPT


@pytest.mark.parametrize(
    "mode",
    [
        PULL,
        pytest.param(PUSH, marks=pytest.mark.xfail(strict=True, reason="they have blocks already, and go on at once")),
        AFTER,
    ],
)
def test_prompts_that_a_dead_server_leaves_are_computed_a_few_at_a_time(mode: str) -> None:
    """The only server dies while it is asked for six prompts. In push they have gone on, with blocks or without, and
    all of them are computed here at once, in chunks of any size: running streams stand still meanwhile."""
    pair = Asks(mode, caches_prefixes=False, most_unclaimed_tokens=4 * len(PROMPT), budget=64)
    running = pair.arrives((9, 8, 7), max_tokens=60)
    found = [pair.arrives(prompt(seed)) for seed in range(6)]
    pair.cluster.kill(pair.prefill)
    for one in list(pair.asked):
        one.deliver()
    most = 0
    for _ in range(60):
        before = sum(one.num_computed for one in found)
        pair.round()
        most = max(most, sum(one.num_computed for one in found) - before)
    assert running.num_tokens and all(map(is_computed, found))
    assert most <= 2 * len(PROMPT), "of one prompt, and the tokens of those that run"
    pair.nothing_is_left(LEASE_SECONDS)
