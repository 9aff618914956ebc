# SPDX-License-Identifier: Apache-2.0
"""Conversations whose turns arrive at any of several servers, each of which may be asked by the others."""

from __future__ import annotations

import random

import pytest
from support.flow_asking import DIRECTIONS, POLICIES, Asks, is_computed, is_fetched, prompt
from support.flow_cluster import LEASE_SECONDS, TIMEOUT_SECONDS
from support.flow_engine import Engine, Request, Status
from support.flow_memory import Shape
from support.flow_pair import kind

from kvcached_nixl.scheduler.asking import prefixes
from kvcached_nixl.wire.handshake import Tensors, Weights
from kvcached_nixl.wire.headroom import Computed

BLOCK = Shape().block_size
MOST_TOKENS = 40
NEW = (7, 7, 7, 7, 7, 7)


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "LEAST_TOKENS", 4)


class Several(Asks):
    """Servers ``x``, ``y`` and ``z`` that ask each other."""

    def __init__(self, mode: str, **room: object) -> None:
        super().__init__(mode)
        self.cluster.answers_at_once = True
        self.servers = {
            name: self.cluster.engine(name, kind(asks=tuple("xyz".replace(name, "")), is_asked=True, **room))
            for name in "xyz"
        }

    def takes_turn(self, history: tuple[int, ...], name: str) -> Request:
        found = self.arrives(history, engine=self.servers[name], max_tokens=6)
        self.settle()
        return found


def after(found: Request) -> tuple[int, ...]:
    """The next turn's prompt."""
    return (*found.sequence.tokens[: found.num_tokens], *NEW)


def whole_blocks(found: Request) -> int:
    """The tokens of a turn that are cached in whole blocks. The last one has no KV."""
    return (found.num_tokens - 1) // BLOCK * BLOCK


def counts(engine: Engine) -> dict[Computed, int]:
    asking = engine.handover.asking
    assert asking is not None
    return {one: count for one, count in asking.figures.computed.items() if count}


@DIRECTIONS
@POLICIES
def test_the_next_turn_comes_from_whoever_has_the_last_one(mode: str, recomputes: bool) -> None:
    several = Several(mode, recomputes=recomputes, num_blocks=100)
    first = several.takes_turn(prompt(1), "x")
    second = several.takes_turn(after(first), "y")
    third = several.takes_turn(after(second), "z")
    assert all(map(is_fetched, (first, second, third))) and not several.causes()
    assert second.told_cached == whole_blocks(first), "x had the first answer, too"
    assert third.told_cached == whole_blocks(second)
    again = several.takes_turn(after(second), "y")
    assert is_computed(again), "z had asked y for it"
    fourth = several.takes_turn(after(third), "x")
    assert fourth.told_cached == whole_blocks(third)
    here = second.num_prompt_tokens // BLOCK * BLOCK
    assert here + fourth.num_external == fourth.num_prompt_tokens, "what x has is not moved again: y had asked it"
    several.nothing_is_left(LEASE_SECONDS + TIMEOUT_SECONDS)


@DIRECTIONS
def test_at_home_it_is_computed(mode: str) -> None:
    several = Several(mode, num_blocks=100, local_tokens=None)
    first = several.takes_turn(prompt(1), "x")
    second = several.takes_turn(after(first), "x")
    assert is_fetched(first) and is_computed(second) and counts(several.servers["x"]) == {Computed.CACHED: 1}
    several.nothing_is_left(LEASE_SECONDS + TIMEOUT_SECONDS)


def weights(number: int) -> Weights:
    return Weights(Tensors("1" * 32, f"{number:032x}"), files=f"{number:032x}")


@DIRECTIONS
@POLICIES
@pytest.mark.parametrize("seed", range(4))
def test_conversations_while_servers_die_change_their_weights_and_lack_memory(
    mode: str, recomputes: bool, seed: int
) -> None:
    """Each step of the engines checks what it reads: no token is computed from other KV than its own."""
    dice = random.Random(seed)
    several = Several(mode, recomputes=recomputes, num_blocks=dice.choice([24, 100]), local_tokens=None)
    histories = {number: prompt(number) for number in range(4)}
    asked: list[tuple[Engine, Request]] = []
    for event in range(40):
        number, name = dice.choice(list(histories)), dice.choice("xyz")
        engine = several.servers[name]
        found = several.arrives(histories[number], engine=engine, max_tokens=dice.choice([1, 6]))
        asked.append((engine, found))
        happens = dice.random()
        if happens < 0.1:
            several.servers[name] = several.cluster.restart(engine)
        elif happens < 0.2:
            several.servers[dice.choice("xyz")].update(weights(event // 20))
        elif happens < 0.3:
            engine.abort(found)
        several.pass_time(dice.choice([0.0, 1.0, 60.0]))
        if found.status is Status.STOPPED and found.num_tokens < MOST_TOKENS:
            histories[number] = after(found)
    several.pass_time(10 * TIMEOUT_SECONDS)
    lost = [one for engine, one in asked if engine in several.cluster.alive and not one.status.is_finished]
    assert not lost
    several.nothing_is_left(2 * (LEASE_SECONDS + TIMEOUT_SECONDS))
