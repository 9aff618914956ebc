# SPDX-License-Identifier: Apache-2.0
"""Conversations whose turns arrive at any of several servers, each of which may be asked by the others."""

from __future__ import annotations

import random

import pytest
from support.flow_asking import DIRECTIONS, POLICIES, Asks, is_fetched
from support.flow_cluster import LEASE_SECONDS, TIMEOUT_SECONDS
from support.flow_engine import Engine, Request, Status
from support.flow_memory import Shape
from support.flow_pair import is_computed, kind, prompt

from kvcached_nixl.scheduler.asking import local, questions
from kvcached_nixl.wire.handshake import Tensors, Weights
from kvcached_nixl.wire.headroom import Computed

BLOCK = Shape().block_size
MOST_TOKENS = 40
NEW = (7, 7, 7, 7, 7, 7)


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "LEAST_TOKENS", 4)


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


@DIRECTIONS
def test_at_home_it_is_computed(mode: str) -> None:
    several = Several(mode, num_blocks=100, local_tokens=None)
    first = several.takes_turn(prompt(1), "x")
    second = several.takes_turn(after(first), "x")
    assert is_fetched(first) and is_computed(second) and counts(several.servers["x"]) == {Computed.CACHED: 1}


def first_turn(several: Several) -> tuple[Request, str, str]:
    """A turn on ``x``. Returns it, the server that has computed its prompt, and the one that knows nothing of it."""
    first = several.takes_turn(prompt(1), "x")
    knows = next(name for name in "yz" if several.servers[name].pool.cached)
    return first, knows, "yz".replace(knows, "")


def forbid_prompts(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no server may be asked to compute a prompt."""
    for engine in several.servers.values():
        monkeypatch.setattr(engine, "take", None)


@DIRECTIONS
@POLICIES
def test_what_another_server_has_is_fetched_without_a_step_there(
    mode: str, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With more new tokens nothing is computed here.
    monkeypatch.setattr(local, "FIRST_TOKENS", 12)
    several = Several(mode, recomputes=recomputes, num_blocks=100, local_tokens=None)
    first, knows, other = first_turn(several)
    forbid_prompts(several, monkeypatch)
    second = several.takes_turn(after(first), other)
    assert second.num_external == second.told_cached == whole_blocks(first)
    assert not counts(several.servers[other]), "what is fetched is not counted as computed"
    third = several.takes_turn(after(second), "x")
    assert third.num_external == whole_blocks(second) - whole_blocks(first), "what x has is not moved again"
    fourth = several.takes_turn(after(third), knows)
    assert fourth.num_external == whole_blocks(third) - first.num_prompt_tokens // BLOCK * BLOCK
    # Nothing waits for the end of a lease: what nobody fetches is released.
    several.nothing_is_left(0)


@DIRECTIONS
def test_workers_know_of_what_is_offered_without_a_step(mode: str) -> None:
    """Decode may ask them for it as soon as it has the answer."""
    several = Several(mode, num_blocks=100, local_tokens=None)
    first, _, other = first_turn(several)
    x, engine = several.servers["x"], several.servers[other]
    found = several.arrives(after(first), engine=engine, max_tokens=6)
    engine.step()
    assert x.handover.offering.kept.num_kept == 1 and not engine.handover.asking.has_news
    x.dispatch()
    assert not engine.handover.asking.has_news
    x.complete()
    assert engine.handover.asking.has_news
    several.settle()
    assert is_fetched(found)


@DIRECTIONS
def test_of_several_that_offer_it_one_is_fetched_and_the_others_keep_nothing(mode: str) -> None:
    several = Several(mode, num_blocks=100, local_tokens=None)
    first, _, other = first_turn(several)
    found = several.takes_turn(first.prompt + NEW, other)
    assert is_fetched(found) and not several.causes()
    several.nothing_is_left(0)


@DIRECTIONS
@pytest.mark.parametrize("happens", ["leaves", "dies", "changes its weights", "is paused", "lacks memory"])
def test_whatever_happens_to_an_offer_without_a_step(mode: str, happens: str) -> None:
    several = Several(mode, num_blocks=40, local_tokens=None)
    first, _, other = first_turn(several)
    x, engine = several.servers["x"], several.servers[other]
    found = several.arrives(after(first), engine=engine, max_tokens=6)
    for _ in range(10):
        if not x.handover.offering.kept.num_kept:
            engine.step()
            x.dispatch()
    assert x.handover.offering.kept.num_kept == 1
    if happens == "leaves":
        engine.abort(found)
    elif happens == "dies":
        several.servers["x"] = several.cluster.restart(x)
    elif happens == "changes its weights":
        x.update(weights(7))
    elif happens == "is paused":
        x.handover.revocations.paused(grace_seconds=0.0, clears=True)
        x.handover.revocations.resumed()
    else:
        several.arrives(prompt(9) * 8, engine=x, max_tokens=6)
    several.pass_time(2 * (LEASE_SECONDS + TIMEOUT_SECONDS))
    assert found.status is (Status.ABORTED if happens == "leaves" else Status.STOPPED)


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
