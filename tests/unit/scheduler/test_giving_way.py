# SPDX-License-Identifier: Apache-2.0
"""When an engine looks, what it gives first, and how often: with a neighbour that says again every second what it
waits for, as `naming.wants` has it. What that does to hand-overs: flow/test_memory_pressure.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.engine_fakes import PATIENCE, terms

from kvcached_nixl.deadlines import ManualClock
from kvcached_nixl.scheduler.giving_way import LOOK_SECONDS, GivingWay
from kvcached_nixl.transfer_mode import TransferMode

BEGIN = 1000.0


class Offering:
    num_kept, are_awaited = 0, False

    def give_way(self, *_: Any, **__: Any) -> None:
        """None is kept."""


class Fetching:
    """Hand-overs that wait for KV, and when each was given up."""

    num_queued = 0

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.num_waiting = 0
        self.given_up_at: list[float] = []

    def needs_others(self, request_id: str) -> bool:
        return True

    def give_up(self, *_: Any) -> None:
        if self.num_waiting:
            self.num_waiting -= 1
            self.given_up_at.append(self.clock.now_seconds() - BEGIN)


class Blocks:
    """``wanted``: by a neighbour that runs nothing; ``reserve``: what `trim` would give."""

    starved, stalled = None, ()
    blocks_over_limit = 0

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.wanted = self.reserve = self.num_cached = 0
        self.heard = self.served = -1
        self.trims = 0

    def apply_limit(self) -> None:
        """It has none."""

    def tell_neighbours(self, _: Any) -> bool:
        return False

    def wanted_by_neighbours(self) -> tuple[int, bool]:
        said_at = int(self.clock.now_seconds())
        if not self.wanted or said_at == self.served:
            return 0, False
        self.heard = said_at
        return self.wanted, True

    def neighbours_served(self) -> None:
        self.served = self.heard

    @property
    def has_reserve(self) -> bool:
        return self.reserve > 0

    def trim(self) -> int:
        self.trims += 1
        given, self.reserve = self.reserve, 0
        return given

    def drop_cached(self, num_blocks: int) -> int:
        dropped = min(max(0, num_blocks), self.num_cached)
        self.num_cached -= dropped
        return dropped


class Engine:
    """One that decodes, and has nothing to compute."""

    def __init__(self) -> None:
        self.clock = ManualClock(BEGIN)
        self.fetching, self.blocks = Fetching(self.clock), Blocks(self.clock)
        self.offering = Offering()
        self.way = GivingWay(self.clock, terms(mode=TransferMode.PUSH), self.offering, self.fetching)  # type: ignore[arg-type]

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / LOOK_SECONDS)):
            if self.way.watches(self.blocks):  # type: ignore[arg-type]
                self.way.turn(self.blocks, None)  # type: ignore[arg-type]
            self.clock.advance(LOOK_SECONDS)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_stall_after_a_while_without_looks_is_heard_as_the_first_one_was(engine: Engine) -> None:
    """An engine that has given all that it had does not look until it has something again."""
    engine.blocks.num_cached = engine.blocks.wanted = 50
    engine.pass_time(3)
    assert not engine.blocks.num_cached and not engine.fetching.given_up_at
    engine.blocks.wanted = 0
    engine.pass_time(60)
    engine.blocks.wanted, engine.fetching.num_waiting = 100, 3
    engine.pass_time(PATIENCE - LOOK_SECONDS)
    assert engine.way.yields and not engine.fetching.given_up_at, "its KV may come at any moment"
    engine.pass_time(4)
    assert not engine.fetching.num_waiting


@pytest.mark.parametrize("is_first_met", [False, True])
def test_at_most_one_hand_over_is_given_up_for_what_was_said_once(engine: Engine, is_first_met: bool) -> None:
    """The neighbour says what it still wants when it had that memory."""
    engine.fetching.num_waiting = 20
    if is_first_met:
        engine.blocks.reserve = engine.blocks.wanted = 10
        engine.pass_time(1)
    engine.blocks.wanted = 100
    engine.pass_time(9)
    times = engine.fetching.given_up_at
    assert len(times) >= 5 and all(later - earlier >= 0.99 for earlier, later in zip(times, times[1:], strict=False))


def test_nor_if_others_fetch_its_offers_meanwhile(engine: Engine) -> None:
    engine.fetching.num_waiting, engine.blocks.wanted = 20, 100
    for _ in range(6):
        engine.pass_time(1.5)
        engine.way.fetched()
    assert 5 <= len(engine.fetching.given_up_at) <= 8


def test_blocks_of_the_prefix_cache_go_before_hand_overs(engine: Engine) -> None:
    engine.fetching.num_waiting, engine.blocks.num_cached, engine.blocks.wanted = 3, 10, 4
    engine.pass_time(PATIENCE + 2 * LOOK_SECONDS)
    assert engine.blocks.num_cached == 6 and not engine.fetching.given_up_at


def test_an_engine_without_a_prefix_cache_gives_what_is_mapped_in_advance(engine: Engine) -> None:
    """kvcached keeps some pages mapped for its next allocation: nobody else could use them, however long it idles."""
    engine.blocks.reserve = engine.blocks.wanted = 10
    engine.pass_time(LOOK_SECONDS)
    assert not engine.blocks.reserve and engine.blocks.trims == 1
    engine.pass_time(60)
    assert engine.blocks.trims == 1, "it has nothing more"


def test_pages_are_given_back_when_the_step_after_the_next_begins(engine: Engine) -> None:
    """Until the end of the next step, batches in flight may use them: kvcached keeps them mapped, and out of reach of
    `trim`."""
    engine.way.owe(5)
    turn = lambda: engine.way.turn(engine.blocks, None)  # type: ignore[arg-type]  # noqa: E731
    turn()
    turn()
    engine.way.stepped()
    turn()
    assert engine.way.owes and not engine.blocks.trims
    engine.way.stepped()
    turn()
    assert not engine.way.owes and engine.blocks.trims == 1
