# SPDX-License-Identifier: Apache-2.0
"""Thousands of clients that leave, and servers that are worse than dead: no request waits for them without an end."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvcached_nixl.wire.question import AskFailed, Outcome, read_answer

from .test_asking import BUSY, DEAD, SILENCE_SECONDS, Decode, Request

FEW, MANY = 2_000, 10_000


def waiting(number: int) -> Decode:
    """One is asked for, and the others wait for room."""
    return all_waiting(number, lambda place: b"%d" % place)


def waiting_for_another(number: int) -> Decode:
    """They have the same prompt."""
    return all_waiting(number, lambda _: b"same")


def all_waiting(number: int, prompt: Callable[[int], bytes]) -> Decode:
    decode = Decode(num_free=0)
    for place in range(number):
        decode.blocks.requests[f"r{place}"] = request = Request(f"r{place}", block_hashes=(prompt(place),))
        decode.asking.arrived(request, decode.blocks)  # type: ignore[arg-type]
    decode.turn()
    return decode


def waiting_to_be_computed(number: int) -> Decode:
    """No server can be reached."""
    decode = Decode()
    decode.arrives("first")
    decode.answers("first", DEAD)
    for place in range(number):
        decode.blocks.requests[f"r{place}"] = request = Request(f"r{place}")
        decode.asking.arrived(request, decode.blocks)  # type: ignore[arg-type]
    while decode.asking.num_waiting:
        decode.turn()
    return decode


def seconds_to_leave(wait: Callable[[int], Decode], number: int, *, newest_first: bool) -> float:
    """Of the engine's thread, while 95 of 100 leave."""
    decode = wait(number)
    places = range(number // 20, number)
    begun = time.process_time()
    for place in reversed(places) if newest_first else places:
        decode.asking.gone(f"r{place}")
    decode.turn()
    return time.process_time() - begun


@pytest.mark.parametrize("newest_first", [False, True], ids=["oldest first", "newest first"])
@pytest.mark.parametrize(
    "wait",
    [
        waiting,
        waiting_for_another,
        waiting_to_be_computed,
    ],
    ids=lambda one: one.__name__,
)
def test_what_it_costs_that_clients_leave_grows_with_their_number_only(
    wait: Callable[[int], Decode], newest_first: bool
) -> None:
    few, many = (min(seconds_to_leave(wait, n, newest_first=newest_first) for _ in range(2)) for n in (FEW, MANY))
    assert many < 2.5 * few * MANY / FEW, f"{1e6 * few / FEW:.1f} us each, and {1e6 * many / MANY:.1f} us of many"


# ------------------------------------------------------------------------------------------- worse than a dead server


def test_an_answer_that_never_comes_is_not_waited_for_while_the_server_answers_others() -> None:
    decode = Decode("http://p1", num_free=10_000)
    decode.arrives("lost")
    for place in range(30):
        decode.arrives(f"r{place}")
        decode.clock.now += SILENCE_SECONDS
        decode.answers(f"r{place}")
    assert 1 in decode.asker.cancelled


def test_a_server_that_refuses_everything_gets_no_more_than_others() -> None:
    """Another service has got the address, and answers 404 to all. It has nothing to compute, so it is always first."""
    decode = Decode("http://p1", "http://p2", num_free=10_000)
    for place in range(20):
        decode.arrives(f"r{place}")
        while f"r{place}" not in (*decode.blocks.released, *decode.fetching.refused):
            refuses = decode.url(f"r{place}") == "http://p1"
            decode.answers(f"r{place}", Outcome("HTTP 404", is_final=True) if refuses else None)
        decode.asking.gone(f"r{place}")
    assert len(decode.fetching.refused) <= 3


def test_a_busy_server_is_asked_again_soon_whatever_it_says() -> None:
    decode = Decode()
    decode.arrives("a")
    with pytest.raises(AskFailed) as failed:
        read_answer(503, {"Retry-After": "9999"}, b"")
    decode.answers("a", failed.value.outcome)
    assert decode.asking.due_at_seconds is not None and decode.asking.due_at_seconds < decode.clock.now + 61


def test_a_busy_server_is_not_asked_by_all_that_wait_at_once_more_often_than_it_rests() -> None:
    """Hundreds wait: each time it is asked once for what finds room, and it rests longer each time."""
    decode = Decode(num_free=40)
    for place in range(200):
        decode.arrives(f"r{place}")
    asked = []
    for _ in range(5):
        before = len(decode.asker.asked)
        for number in list(decode.asking.servers.all[0].asked):
            decode.asker.answers.append((number, BUSY))
        decode.turn()
        assert decode.asking.num_asked == 0 and decode.asking.num_waiting == 200
        decode.clock.now = decode.asking.due_at_seconds or 0.0
        decode.turn()
        asked.append(len(decode.asker.asked) - before)
    assert asked == 5 * asked[:1] and asked[0] < 20


def test_a_health_check_is_sent_once_a_silence_whoever_waits() -> None:
    decode = Decode(num_free=40)
    for place in range(200):
        decode.arrives(f"r{place}")
    for _ in range(50):
        decode.clock.now += SILENCE_SECONDS / 25
        decode.turn()
    assert len(decode.asker.checking) == 2
