# SPDX-License-Identifier: Apache-2.0
"""When hand-overs have kept the next request waiting in vain. What that does to them: flow/test_waits.py."""

from __future__ import annotations

import pytest
from support.engine_fakes import TIMEOUT, Pool

from kvcached_nixl.deadlines import ManualClock
from kvcached_nixl.scheduler.giving_way import RING_TIMEOUTS, VAIN_TIMEOUTS, Impasse
from kvcached_nixl.scheduler.starvation import STOOD_SECONDS

RING_SECONDS = RING_TIMEOUTS * TIMEOUT
STEP_SECONDS = 10.0


class Engine:
    """One whose next request lacks seven blocks."""

    def __init__(self) -> None:
        self.clock, self.pool = ManualClock(5.0), Pool()
        self.impasse = Impasse(self.clock, TIMEOUT)
        self.pool.starved = ("a", 7)

    def looks(self, seconds: float, *, are_peers_waiting: bool = True) -> list[int]:
        """Looks as time passes, and returns what hand-overs had to give up."""
        found = []
        for _ in range(round(seconds / STEP_SECONDS)):
            found.append(self.impasse.turn(self.pool, are_peers_waiting=are_peers_waiting)[0])
            self.clock.advance(STEP_SECONDS)
        return [one for one in found if one]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_what_the_next_request_lacks_is_given_up_each_time_it_has_waited_in_vain(engine: Engine) -> None:
    assert engine.looks(RING_SECONDS) == []
    assert engine.looks(RING_SECONDS) == [7]
    assert engine.looks(RING_SECONDS) == [7]


def test_it_waits_longer_where_no_peer_waits_for_this_engine(engine: Engine) -> None:
    assert engine.looks(VAIN_TIMEOUTS * TIMEOUT, are_peers_waiting=False) == []
    assert engine.looks(STEP_SECONDS, are_peers_waiting=False) == [7]


def test_it_waits_for_as_long_as_what_runs_has_enough_blocks(engine: Engine) -> None:
    """They come free without anybody's help. Small ones that run do not have enough."""
    engine.pool.num_running_blocks = 7
    assert engine.looks(10 * RING_SECONDS) == []
    engine.pool.num_running_blocks = 6
    assert engine.looks(2 * RING_SECONDS) == [7, 7]


@pytest.mark.parametrize("other", [None, ("b", 1)])
def test_one_that_is_in_front_of_it_for_a_moment_changes_nothing(other: tuple[str, int] | None, engine: Engine) -> None:
    for _ in range(round(RING_SECONDS / 60)):
        engine.pool.starved = other
        assert engine.looks(STEP_SECONDS) == []
        engine.pool.starved = ("a", 7)
        assert engine.looks(60 - STEP_SECONDS) == []
    engine.pool.starved = ("a", 8)
    assert engine.looks(RING_SECONDS / 2) == [8]


def test_its_time_begins_again_when_blocks_come_free_or_nobody_has_looked_for_it(engine: Engine) -> None:
    """The engine was paused, or others have had their turn."""
    engine.looks(RING_SECONDS)
    engine.pool.starved = ("a", 6)
    assert engine.looks(RING_SECONDS) == []
    engine.clock.advance(STOOD_SECONDS)
    assert engine.looks(RING_SECONDS) == []
    engine.pool.starved = ("b", 9)
    assert engine.looks(RING_SECONDS) == [], "it is another one"
    engine.pool.starved = ("a", 6)
    assert engine.looks(RING_SECONDS) == []
