# SPDX-License-Identifier: Apache-2.0
"""Sequences that were once found to end in a request without an end, or in a step that looks at all that wait."""

from __future__ import annotations

from unittest import mock

import msgspec
import pytest
from support.clocks import ManualClock
from support.internals import leftovers

from kvcached_nixl.scheduler.asking.wanted import QueueLimit
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.question import AskFailed, Outcome, read_answer

from .test_asking import BUSY, OF_ANOTHER, OF_P, SILENCE_SECONDS, Decode, Step

REFUSED = Outcome("HTTP 400", is_final=True)


@pytest.mark.parametrize("found", [BUSY, REFUSED, Outcome("HTTP 401", is_of_server=True)], ids=str)
def test_what_a_server_answers_without_its_engine_is_no_sign_of_life(found: Outcome) -> None:
    """Prefill's engine hangs. Its API server answers each new question at once: its queue is full, or it refuses. So
    it is never silent, its health is never asked, and what it was asked for before waits for ever."""
    decode = Decode("http://p1", num_free=10_000)
    decode.arrives("a")
    for place in range(200):
        decode.arrives(f"r{place}")
        if decode.is_asked(f"r{place}"):
            decode.answers(f"r{place}", found)
        decode.asking.gone(f"r{place}")
        decode.clock.advance(SILENCE_SECONDS / 4)
        decode.turn()
        decode.asker.checked.extend((one, True) for one in decode.asker.checking)
        decode.asker.checking.clear()
        decode.turn()
    assert decode.number("a") > 1 or "a" in decode.fetching.refused, "nothing for 6,000 s, and it still waits"


def test_two_engines_behind_one_address() -> None:
    """What balances connections stands before two prefill servers: a Service with an address of its own. In push each
    answer names the engine for the next question, which may reach the other one. One that is asked for again meets an
    answer of another request that names the wrong one again, and fails, although both servers are well and idle."""
    decode = Decode(pushes=True, recomputes=False, num_free=10_000)
    engines = [OF_P, OF_ANOTHER]
    decode.arrives("first")
    decode.answers("first", engines[0])
    decode.asking.computed([Step("first")])  # type: ignore[list-item]
    decode.asking.gone("first")
    for place in range(20):
        one, other = f"a{place}", f"b{place}"
        decode.arrives(one)
        decode.arrives(other)
        decode.asker.answers += [(decode.number(one), engines[1]), (decode.number(other), engines[0])]
        decode.turn()
        if one in decode.fetching.failures and decode.asking.may_ask_again(one):
            decode.asking.holds_again(decode.blocks.requests[one])  # type: ignore[arg-type]
            decode.turn()
            decode.answers(one, engines[1])
        if one in decode.fetching.failures:
            assert decode.asking.may_ask_again(one), "it fails"
        decode.fetching.failures.clear()
        decode.asking.computed([Step(one), Step(other)])  # type: ignore[list-item]
        decode.asking.gone(one)
        decode.asking.gone(other)


def test_an_urgent_request_does_not_wait_for_an_equal_one_that_is_not() -> None:
    """Others keep prefill busy, which computes what is urgent first. So the prompt of the first one is not computed for
    as long as that goes on. An urgent request with the same prompt waits for it, and not for its own turn."""
    decode = Decode(goes_by_priority=True)
    decode.arrives("later", priority=9, block_hashes=(b"same",))
    decode.arrives("urgent", priority=0, block_hashes=(b"same",))
    assert decode.is_asked("urgent")
    decode.arrives("next", priority=9, block_hashes=(b"same",))
    assert not decode.is_asked("next")
    decode.asking.gone("later")
    decode.turn()
    assert decode.is_asked("next")


def test_equal_prompts_that_fail_one_after_another_cost_a_look_each() -> None:
    """Each time one fails or leaves, all that wait for it were looked up in the prefix cache, on the engine's thread: a
    look at a long prompt whose beginning is cached takes milliseconds."""
    decode = Decode(recomputes=False)
    looks: list[str] = []
    cached = decode.blocks.num_cached_tokens

    def look(request_id: str) -> int:
        looks.append(request_id)
        return cached(request_id)

    decode.blocks.num_cached_tokens = look  # type: ignore[method-assign]
    for place in range(200):
        decode.arrives(f"r{place}", block_hashes=(b"same",))
    looks.clear()
    for place in range(200):
        assert decode.is_asked(f"r{place}")
        decode.answers(f"r{place}", REFUSED)
        decode.asking.gone(f"r{place}")
        decode.turn()
    assert len(looks) < 5 * 200
    assert not leftovers(decode.asking)


def test_long_prompts_that_find_no_room_cost_a_step_nothing() -> None:
    """For each of 16 that wait, each step chose a server, and looked for all of its blocks among those that the server
    was asked for: 21 ms a step for prompts of a million tokens."""
    decode = Decode("http://p1", "http://p2", num_free=0)
    for place in range(20):
        decode.arrives(f"r{place}", block_hashes=(b"%d" % place,))
    with mock.patch.object(decode.asking.servers, "choose", side_effect=AssertionError("a server was chosen")):
        decode.turn()
    assert len(decode.asking.questions.asked) == 1


@pytest.mark.parametrize("num_servers", [1, 2, 6])
@pytest.mark.parametrize("hangs", [False, True], ids=["ends", "hangs"])
def test_a_prompt_that_costs_three_servers_is_not_asked_for_again(num_servers: int, hangs: bool) -> None:
    """prefill_required: a prompt at which prefill's engine ends, or hangs, is asked for again as soon as a server is
    back, so that it ends again, with all that it computes for others."""
    decode = Decode(*(f"http://p{number}" for number in range(num_servers)), is_required=True, recomputes=False)
    decode.arrives("a")
    for _ in range(20):
        if "a" in decode.fetching.refused:
            break
        if hangs:
            decode.clock.advance(SILENCE_SECONDS)
            decode.turn()
            decode.asker.checked.append((decode.asker.checking.pop(), False))
            decode.turn()
        else:
            decode.answers("a", Outcome("Server disconnected", is_of_server=True, has_prompt=True))
        decode.clock.advance(60)
        decode.turn()
    assert "a" in decode.fetching.refused and len(decode.asker.asked) == 3


def test_equals_that_are_late_in_one_turn_are_refused_together() -> None:
    """The one that was asked for waits again. A long step ends behind the deadlines of all: the first one is refused,
    and nothing is computed for those behind it. They were given their whole time once more."""
    decode = Decode()
    decode.asking._limit = QueueLimit(decode.clock, 30.0)
    decode.arrives("a", block_hashes=(b"same",))
    decode.answers("a", msgspec.structs.replace(BUSY, retry_after_seconds=100.0))
    decode.clock.advance(1.0)
    for one in "bcd":
        decode.arrives(one, block_hashes=(b"same",))
    decode.clock.advance(60.0)
    decode.turn()
    assert [*decode.fetching.refused] == ["a", "b", "c", "d"]
    for one in "abcd":
        decode.asking.gone(one)
    decode.turn()
    assert not leftovers(decode.asking)


def test_an_answer_that_never_comes_is_not_waited_for_while_the_server_answers_others() -> None:
    decode = Decode("http://p1", num_free=10_000)
    decode.arrives("lost")
    for place in range(30):
        decode.arrives(f"r{place}")
        decode.clock.advance(SILENCE_SECONDS)
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
    assert decode.asking.due_at_seconds is not None and decode.asking.due_at_seconds < decode.clock.now_seconds() + 61


def retry_after(limit: QueueLimit) -> int:
    refusal = limit.refusal()
    assert refusal.cause is FailureCause.QUEUE_TIMEOUT
    found, _, rest = refusal.tags("r").removeprefix("cause=queue_timeout retry_after=").partition(" ")
    assert rest == "request=r", "a client's id comes last"
    return int(found)


def test_a_client_may_try_again_after_as_long_as_requests_wait() -> None:
    clock = ManualClock(100.0)
    limit = QueueLimit(clock, 300.0)
    limit.waits("a")
    limit.asked("a")
    assert retry_after(limit) == 1
    limit.waits("b")
    limit.waits("c")
    clock.advance(7.5)
    limit.asked("b")
    assert retry_after(limit) == 8, "so long the last one has waited"
    clock.advance(20.0)
    assert retry_after(limit) == 20, "nobody was asked for since"
    clock.advance(1000.0)
    assert retry_after(limit) == 60
    limit.gone("c")
    limit.waits("d")
    assert retry_after(limit) == 8, "nobody has waited meanwhile"
