# SPDX-License-Identifier: Apache-2.0
"""scheduler/giving_way.py: how much decode gives up for a neighbour that waits for 10 blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from support.clocks import ManualClock

from kvcached_nixl.scheduler.giving_way import GivingWay


class Decode:
    """What it gives up is in quarantine, since its peer does not answer."""

    def __init__(self, num_quarantined: int) -> None:
        self.clock = ManualClock()
        self.given: list[int] = []
        self.attempts = SimpleNamespace(num_quarantined_blocks=num_quarantined, waiting=[1])
        blocks = MagicMock(num_cached=0, blocks_over_limit=0, starved=None, has_reserve=False)
        blocks.trim.return_value = blocks.drop_cached.return_value = 0
        blocks.wanted_by_neighbours.return_value = 10, True
        settings = SimpleNamespace(give_way_after_seconds=2.0)
        engine: Any = MagicMock(clock=self.clock, settings=settings, is_push=True, blocks=blocks)
        offering: Any = MagicMock(kept=MagicMock(num_kept=0))
        fetching: Any = SimpleNamespace(attempts=self.attempts, queued=(), give_up=self.give_up)
        self.giving_way = GivingWay(engine, offering, fetching)

    def give_up(self, num_blocks: int, *_: object) -> None:
        if num_blocks > 0:
            self.given.append(num_blocks)
            self.attempts.num_quarantined_blocks += num_blocks

    def pass_time(self, num_seconds: int) -> None:
        for _ in range(num_seconds):
            self.giving_way.turn()
            self.clock.advance(1.0)


@pytest.mark.parametrize("num_quarantined", [0, 50])
def test_what_is_in_quarantine_for_long_counts_as_given_no_more(num_quarantined: int) -> None:
    """Others may be free at once. Before, the neighbour got nothing if one peer was suspended."""
    decode = Decode(num_quarantined)
    decode.pass_time(10)
    assert decode.given == [10]
    decode.pass_time(9)
    assert decode.given == [10, 10]


def test_what_has_left_quarantine_since_a_neighbour_was_heard_hides_nothing() -> None:
    """A request that was aborted just before. What is given up has to be seen all the same."""
    decode = Decode(50)
    decode.pass_time(1)
    decode.attempts.num_quarantined_blocks = 0
    decode.pass_time(10)
    assert decode.given == [10]
