# SPDX-License-Identifier: Apache-2.0
"""Prompts that begin as others did: what is computed here, and who is asked for the rest."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from support.clocks import ManualClock

from kvcached_nixl.scheduler.asking.local import (
    FIRST_TOKENS,
    HALF_LIFE_SECONDS,
    PASSING_SECONDS,
    BreakEven,
    SecondsByTokens,
)
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.headroom import Computed, Ended
from kvcached_nixl.wire.params import CACHED_TOKENS_KEY, HAS_CLIENTS_KEY, HEADROOM_KEY, MANIFEST_KEY

from .test_asking import ANSWER, BLOCK, CHUNK, DEAD, MOST, Decode, Request, Step, hashes

LONG = 64 * BLOCK


# ------------------------------------------------------------------------------------------------ what is computed here


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_seconds_are_learned_from_tokens(noise: float) -> None:
    found = SecondsByTokens()
    assert found.expected_seconds(100, 0.0) is None
    for place, tokens in enumerate((100, 900, 300, 700)):
        found.add(tokens, 0.1 + tokens / 1000 + noise * (-1) ** place, 0.0)
    assert found.expected_seconds(500, 0.0) == pytest.approx(0.6, abs=0.03)
    assert found.expected_seconds(2000, 0.0) == pytest.approx(2.1, abs=0.15)


def test_equal_prompts_say_nothing_of_longer_ones_and_nothing_is_less_than_nothing() -> None:
    found = SecondsByTokens()
    for seconds in (1.0, 1.1, 0.9):
        found.add(100, seconds, 0.0)
    assert found.expected_seconds(9000, 0.0) == pytest.approx(1.0)
    found.add(4000, 9.0, 0.0)
    assert found.expected_seconds(0, 0.0) == pytest.approx(0.8, abs=0.2)
    falling = SecondsByTokens()
    for tokens, seconds in ((100, 2.0), (1000, 1.0)):
        falling.add(tokens, seconds, 0.0)
    assert falling.expected_seconds(5000, 0.0) == pytest.approx(1.5)


def test_what_was_long_ago_counts_less_and_in_the_end_nothing() -> None:
    found = SecondsByTokens()
    for _ in range(8):
        found.add(100, 8.0, 0.0)
    for _ in range(8):
        found.add(100, 1.0, 10 * HALF_LIFE_SECONDS)
    assert found.expected_seconds(100, 10 * HALF_LIFE_SECONDS) == pytest.approx(1.0, abs=0.02)
    assert found.expected_seconds(100, 20 * HALF_LIFE_SECONDS) is None


def measured(local: dict[int, float], asked: dict[int, float], fixed: int | None = None) -> BreakEven:
    """After requests of so many tokens have taken so many seconds."""
    clock = ManualClock(100.0)
    found = BreakEven(clock, MOST, fixed)
    for is_local, seconds_by_tokens in ((True, local), (False, asked)):
        for tokens, seconds in seconds_by_tokens.items():
            found.begins("a", tokens, is_local=is_local)
            clock.advance(seconds)
            found.answered(["a", "another"])
    assert not found.begun
    return found


SLOW = {1000: 1.0, 2000: 2.0}
"""Prefill, for a prompt whose beginning it does not have."""


@pytest.mark.parametrize(
    ("here", "num_missing", "num_cached", "is_here"),
    [
        (measured({}, {}), FIRST_TOKENS, 2000, True),
        (measured({}, {}), FIRST_TOKENS + 1, 2000, False),
        (measured({}, {}), 200, 100, False),
        (measured({}, SLOW), FIRST_TOKENS + 1, 2000, False),
        (measured({200: 0.1}, SLOW), 400, 2000, True),
        (measured({200: 0.1}, SLOW), 401, 2000, False),
        (measured({200: 0.1, 400: 0.2}, SLOW), 800, 2000, True),
        (measured({200: 4.0, 400: 8.0}, SLOW), 40, 2000, True),
        (measured({200: 4.0, 400: 8.0}, SLOW), 300, 2000, False),
        (measured({900: 0.01}, SLOW), MOST, 2000, True),
        (measured({900: 0.01}, SLOW), MOST + 1, 2000, False),
        (measured({}, {}, 100), 100, 0, True),
        (measured({900: 0.01}, SLOW, 100), 101, 2000, False),
        (measured({}, {}, 0), 17, 2000, False),
    ],
)
def test_break_even(here: BreakEven, num_missing: int, num_cached: int, is_here: bool) -> None:
    assert here.computes_here(num_missing, num_cached, 0, num_missing + num_cached) is is_here


def test_what_waits_at_prefill_counts_and_what_waits_here() -> None:
    here = measured({100: 0.5, 400: 2.0}, SLOW)
    assert not here.computes_here(300, 700, 0, 1000) and here.computes_here(300, 700, 0, 3000)
    assert not here.computes_here(300, 700, 900, 3000)


def turn(decode: Decode, name: str, num_missing: int, num_tokens: int = LONG) -> bool:
    """A turn of a conversation arrives. Returns whether it may begin."""
    decode.blocks.cached[name] = num_tokens - num_missing
    decode.arrives(name, num_prompt_tokens=num_tokens)
    return name in decode.blocks.released


def counts(decode: Decode) -> dict[str, int]:
    return {one.value: count for one, count in decode.asking.figures.computed.items() if count}


def test_while_a_neighbour_waits_for_memory_no_turn_is_computed() -> None:
    decode = Decode(local_tokens=None)
    decode.blocks.cached["a"] = LONG - 4 * BLOCK
    request = decode.blocks.requests["a"] = Request("a", LONG)
    decode.asking.arrived(request)  # type: ignore[arg-type]
    decode.turn(may_ask=False)
    assert not decode.blocks.released and decode.asking.figures.held == 1
    decode.turn()
    assert "a" in decode.blocks.released and not decode.asker.asked


def test_no_turn_looks_at_all_that_are_computed_here() -> None:
    """Thousands wait for that while no server answers, and each would look at all others."""
    decode = Decode(local_tokens=None)
    local = decode.asking.local
    with mock.patch.object(local, "_waiting"):
        assert local.num_tokens == 0
        local._waiting.values.assert_not_called()  # type: ignore[attr-defined]
    for name in "abcd":
        turn(decode, name, 6 * BLOCK)
    assert list(decode.blocks.released) == ["a"] and local.num_tokens == 24 * BLOCK
    decode.asking.computed([Step("a", LONG)])  # type: ignore[list-item]
    decode.asking.gone("a")
    decode.asking.gone("c")
    decode.turn()
    assert list(decode.blocks.released) == ["a", "b"] and local.num_tokens == 12 * BLOCK
    for name in "bd":
        decode.asking.gone(name)
    assert not local.num_tokens


def test_a_turn_that_vllm_does_not_start_keeps_the_others_for_ten_seconds() -> None:
    decode = Decode(local_tokens=None)
    for name in "abc":
        turn(decode, name, CHUNK)
    assert list(decode.blocks.released) == ["a"]
    decode.clock.advance(PASSING_SECONDS)
    decode.turn()
    assert list(decode.blocks.released) == ["a", "b"]


@pytest.mark.parametrize("leaves", [False, True])
def test_of_equal_turns_one_is_computed(leaves: bool) -> None:
    decode = Decode(local_tokens=None)
    for name in "abc":
        decode.blocks.cached[name] = LONG - 4 * BLOCK
        decode.arrives(name, num_prompt_tokens=LONG, block_hashes=(b"same",))
    assert list(decode.blocks.released) == ["a"]
    if leaves:
        decode.asking.gone("a")
        decode.turn()
        assert list(decode.blocks.released) == ["a", "b"]
    else:
        decode.asking.computed([Step("a", LONG)])  # type: ignore[list-item]
        decode.blocks.cached |= dict.fromkeys("bc", LONG)
        decode.turn()
        assert list(decode.blocks.released) == ["a", "b", "c"]
    assert not decode.asker.asked


def test_how_long_they_take_is_measured_until_the_first_token() -> None:
    decode = Decode(local_tokens=None)
    even = decode.asking.local.break_even
    turn(decode, "a", 100)
    decode.clock.advance(3.0)
    decode.arrives("cold", num_prompt_tokens=LONG)
    decode.clock.advance(1.0)
    even.answered(["a"])
    decode.answers("cold")
    decode.clock.advance(1.0)
    even.answered(["cold"])
    assert not even.begun and even.asked_seconds(LONG) == pytest.approx(2.0)
    assert not turn(decode, "b", 110, 400), "4 s here, 2 s there"
    turn(decode, "gone", 10)
    decode.asking.gone("gone")
    decode.asking.gone("b")
    assert not even.begun


# -------------------------------------------------------------------------------------------- who is asked for the rest


def says(num_tokens: int, engine_id: str = "p", queued_tokens: int = 0) -> dict[str, Any]:
    return {
        "remote_engine_id": engine_id,
        CACHED_TOKENS_KEY: num_tokens,
        HEADROOM_KEY: {"queued_tokens": queued_tokens},
    }


URLS = ("http://p1", "http://p2", "http://p3")


def looks(says: dict[str, Any] | None, **changed: Any) -> Decode:
    decode = Decode(*URLS, num_free=10_000, **changed)
    decode.asker.says = says
    return decode


def test_unless_it_has_more_to_compute_than_that_saves() -> None:
    decode = looks({URLS[0]: says(0), URLS[1]: says(30 * BLOCK, queued_tokens=31 * BLOCK), URLS[2]: says(0)})
    decode.arrives("a", num_prompt_tokens=LONG)
    assert decode.url("a") != URLS[1]


@pytest.mark.parametrize("said", [None, {}, says(-1), says(2**70), {CACHED_TOKENS_KEY: "1"}, says(LONG + 1)])
def test_whatever_servers_say_one_is_asked(said: Any) -> None:
    decode = looks(dict.fromkeys(URLS, said))
    decode.arrives("a", num_prompt_tokens=LONG)
    assert decode.is_asked("a")
    decode.answers("a")
    assert decode.blocks.released == {"a": ANSWER}


def test_this_engine_is_asked_last() -> None:
    decode = looks({URLS[0]: says(LONG, "own"), URLS[1]: says(0), URLS[2]: says(0)})
    decode.arrives("a", num_prompt_tokens=LONG)
    assert decode.url("a") != URLS[0]
    decode.arrives("b", num_prompt_tokens=LONG)
    assert [server.url for name, server in decode.asker.looked_up if name == "b"].count(URLS[0]) == 0
    decode.asker.says = {**decode.asker.says, URLS[0]: says(32 * BLOCK)}  # type: ignore[dict-item]
    decode.clock.advance(31.0)
    decode.arrives("c", num_prompt_tokens=LONG)
    assert decode.url("c") == URLS[0], "others behind its URL, to which a balancer leads, are found in time"


def test_nobody_is_asked_before_if_there_is_no_choice_or_little_to_save_or_most_is_known() -> None:
    one = Decode(num_free=10_000)
    one.arrives("a", num_prompt_tokens=LONG)
    short = looks({})
    short.arrives("a", num_prompt_tokens=LONG, block_hashes=())
    short.asker.looked_up.clear()
    short.arrives("b", num_prompt_tokens=7 * BLOCK)
    assert one.is_asked("a") and short.is_asked("b") and not one.asker.looked_up and not short.asker.looked_up
    known = looks({})
    known.arrives("a", num_prompt_tokens=8 * BLOCK, block_hashes=hashes("system", "a"))
    known.asker.looked_up.clear()
    known.arrives("b", num_prompt_tokens=8 * BLOCK, block_hashes=hashes("system", "a"))
    assert not known.asker.looked_up


def test_equal_prompts_wait_while_servers_are_asked_and_one_that_leaves_is_followed() -> None:
    decode = looks(None)
    for name in "abc":
        decode.arrives(name, num_prompt_tokens=LONG, block_hashes=(b"same",))
    asked = [(name, server) for name, server in decode.asker.looked_up]
    assert {name for name, _ in asked} == {"a"} and len(asked) == 3 and decode.asking.figures.held == 3
    decode.asker.cached += [(name, server, says(0)) for name, server in asked[:2]]
    decode.turn()
    assert not decode.asker.asked, "one has not answered"
    decode.asking.gone("a")
    decode.asker.cached += [(name, server, says(0)) for name, server in asked[2:]]
    decode.turn()
    assert {name for name, _ in decode.asker.looked_up} == {"a", "b"} and not decode.asker.asked
    decode.asker.cached += [(name, server, says(0)) for name, server in decode.asker.looked_up[3:]]
    decode.turn()
    assert decode.is_asked("b") and not decode.is_asked("c")


def test_after_a_failure_the_next_best_is_asked_and_nobody_is_looked_up_again() -> None:
    decode = looks({URLS[0]: says(8 * BLOCK), URLS[1]: says(30 * BLOCK), URLS[2]: says(0)})
    decode.arrives("a", num_prompt_tokens=LONG)
    decode.answers("a", DEAD)
    assert decode.url("a") == URLS[0] and len(decode.asker.looked_up) == 3


def test_one_that_is_late_while_servers_are_asked_is_refused_and_the_next_equal_one_goes_on() -> None:
    """It had no deadline any more, however long it waited then."""
    decode = looks(None, queue_seconds=30.0)
    request = decode.blocks.requests["a"] = Request("a", LONG, (b"same",))
    decode.asking.arrived(request)  # type: ignore[arg-type]
    decode.turn(may_ask=False)
    decode.clock.advance(29.5)
    decode.arrives("b", num_prompt_tokens=LONG, block_hashes=(b"same",))
    assert {name for name, _ in decode.asker.looked_up} == {"a"}
    decode.clock.advance(0.5)
    decode.turn()
    assert list(decode.fetching.refused) == ["a"] and {name for name, _ in decode.asker.looked_up} == {"a", "b"}
    decode.asker.cached += [(name, server, says(0)) for name, server in decode.asker.looked_up]
    decode.turn()
    assert decode.is_asked("b") and not decode.is_asked("a")
    decode.asking.gone("a")
    assert decode.asking.figures.held == 0


def test_while_the_engine_is_paused_nobody_is_asked_with_what_was_found() -> None:
    decode = looks(None)
    decode.arrives("a", num_prompt_tokens=LONG)
    decode.asker.cached += [(name, server, says(0)) for name, server in decode.asker.looked_up]
    decode.turn(may_ask=False)
    assert not decode.asker.asked and decode.asking.figures.held == 1 and not decode.asking.window.num_promised
    decode.turn()
    assert decode.is_asked("a") and counts(decode) == {} and Computed.CACHED in decode.asking.figures.computed


def test_a_server_that_has_not_answered_in_time_is_not_waited_for_until_it_does() -> None:
    decode = looks({URLS[0]: says(0), URLS[1]: None, URLS[2]: says(0)})
    decode.arrives("a", num_prompt_tokens=LONG)
    decode.asker.says = None
    decode.arrives("b", num_prompt_tokens=LONG)
    asked = {server.url: server for name, server in decode.asker.looked_up if name == "b"}
    assert set(asked) == set(URLS)
    decode.asker.cached += [("b", asked[url], says(0)) for url in (URLS[0], URLS[2])]
    decode.turn()
    assert decode.is_asked("b")
    decode.asker.cached.append(("b", asked[URLS[1]], says(8 * BLOCK)))
    decode.turn()
    decode.arrives("c", num_prompt_tokens=LONG)
    decode.asker.cached += [("c", server, says(0)) for url, server in asked.items() if url != URLS[1]]
    decode.turn()
    assert not decode.is_asked("c"), "it has answered again"


def test_where_no_server_answers_in_time_nobody_waits() -> None:
    decode = looks({})
    decode.arrives("a", num_prompt_tokens=LONG)
    decode.asker.says = None
    decode.arrives("b", num_prompt_tokens=LONG)
    assert decode.is_asked("b") and len(decode.asker.looked_up) == 6


@pytest.mark.parametrize(
    ("num_there", "asks_peer"), [(0, False), (LONG // 2 - BLOCK, False), (LONG // 2 + BLOCK, True)]
)
def test_a_server_with_clients_of_its_own_is_asked_if_that_saves_half(num_there: int, asks_peer: bool) -> None:
    decode = looks({URLS[0]: says(0), URLS[1]: {**says(num_there), HAS_CLIENTS_KEY: True}, URLS[2]: None})
    decode.asking.servers.all = [one for one in decode.asking.servers.all if one.url != URLS[2]]
    decode.arrives("a", num_prompt_tokens=LONG)
    assert decode.url("a") == URLS[asks_peer]


# ------------------------------------------------------------------------------------- what is cached there is fetched


def offers(num_tokens: int, engine_id: str = "p") -> dict[str, Any]:
    return {**says(num_tokens, engine_id), "do_remote_prefill": True, MANIFEST_KEY: {"num_tokens": num_tokens}}


MUCH, MORE = 50 * BLOCK, 60 * BLOCK


def test_what_a_server_has_is_fetched_at_once_and_what_others_offer_is_released() -> None:
    said = {URLS[0]: offers(MUCH), URLS[1]: offers(MORE), URLS[2]: offers(LONG - BLOCK, "own")}
    decode = looks(said, local_tokens=None)
    decode.arrives("a", num_prompt_tokens=LONG)
    assert decode.asker.least_tokens == LONG - FIRST_TOKENS
    assert decode.blocks.released == {"a": said[URLS[1]]} and not decode.asker.asked and counts(decode) == {}
    assert decode.fetching.unneeded_ == [said[URLS[0]]], "its own one is not released: nobody has made it"
    assert decode.asking.figures.ended[Ended.ANSWERED] == 1 and decode.asking.local.num_tokens == LONG - MORE
    decode.asking.computed([Step("a", LONG)])  # type: ignore[list-item]
    assert not decode.asking.local.num_tokens


@pytest.mark.parametrize("manifest", [None, {}, {"num_tokens": "1"}, {"num_tokens": 2 * BLOCK}])
def test_what_is_offered_counts_and_not_what_is_said(manifest: Any) -> None:
    """Nearly all of a prompt would be computed here, beside running streams."""
    decode = looks(
        {URLS[0]: {**offers(MORE), MANIFEST_KEY: manifest}, URLS[1]: says(0), URLS[2]: None}, local_tokens=None
    )
    decode.arrives("a", num_prompt_tokens=LONG)
    assert decode.is_asked("a") and not decode.blocks.released


@pytest.mark.parametrize("here", [0, LONG - 300])
def test_no_less_is_wanted_than_would_be_left_to_compute_or_is_here(here: int) -> None:
    decode = looks({}, local_tokens=None)
    turn(decode, "a", LONG - here)
    assert decode.asker.least_tokens == max(here + 1, LONG - FIRST_TOKENS)
    fixed = looks({}, local_tokens=0)
    turn(fixed, "a", LONG - here)
    assert fixed.asker.least_tokens == LONG, "nobody has that"
    turn(fixed, "b", LONG - here)
    assert fixed.asker.least_tokens == 0, "nobody waits for servers that do not answer in time"


@pytest.mark.parametrize("happens", ["has no room", "is paused"])
def test_an_offer_is_used_at_once_or_released(happens: str) -> None:
    """Nobody renews its lease, so that a request which waits longer would fetch what is gone."""
    decode = looks(None, local_tokens=None)
    decode.arrives("a", num_prompt_tokens=LONG)
    decode.asker.cached += [("a", server, offers(MORE)) for _, server in decode.asker.looked_up]
    if happens == "has no room":
        decode.asking.window.promise("another", 1_000_000)
    decode.turn(may_ask=happens != "is paused")
    assert not decode.blocks.released and decode.fetching.unneeded_ == 3 * [offers(MORE)]
    decode.asking.window.settle("another")
    decode.turn()
    assert decode.is_asked("a") and len(decode.asker.looked_up) == 3


def test_what_has_not_come_does_not_slow_what_is_computed_here() -> None:
    decode = looks({URLS[0]: offers(MORE), URLS[1]: says(0), URLS[2]: None}, local_tokens=None)
    decode.arrives("a", num_prompt_tokens=LONG)
    assert decode.asking.local.num_tokens == LONG - MORE and not decode.blocks.chunk_tokens
    assert turn(decode, "home", CHUNK)
    decode.fetching.received = {"a"}
    decode.asking.computed([Step("home", LONG)])  # type: ignore[list-item]
    decode.turn()
    assert decode.blocks.chunk_tokens == CHUNK
    decode.asking.gone("a")
    decode.turn()
    assert not decode.blocks.chunk_tokens and not decode.asking.local.num_tokens


def test_while_enough_is_computed_here_all_is_asked_for_and_the_offer_is_released() -> None:
    decode = looks({URLS[0]: offers(MORE), URLS[1]: says(0), URLS[2]: None}, local_tokens=None)
    assert turn(decode, "home", CHUNK)
    decode.arrives("a", num_prompt_tokens=LONG)
    assert decode.is_asked("a") and decode.fetching.unneeded_ == [offers(MORE)]


def test_what_was_offered_to_one_that_has_left_is_released() -> None:
    decode = looks(None, local_tokens=None)
    decode.arrives("a", num_prompt_tokens=LONG)
    asked = [server for _, server in decode.asker.looked_up]
    decode.asker.cached.append(("a", asked[0], offers(MUCH)))
    decode.turn()
    decode.asking.gone("a")
    decode.asker.cached.append(("a", asked[1], offers(MORE)))
    decode.turn()
    assert decode.fetching.unneeded_ == [offers(MUCH), offers(MORE)]


def test_a_prompt_of_which_an_offer_fails_is_asked_for_as_a_whole() -> None:
    decode = looks({URLS[0]: offers(MORE), URLS[1]: says(0), URLS[2]: None}, local_tokens=None)
    decode.arrives("a", num_prompt_tokens=LONG)
    decode.fetching.failures["a"] = HandOverFailed(FailureCause.LEASE, "it is gone")
    assert decode.asking.holds_again(decode.blocks.requests["a"])  # type: ignore[arg-type]
    decode.turn()
    assert decode.url("a") != URLS[0] and not decode.asking.local.num_tokens and len(decode.asker.looked_up) == 3


def test_one_that_is_known_to_have_nearly_all_is_the_only_one_that_says_what_it_has() -> None:
    decode = looks(dict.fromkeys(URLS, says(0)), local_tokens=None)
    decode.arrives("a", num_prompt_tokens=LONG, block_hashes=hashes(*"0123456789abcdef"))
    (known,) = (server for server in decode.asking.servers.all if server.url == decode.url("a"))
    decode.asker.says = {known.url: offers(LONG - 4 * BLOCK)}
    decode.asker.looked_up.clear()
    decode.arrives("b", num_prompt_tokens=LONG, block_hashes=hashes(*"0123456789abcde", "x"))
    assert decode.asker.looked_up == [("b", known)] and decode.blocks.released == {"b": decode.asker.says[known.url]}


def test_one_that_has_much_is_not_asked_for_the_rest_where_another_has_nearly_all() -> None:
    """A conversation has gone on elsewhere since."""
    decode = looks(dict.fromkeys(URLS, says(0)), local_tokens=None)
    decode.arrives("a", num_prompt_tokens=LONG // 2, block_hashes=hashes(*"01234567"))
    known = decode.url("a")
    other = next(url for url in URLS if url != known)
    decode.asker.says = {**dict.fromkeys(URLS, says(0)), known: says(LONG // 2), other: offers(MORE)}
    decode.arrives("b", num_prompt_tokens=LONG, block_hashes=hashes(*"0123456789abcdef"))
    assert decode.blocks.released == {"b": offers(MORE)} and not decode.is_asked("b")
