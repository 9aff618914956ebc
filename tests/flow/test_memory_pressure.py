# SPDX-License-Identifier: Apache-2.0
"""Prefill gives way when memory is short: which offers are taken back, when, and that nobody gets wrong bytes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from support.flow_cluster import LEASE_SECONDS, TIMEOUT_SECONDS
from support.flow_engine import Request, Status
from support.flow_pair import BLOCKS_EACH, DIRECTIONS, PROMPT, PULL, PUSH, Pair, is_computed, is_right, kind, prompt

from kvcached_nixl.scheduler.giving_way import FETCHED_SECONDS
from kvcached_nixl.settings import Settings, TransferMode
from kvcached_nixl.wire.causes import RevocationCause

PATIENCE = Settings.give_way_after_seconds


def pass_time(pair: Pair, seconds: float) -> None:
    """In slices as short as an engine's looks."""
    pair.cluster.pass_time(seconds, 0.25)


def small(mode: TransferMode, num_offers: int, **decode: object) -> Pair:
    """A pair whose prefill has room for so many offers."""
    room = kind(num_blocks=1 + num_offers * BLOCKS_EACH, caches_prefixes=False)
    return Pair(mode, room, kind(**{"caches_prefixes": False, **decode}))


def offers(pair: Pair, count: int, first: int = 1) -> list[Request]:
    found = [pair.ask_prefill(prompt(first + place)) for place in range(count)]
    pair.settle()
    assert all(one.answer is not None for one in found)
    return found


def revoked(pair: Pair) -> dict[str, int]:
    return {RevocationCause(cause).label: count for cause, count in pair.prefill.revoked.items()}


def all_are_fetched_but(num_first: int, pair: Pair, kept: Iterable[Request]) -> None:
    """Decode comes for what was offered, oldest first. The first ones are recomputed, at once."""
    for place, one in enumerate(kept):
        found = pair.ask_decode(one.answer, one.prompt)
        pair.settle()
        assert is_computed(found) if place < num_first else is_right(found), place


@DIRECTIONS
@pytest.mark.parametrize("num_waiting", [1, 2])
def test_a_request_that_waits_for_blocks_gets_those_of_the_oldest_offers(mode: TransferMode, num_waiting: int) -> None:
    pair = small(mode, 3)
    kept = offers(pair, 3)
    new = [pair.ask_prefill(prompt(4 + place)) for place in range(num_waiting)]
    pass_time(pair, PATIENCE - 0.5)
    assert all(one.status is Status.WAITING for one in new), "decode may fetch one at any moment"
    pass_time(pair, 1.0)
    assert all(one.status is Status.STOPPED and one.answer for one in new)
    assert revoked(pair) == {"blocks": num_waiting}, "and no more than are needed"
    all_are_fetched_but(num_waiting, pair, [*kept, *new])
    assert pair.causes() == {"lease": num_waiting}


@DIRECTIONS
def test_what_decode_fetches_does_not_give_way(mode: TransferMode) -> None:
    """An offer being transferred is never revoked: another one is; without another one, the request waits."""
    pair = small(mode, 2)
    pair.acquaint()
    kept = offers(pair, 2)
    fetching = pair.ask_decode(kept[0].answer, kept[0].prompt)
    pair.until_posted()
    new = pair.ask_prefill(prompt(3))
    last = pair.prefill.add(Request("plain", prompt(4) + prompt(5), None))
    for _ in range(24):
        pair.clock.advance(0.5)
        pair.round()
    assert new.answer and last.status is Status.WAITING
    assert revoked(pair) == {"blocks": 2}, "the new one, too, after its time"
    pair.settle()
    assert is_right(fetching), "whose bytes were moving"
    assert last.status is Status.STOPPED


@DIRECTIONS
@pytest.mark.parametrize("is_offered", [True, False], ids=["for another offer", "for a request served here"])
def test_what_decode_waits_for_gives_way_only_to_what_is_served_here(mode: TransferMode, is_offered: bool) -> None:
    """A decode that is full for a while has requests for all offers. To compute more of them, and to have it compute
    these again, helps nobody."""
    pair = small(mode, 2)
    pair.acquaint()
    kept = offers(pair, 2)
    pair.decode.admits = False
    wanting = [pair.ask_decode(one.answer, one.prompt) for one in kept]
    new = pair.ask_prefill(prompt(3)) if is_offered else pair.prefill.add(Request("plain", prompt(3), None))
    pass_time(pair, 10.0)
    assert (new.status is Status.STOPPED) == (not is_offered)
    assert revoked(pair) == ({} if is_offered else {"blocks": 1})
    pair.decode.admits = True
    pair.settle()
    assert [bool(one.num_external) for one in wanting] == [is_offered, True]
    assert new.status is Status.STOPPED and all(one.status is Status.STOPPED for one in wanting)


@pytest.mark.parametrize(("mode", "is_own"), [(PULL, True), (PUSH, True), (PULL, False)])
def test_what_others_fetch_keeps_nobody_waiting(mode: TransferMode, is_own: bool) -> None:
    """A decode that is full waits for all offers. Another one fetches each second what they share, which frees nothing:
    that protects the offers for a while, as memory mostly comes back by itself while decode fetches. ``is_own``: a
    request of prefill's own client waits for memory, else a neighbour does."""
    pair = Pair(mode, kind(num_blocks=24), kind(num_blocks=64))
    other = pair.cluster.engine("other", kind(num_blocks=64, caches_prefixes=False))
    pair.acquaint()
    shared, told = prompt(9)[:8], list[Mapping[str, Any] | None]()
    kept = [pair.ask_prefill(shared + 2 * prompt(seed)[:8]) for seed in range(1, 5)]
    pair.settle()
    pair.decode.admits = False
    waiting = [pair.ask_decode(one.answer, one.prompt) for one in kept]
    pair.settle()
    new = pair.prefill.add(Request("plain", 3 * prompt(20), None)) if is_own else None
    pair.prefill.pool.neighbour_leaves_blocks = None if is_own else 2 * BLOCKS_EACH
    fetched = []
    for second in range(1, int(FETCHED_SECONDS + 3 * PATIENCE)):
        question: Any = SimpleNamespace(token_ids=(*shared, 7), adapter=0)
        pair.prefill.look_up(question, 1, told.append)
        pass_time(pair, 1.0)
        fetched.append(pair.ask_decode(told.pop(), (*shared, 7, second), engine=other))
        assert second > FETCHED_SECONDS or not revoked(pair), second
    pair.prefill.pool.neighbour_leaves_blocks, pair.decode.admits = None, True
    assert revoked(pair) and (new is None or new.status is Status.STOPPED)
    pair.settle()
    assert sum(one.num_external > 0 for one in fetched) >= FETCHED_SECONDS
    assert any(one.num_external for one in waiting) and all(one.status is Status.STOPPED for one in waiting)


@DIRECTIONS
@pytest.mark.parametrize("caches_prefixes", [False, True])
@pytest.mark.parametrize("limit_blocks", [11, 10, 4, 0])
def test_a_lower_limit_takes_back_what_exceeds_it(mode: TransferMode, limit_blocks: int, caches_prefixes: bool) -> None:
    """Also in an idle engine, and if the prefix cache would keep the blocks."""
    pair = Pair(mode, kind(num_blocks=32, caches_prefixes=caches_prefixes), kind(caches_prefixes=False))
    kept = offers(pair, 3)
    pair.prefill.pool.limit_blocks = limit_blocks
    pass_time(pair, 2 * PATIENCE)
    pair.settle()
    assert pair.prefill.pool.blocks_over_limit == 0
    assert not pair.prefill.pool.has_retired and not pair.prefill.pool.has_reserve
    num_revoked = -(-max(0, 3 * BLOCKS_EACH - limit_blocks) // BLOCKS_EACH)
    assert revoked(pair) == ({"limit": num_revoked} if num_revoked else {})
    all_are_fetched_but(num_revoked, pair, kept)


def test_a_neighbour_that_waits_gets_what_nobody_fetches() -> None:
    """The same as a lower limit, but only as long as it waits."""
    pair = Pair(PULL, kind(num_blocks=32), kind(caches_prefixes=False))
    kept = offers(pair, 3)
    pair.prefill.pool.neighbour_leaves_blocks = 2 * BLOCKS_EACH
    pass_time(pair, 3.0)
    pair.prefill.pool.neighbour_leaves_blocks = None
    pass_time(pair, 2 * PATIENCE)
    assert revoked(pair) == {"neighbour": 1}
    assert not pair.prefill.pool.sum_of.keys() & pair.prefill.pool.free.keys(), "nothing stays in the prefix cache"
    all_are_fetched_but(1, pair, kept)


@DIRECTIONS
def test_a_neighbour_does_not_wait_for_leases_that_end_one_after_the_other(mode: TransferMode) -> None:
    """Clients have left, and decode fetches none of it."""
    pair = Pair(mode, kind(num_blocks=256, caches_prefixes=False), kind(caches_prefixes=False))
    for seed in range(1, 41):
        offers(pair, 1, first=seed)
        pass_time(pair, PATIENCE / 2)
    pair.prefill.pool.neighbour_leaves_blocks = 10 * BLOCKS_EACH
    for seed in range(41, 47):
        offers(pair, 1, first=seed)
        pass_time(pair, PATIENCE / 2)
    assert pair.prefill.pool.usage().num_used <= 10 * BLOCKS_EACH + 1


@DIRECTIONS
def test_an_idle_decode_gives_its_prefix_cache_to_a_neighbour(mode: TransferMode) -> None:
    """It keeps no offers, and has nothing to compute."""
    pair = Pair(mode)
    for seed in (1, 2, 3):
        pair.hand_over(prompt(seed))
    pool = pair.decode.pool
    cached = pool.num_cached
    assert cached >= 3 * (BLOCKS_EACH - 1)
    pool.neighbour_leaves_blocks = cached - BLOCKS_EACH
    pass_time(pair, PATIENCE - 0.5)
    assert pool.num_cached == cached, "what the neighbour runs may free memory at any moment"
    pass_time(pair, 1.0)
    assert pool.num_cached == cached - BLOCKS_EACH, "no more than are wanted"
    assert not pool.has_retired and not pool.has_reserve
    pool.neighbour_leaves_blocks = None
    pass_time(pair, 2 * PATIENCE)
    assert pool.num_cached == cached - BLOCKS_EACH and not pair.decode.is_moving
    for seed in (1, 2, 3):
        assert pair.hand_over(prompt(seed)).status is Status.STOPPED


@pytest.mark.parametrize("is_limited", [False, True], ids=["neighbour", "limit"])
@DIRECTIONS
def test_a_prefill_that_decode_fetches_from_gives_its_prefix_cache_too(mode: TransferMode, is_limited: bool) -> None:
    pair = Pair(mode, kind(num_blocks=64), kind(caches_prefixes=False))
    for seed in range(1, 9):
        pair.hand_over(prompt(seed))
    pool = pair.prefill.pool
    left = pool.num_cached - 3 * BLOCKS_EACH
    if is_limited:
        pool.limit_blocks = left
    else:
        pool.neighbour_leaves_blocks = left
    for seed in range(9, 13):
        assert is_right(pair.hand_over(prompt(seed)))
        pass_time(pair, PATIENCE / 2)
    assert pool.num_cached <= left and not revoked(pair)


@DIRECTIONS
@pytest.mark.parametrize("recomputes", [False, True])
def test_two_full_engines_that_prefill_for_each_other_do_not_wait_for_each_other(
    mode: TransferMode, recomputes: bool
) -> None:
    """Each keeps offers for the other in all of its blocks. Without giving way both wait until the leases end."""
    room = kind(num_blocks=1 + 2 * BLOCKS_EACH, caches_prefixes=False, recomputes=recomputes)
    pair = Pair(mode, room, room)
    both = (pair.prefill, pair.decode)
    answers = {
        engine: [pair.ask_prefill(prompt(10 * side + place), engine=engine) for place in range(2)]
        for side, engine in enumerate(both)
    }
    pair.settle()
    wanting = [
        pair.ask_decode(one.answer, one.prompt, engine=other)
        for engine, other in (both, both[::-1])
        for one in answers[engine]
    ]
    pass_time(pair, PATIENCE - 0.5)
    assert all(one.status is Status.WAITING for one in wanting), "nothing would free any block"
    pass_time(pair, 20.0)
    assert all(one.status.is_finished for one in wanting), "long before a lease or a timeout ends"
    assert any(one.num_external for one in wanting) or recomputes
    assert all(one.status is Status.STOPPED for one in wanting) or not recomputes


@pytest.mark.parametrize("is_stalled", [False, True])
def test_a_neighbour_that_runs_gets_nothing_that_decode_waits_for(is_stalled: bool) -> None:
    """It may be that very decode, and waits for blocks that its running requests free."""
    pair = Pair(PULL, kind(num_blocks=32, caches_prefixes=False), kind(caches_prefixes=False))
    kept = offers(pair, 3)
    pair.acquaint()
    pair.decode.admits = False
    wanting = [pair.ask_decode(one.answer, one.prompt) for one in kept]
    pair.prefill.pool.neighbour_leaves_blocks, pair.prefill.pool.is_neighbour_stalled = BLOCKS_EACH, is_stalled
    pass_time(pair, 6.0)
    assert revoked(pair) == ({"neighbour": 2} if is_stalled else {})
    pair.prefill.pool.neighbour_leaves_blocks = None
    pair.decode.admits = True
    pair.settle()
    assert [bool(one.num_external) for one in wanting] == [not is_stalled, not is_stalled, True]


# ------------------------------------------------------------------------------------------- push: ask before computing


def overloaded(most_unclaimed_tokens: int = 2 * len(PROMPT), **more: object) -> Pair:
    """A pair that pushes, whose router asks both sides at once. Decode has no room for a while."""
    room = kind(num_blocks=64, caches_prefixes=False, most_unclaimed_tokens=most_unclaimed_tokens)
    pair = Pair(PUSH, room, kind(**{"caches_prefixes": False, "num_blocks": 64, **more}))
    pair.acquaint()
    ask_both(pair, 9)
    pair.settle()
    return pair


def ask_both(pair: Pair, seed: int) -> tuple[Request, Request]:
    upstream = pair.ask_prefill(prompt(seed), transfer_id=f"t{seed}")
    return upstream, pair.ask_decode(pair.meet(transfer_id=f"t{seed}"), prompt(seed))


def test_prefill_computes_little_that_decode_has_no_room_for() -> None:
    pair = overloaded()
    pair.decode.admits = False
    first = [ask_both(pair, seed) for seed in (1, 2)]
    pair.settle()
    pass_time(pair, 2.0)
    later = [ask_both(pair, seed) for seed in (3, 4, 5, 6)]
    pass_time(pair, 4.0)
    assert all(upstream.answer for upstream, _ in first)
    assert all(upstream.status is Status.WAITING and not upstream.num_computed for upstream, _ in later)
    assert not pair.prefill.is_moving, "it rests"
    pair.decode.admits = True
    pair.settle()
    for upstream, found in [*first, *later]:
        assert upstream.status is Status.STOPPED and is_right(found)


def test_what_decode_has_registered_for_overtakes_what_it_has_not() -> None:
    """One decode server is full; prefill works for the other one."""
    pair = overloaded()
    other = pair.cluster.engine("other", kind(caches_prefixes=False, num_blocks=64))
    pair.decode.admits = False
    for seed in (1, 2):
        ask_both(pair, seed)
    pair.settle()
    pass_time(pair, 2.0)
    held = [ask_both(pair, seed) for seed in (3, 4)]
    upstream = pair.ask_prefill(prompt(5), transfer_id="t5")
    found = pair.ask_decode(pair.meet(transfer_id="t5"), prompt(5), engine=other)
    pair.settle()
    assert is_right(found) and upstream.answer
    assert all(one.status is Status.WAITING for one, _ in held)
    pair.decode.admits = True
    pair.settle()
    assert all(one.status is Status.STOPPED for pair_ in held for one in pair_)


def test_where_decode_is_asked_after_prefill_nothing_waits() -> None:
    """Serial routers: what nobody has registered for yet may be wanted as soon as prefill has answered."""
    room = {"num_blocks": 64, "caches_prefixes": False}
    pair = Pair(PUSH, kind(most_unclaimed_tokens=len(PROMPT), **room), kind(**room))
    pair.acquaint()
    kept = [pair.ask_prefill(prompt(seed), transfer_id=f"t{seed}") for seed in (1, 2, 3)]
    pair.settle()
    pass_time(pair, 2.0)
    kept.append(pair.ask_prefill(prompt(4), transfer_id="t4"))
    pair.settle()
    assert all(one.answer for one in kept)
    all_are_fetched_but(0, pair, kept)


# ------------------------------------------------------------------------------ push: decode and prefill on one device


def sharing(recomputes: bool, count: int = 4) -> tuple[Pair, list[tuple[Request, Request]]]:
    """A pair on one device, of which decode has taken so much that prefill cannot begin."""
    pair = Pair(PUSH, kind(caches_prefixes=False), kind(num_blocks=512, caches_prefixes=False, recomputes=recomputes))
    pair.acquaint()
    pair.prefill.admits = False
    asked = [ask_both(pair, seed) for seed in range(1, count + 1)]
    pair.settle()
    assert all(found.status is Status.REMOTE for _, found in asked)
    return pair, asked


def held(pair: Pair) -> int:
    return pair.decode.pool.shape.num_blocks - 1 - len(pair.decode.pool.free)


@pytest.mark.parametrize("recomputes", [False, True], ids=["fail", "recompute"])
def test_decode_gives_up_what_has_not_come_for_a_prefill_without_memory(recomputes: bool) -> None:
    pair, asked = sharing(recomputes)
    pool = pair.decode.pool
    pool.neighbour_leaves_blocks = 2 * BLOCKS_EACH
    pass_time(pair, PATIENCE - 0.5)
    assert held(pair) == 4 * BLOCKS_EACH, "it may come at any moment"
    pass_time(pair, 8.0)
    assert held(pair) == 2 * BLOCKS_EACH, "and no more than are wanted"
    given_up, kept = [found for _, found in asked[2:]], [found for _, found in asked[:2]]
    assert all(one.status is Status.REMOTE for one in kept), "those that have waited longest stay"
    # Computed here once nobody waits for memory any more.
    assert {one.status for one in given_up} <= ({Status.WAITING, Status.STOPPED} if recomputes else {Status.ERROR})
    assert pair.causes() == {"revoked": 2}
    pool.neighbour_leaves_blocks, pair.prefill.admits = None, True
    pass_time(pair, 6.0)
    pair.settle()
    assert all(is_right(one) for one in kept)
    assert all(one.status is (Status.STOPPED if recomputes else Status.ERROR) for one in given_up)


@pytest.mark.parametrize("is_heard", [True, False], ids=["heard", "in quarantine"])
def test_decode_gives_up_all_at_once_that_a_neighbour_waits_for(is_heard: bool) -> None:
    """Also a prompt that needs more than many hand-overs have; and no more while those are in quarantine."""
    pair, asked = sharing(recomputes=False, count=40)
    if not is_heard:
        pair.cluster.vanish(pair.prefill)
    pair.decode.pool.neighbour_leaves_blocks = 2 * BLOCKS_EACH
    pass_time(pair, PATIENCE + 1.0)
    assert held(pair) == (2 if is_heard else 40) * BLOCKS_EACH
    pass_time(pair, 5.0)
    assert [found.status is Status.ERROR for _, found in asked] == 2 * [False] + 38 * [True]
    if not is_heard:
        pair.cluster.come_back(pair.prefill)
    pair.decode.pool.neighbour_leaves_blocks, pair.prefill.admits = None, True
    pass_time(pair, 6.0)
    pair.settle()
    assert [is_right(found) for _, found in asked] == 2 * [True] + 38 * [False]
    pair.cluster.pass_time(TIMEOUT_SECONDS)


@pytest.mark.parametrize("seed", range(12))
def test_a_neighbour_that_comes_and_goes_costs_no_request_its_end(seed: int) -> None:
    """With aborts and cleared caches in between, on a device that prefill and decode share."""
    draw = random.Random(seed)
    pair, asked = sharing(recomputes=draw.random() < 0.5)
    pool = pair.decode.pool
    for number in range(10, 40):
        pool.neighbour_leaves_blocks = draw.choice((None, 0, 5, 11, 18))
        pool.is_neighbour_stalled, pair.prefill.admits = draw.random() < 0.7, draw.random() < 0.5
        if draw.random() < 0.3:
            asked.append(ask_both(pair, number))
        if draw.random() < 0.3:
            gone = draw.choice([one for both in asked for one in both])
            if not gone.status.is_finished:
                (pair.prefill if gone.max_tokens == 1 else pair.decode).abort(gone)
        if draw.random() < 0.1:
            pair.decode.handover.revocations.clear()
        pass_time(pair, draw.choice((0.25, 1.0, 3.0)))
    pool.neighbour_leaves_blocks, pair.prefill.admits = None, True
    pass_time(pair, 150.0)
    assert all(one.status.is_finished for both in asked for one in both)
    pair.nothing_is_left(LEASE_SECONDS + 2 * TIMEOUT_SECONDS)
