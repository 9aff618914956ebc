# SPDX-License-Identifier: Apache-2.0
"""No prompt is asked for, or waits for others, without an end; servers pay only for what they have failed in."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from unittest import mock

import msgspec
import pytest
from support.clocks import ManualClock
from support.engine_fakes import with_states
from support.internals import leftovers

from kvcached_nixl.scheduler.asking.questions import OWN
from kvcached_nixl.scheduler.asking.wanted import GRAMMAR_SECONDS, QueueLimit
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.question import (
    LONGEST_RETRY_SECONDS,
    ROLE_HEADER,
    AskFailed,
    Outcome,
    engine_in,
    read_answer,
)

from .test_asking import ANSWER, BLOCK, BUSY, DEAD, ODD, OF_ANOTHER, OF_P, SILENCE_SECONDS, Decode, Request, Step

MISSING = Outcome("HTTP 404: the model `new` does not exist", is_final=True, is_of_adapter=True)
TOO_LONG = Outcome("HTTP 400: maximum context length", is_final=True)
KILLED = Outcome("Server disconnected", is_of_server=True, has_prompt=True)
LONG_BUSY = msgspec.structs.replace(BUSY, retry_after_seconds=10 * SILENCE_SECONDS)


@pytest.mark.parametrize("failure", [ODD, KILLED], ids=["HTTP 500", "killed"])
@pytest.mark.parametrize("recomputes", [True, False], ids=["recompute", "fail"])
def test_servers_that_are_busy_in_between_do_not_hide_those_that_have_failed(
    failure: Outcome, recomputes: bool
) -> None:
    decode = Decode("http://p1", "http://p2", "http://p3", recomputes=recomputes, num_free=10_000)
    decode.arrives("a")
    for outcome in (failure, BUSY, failure):
        number = decode.number("a")
        decode.answers("a", outcome)
        while "a" not in decode.fetching.refused and decode.number("a") == number:
            decode.clock.advance(10)
            decode.turn()
    assert "a" in decode.fetching.refused


@pytest.mark.parametrize("recomputes", [True, False], ids=["recompute", "fail"])
def test_a_balancer_without_servers_is_not_busy_for_ever(recomputes: bool) -> None:
    """HAProxy, Envoy and ingress-nginx answer 503 where no server lives behind them."""
    decode = Decode("http://p1", recomputes=recomputes, num_free=10_000)
    decode.arrives("a")
    begun = decode.clock.now_seconds()
    while "a" not in decode.fetching.refused and decode.clock.now_seconds() < begun + 3600:
        if decode.number("a") in decode.asking.questions.asked:
            decode.answers("a", msgspec.structs.replace(BUSY, retry_after_seconds=0.0))
        decode.clock.advance(30)
        decode.turn()
    assert 600 < decode.clock.now_seconds() - begun < 3600


@pytest.mark.parametrize("is_local", [False, True], ids=["asked", "computed here"])
def test_nobody_waits_for_a_grammar_of_another_one(is_local: bool) -> None:
    """vLLM begins a request when that is compiled: in minutes, or never. Until then nobody is asked for it, so equal
    prompts do not follow it, and no blocks are promised to it."""
    decode = Decode("http://p1", num_free=40, local_tokens=2 * BLOCK if is_local else 0)
    for place in range(64):
        decode.blocks.cached[f"grammar{place}"] = 2 * BLOCK if is_local else 0
        decode.arrives(f"grammar{place}", block_hashes=(b"same",), awaits_grammar=True)
    decode.blocks.cached["b"] = 2 * BLOCK if is_local else 0
    decode.arrives("b", block_hashes=(b"same",))
    assert "b" in decode.blocks.released if is_local else decode.is_asked("b")
    assert not any(decode.is_asked(f"grammar{place}") for place in range(64))
    decode.asking.gone("b")
    decode.blocks.requests["grammar0"].awaits_grammar = False
    assert decode.asking.due_at_seconds == decode.clock.now_seconds() + GRAMMAR_SECONDS
    decode.clock.advance(GRAMMAR_SECONDS)
    decode.turn()
    assert "grammar0" in decode.blocks.released if is_local else decode.is_asked("grammar0")
    for place in range(64):
        decode.asking.gone(f"grammar{place}")
    decode.clock.advance(GRAMMAR_SECONDS)
    decode.turn()
    assert decode.asking.due_at_seconds is None


def test_a_server_that_was_busy_long_ago_is_only_busy() -> None:
    decode = Decode("http://p1", num_free=10_000)
    decode.arrives("early")
    decode.answers("early", BUSY)
    decode.asking.gone("early")
    decode.clock.advance(3600)
    decode.arrives("late")
    decode.answers("late", BUSY)
    assert "late" not in decode.fetching.refused


def test_what_prefill_leaves_whole_is_not_asked_for() -> None:
    """Layers keep states, and the prompt's last token belongs to an image."""
    decode = Decode("http://p1", num_free=10_000)
    decode.asking._engine.groups = with_states()
    for ends_in_media in (True, False):
        assert decode.asking.arrived(Request("a", ends_in_media=ends_in_media)) is not ends_in_media  # type: ignore[arg-type]


def test_an_adapter_that_a_server_lacks_costs_only_its_own_requests() -> None:
    """``load_lora_adapter`` goes from server to server: one answers 404 for the new adapter, and gets other prompts."""
    decode = Decode("http://p1", "http://p2", num_free=10_000)
    for place in range(30):
        name = f"n{place}"
        decode.arrives(name, adapter="new")
        while decode.is_asked(name) and decode.number(name) in decode.asking.questions.asked:
            decode.answers(name, MISSING if decode.url(name) == "http://p1" else ANSWER)
        decode.asking.gone(name)
    asked = set()
    for place in range(20):
        decode.arrives(f"base{place}")
        asked.add(decode.url(f"base{place}"))
    assert asked == {"http://p1", "http://p2"}


@pytest.mark.parametrize("recomputes", [True, False], ids=["recompute", "fail"])
def test_an_adapter_is_found_on_the_only_server_that_has_it(recomputes: bool) -> None:
    """Servers that lack it answer at once, so they have the least to compute, and are asked first."""
    urls = [f"http://p{number}" for number in range(1, 5)]
    decode = Decode(*urls, recomputes=recomputes, num_free=10_000)
    decode.by_url(urls[-1]).asked[10**6] = 4096, 0.0
    decode.arrives("a", adapter="new")
    while decode.url("a") != urls[-1]:
        decode.answers("a", MISSING)
    decode.answers("a", ANSWER)
    assert "a" in decode.blocks.released and not decode.fetching.refused
    decode.arrives("b", adapter="new")
    for _ in urls:
        decode.answers("b", MISSING)
    assert "b" in decode.fetching.refused


@pytest.mark.parametrize("recomputes", [True, False], ids=["recompute", "fail"])
def test_an_adapter_is_waited_for_where_its_only_server_is_busy(recomputes: bool) -> None:
    decode = Decode("http://p1", "http://p2", "http://p3", recomputes=recomputes, num_free=10_000)
    decode.arrives("a", adapter="new")
    for _ in range(3):
        decode.answers("a", BUSY if decode.url("a") == "http://p3" else MISSING)
    assert decode.asking.due_at_seconds == decode.by_url("http://p3").rests_until_seconds
    while decode.number("a") not in decode.asking.questions.asked:
        decode.clock.advance(1)
        decode.turn()
    assert decode.url("a") == "http://p3"
    decode.answers("a", ANSWER)
    assert "a" in decode.blocks.released and not decode.fetching.refused


def test_who_waits_for_a_server_of_its_own_keeps_nobody_waiting() -> None:
    """Others are asked for meanwhile, and for as long as that takes."""
    decode = Decode("http://p1", "http://p2", num_free=10_000)
    decode.arrives("a", adapter="new")
    for _ in range(2):
        decode.answers("a", MISSING if decode.url("a") == "http://p1" else BUSY)
    for place in range(10):
        decode.clock.advance(5)
        decode.turn()
        if decode.number("a") in decode.asking.questions.asked:
            decode.answers("a", BUSY)
        decode.arrives(f"b{place}")
        assert decode.url(f"b{place}") == "http://p1"
        decode.answers(f"b{place}")
        decode.asking.gone(f"b{place}")
    decode.asking.gone("a")
    decode.turn()
    assert decode.asking.due_at_seconds is None and not decode.asking.figures.held


def test_an_adapter_whose_server_leaves_while_it_is_waited_for_is_computed_here() -> None:
    decode = Decode("http://p1", "http://p2", num_free=10_000)
    decode.arrives("a", adapter="new")
    for _ in range(2):
        decode.answers("a", BUSY if decode.url("a") == "http://p2" else MISSING)
    decode.asking.servers.all.remove(decode.by_url("http://p2"))
    decode.clock.advance(30)
    decode.turn()
    assert "a" in decode.fetching.refused and decode.asking.due_at_seconds is None


@pytest.mark.parametrize("adapter", ["new", ""])
@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize("rests", ["own", "dead"])
def test_a_refused_prompt_is_not_asked_for_again_while_another_server_rests(
    adapter: str, is_required: bool, rests: str
) -> None:
    decode = Decode("http://p1", "http://p2", is_required=is_required, num_free=10_000)
    other = decode.by_url("http://p2")
    if rests == "own":
        decode.asking.servers.failed(other, OWN)
    else:
        other.rests_until_seconds = decode.clock.now_seconds() + 30
    decode.arrives("a", adapter=adapter)
    for _ in range(3):
        if "a" not in decode.fetching.refused and "a" not in decode.blocks.released:
            decode.answers("a", MISSING)
    waits = bool(adapter) and is_required and rests == "dead"
    assert ("a" in decode.fetching.refused) is not waits


@pytest.mark.parametrize("policy", [{}, {"is_required": True}], ids=["fail", "required"])
@pytest.mark.parametrize("is_on_trial", [True, False], ids=["trial", "pause"])
@pytest.mark.parametrize(("adapter", "outcome"), [("new", MISSING), ("", TOO_LONG)], ids=["adapter", "too long"])
def test_what_one_refuses_waits_for_one_that_may_take_it(
    adapter: str, outcome: Outcome, is_on_trial: bool, policy: dict[str, bool]
) -> None:
    """p1 was restarted. A prompt without an adapter that is too long for p2 does not wait for its pause to end."""
    decode = Decode("http://p1", "http://p2", recomputes=False, num_free=10_000, **policy)  # type: ignore[arg-type]
    decode.by_url("http://p2").asked[10**6] = 4096, 0.0
    decode.asking.servers.failed(decode.by_url("http://p1"), DEAD)
    if is_on_trial:
        decode.clock.advance(1)
        decode.arrives("trial")
        assert decode.url("trial") == "http://p1"
    decode.arrives("a", adapter=adapter)
    assert decode.url("a") == "http://p2"
    decode.answers("a", outcome)
    assert ("a" in decode.fetching.refused) is (not adapter and not is_on_trial)
    if is_on_trial:
        decode.answers("trial")
        decode.asking.computed([Step("trial")])  # type: ignore[list-item]
    decode.clock.advance(1)
    decode.turn()
    assert decode.url("a") == "http://p1" or "a" in decode.fetching.refused


@pytest.mark.parametrize(("adapter", "outcome"), [("new", MISSING), ("", TOO_LONG)], ids=["adapter", "too long"])
def test_what_only_failed_servers_may_take_ends_however_many_wait(adapter: str, outcome: Outcome) -> None:
    """p1, which is well, refuses them. p2 has gone, which is seen after 5 s each time: each had a trial of its own."""
    decode = Decode("http://p1", "http://p2", recomputes=False, num_free=10_000)
    decode.asking.servers.failed(decode.by_url("http://p2"), DEAD)
    for place in range(150):
        if place < 40:
            decode.arrives(f"r{place}", adapter=adapter)
        for server in decode.asking.servers.all:
            since_seconds, found = (0.0, outcome) if server.url == "http://p1" else (5.0, DEAD)
            asked = [one for one, (_, at) in server.asked.items() if at + since_seconds <= decode.clock.now_seconds()]
            decode.asker.answers += [(one, found) for one in asked]
        decode.clock.advance(1)
        decode.turn()
    assert len(decode.fetching.refused) == 40 and len(decode.asker.asked) <= 3 * 40


@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize("first", [DEAD, BUSY], ids=["dead", "busy"])
def test_what_one_refuses_ends_also_if_the_other_is_away(first: Outcome, is_required: bool) -> None:
    decode = Decode("http://p1", "http://p2", recomputes=False, is_required=is_required, num_free=10_000)
    decode.arrives("a")
    for _ in range(20):
        if decode.number("a") in decode.asking.questions.asked:
            decode.answers("a", TOO_LONG if decode.url("a") == "http://p2" else first)
        decode.clock.advance(3)
        decode.turn()
    assert "a" in decode.fetching.refused


@pytest.mark.parametrize("event", ["p2 serves", "p2 gets another address", "p3 rests no longer"])
def test_who_waits_for_its_adapter_is_asked_for_whenever_a_server_may_be_asked(event: str) -> None:
    """p1 lacks it, p2 is busy for a minute, and p3 could not be reached."""
    decode = Decode("http://p1", "http://p2", "http://p3", recomputes=False, num_free=10_000)
    decode.names["http://p2"] = ("10.0.0.1",)
    decode.turn()
    says = {"http://p1": MISSING, "http://p2": msgspec.structs.replace(BUSY, retry_after_seconds=60.0)}
    if event.startswith("p3"):
        says["http://p3"] = DEAD
    else:
        decode.asking.servers.all.remove(decode.by_url("http://p3"))
    decode.arrives("a", adapter="new")
    for _ in says:
        decode.answers("a", says[decode.url("a")])
    assert decode.number("a") not in decode.asking.questions.asked and not decode.asking.has_news
    if event == "p2 serves":
        decode.asking.servers.served(decode.by_url("http://p2"), decode.clock.now_seconds())
        assert decode.asking.has_news
    elif event == "p2 gets another address":
        decode.names["http://p2"] = ("10.0.0.1", "10.0.0.2")
    else:
        assert decode.asking.due_at_seconds == decode.by_url("http://p3").rests_until_seconds
        decode.clock.advance(0.5)
    decode.turn()
    assert decode.number("a") in decode.asking.questions.asked and decode.url("a") == f"http://{event[:2]}"


@pytest.mark.parametrize("begins", ["first", "last"])
def test_who_waits_for_its_adapter_waits_for_a_trial_also_if_that_is_refused(begins: str) -> None:
    """It waits when the trial begins in the same turn, or arrives then. p1 lacks its adapter, and p3 is busy."""
    decode = Decode("http://p1", "http://p2", "http://p3", recomputes=False, goes_by_priority=True, num_free=10_000)
    decode.asking.servers.failed(decode.by_url("http://p3"), LONG_BUSY)
    decode.by_url("http://p1").asked[10**6] = 4096, 0.0
    if begins == "first":
        decode.arrives("a", adapter="new", priority=1)
        decode.answers("a", BUSY)
        decode.answers("a", MISSING)
    decode.by_url("http://p2").failure = DEAD
    decode.clock.advance(4)
    decode.arrives("trial")
    if begins == "last":
        decode.arrives("a", adapter="new", priority=1)
        decode.answers("a", MISSING)
    assert decode.url("trial") == "http://p2" and decode.url("a") == "http://p1"
    decode.answers("trial", TOO_LONG)
    assert decode.url("a") == "http://p2" and not decode.fetching.refused


def test_a_trial_that_goes_on_keeps_nobody_waiting_who_has_no_other_server() -> None:
    """The answer of the last one that was asked for does not come. p1, which is well, lacks their adapter."""
    decode = Decode("http://p1", "http://p2", recomputes=False, num_free=10_000)
    decode.asking.servers.failed(decode.by_url("http://p2"), DEAD)
    for one in ("a", "trial"):
        decode.arrives(one, adapter="new")
        decode.answers(one, MISSING)
    decode.clock.advance(1)
    decode.turn()
    for _ in range(2):
        assert decode.url("trial") == decode.url("a") == "http://p2" and decode.asking.figures.asked == 2
        decode.answers("a", DEAD)
        decode.clock.advance(3)
        decode.turn()
    assert "a" in decode.fetching.refused


def test_who_waits_for_all_is_asked_for_when_the_first_may_be_asked() -> None:
    decode = Decode("http://p1", "http://p2", recomputes=False, num_free=10_000)
    for one, outcome in (("http://p1", DEAD), ("http://p2", BUSY)):
        decode.asking.servers.failed(decode.by_url(one), outcome)
    decode.arrives("a")
    assert decode.asking.due_at_seconds == decode.by_url("http://p1").rests_until_seconds


@pytest.mark.parametrize("knows", [True, False], ids=["known", "not known yet"])
@pytest.mark.parametrize(
    "policy", [{"recomputes": False}, {"is_required": True}, {}], ids=["fail", "required", "computes"]
)
@pytest.mark.parametrize("adapter", ["", "new"])
def test_who_waits_for_busy_servers_does_not_ask_its_own(adapter: str, policy: dict[str, bool], knows: bool) -> None:
    """A name that stands for all servers, this one, too."""
    decode = Decode("http://p1", "http://p2", "http://own", num_free=10_000, **policy)  # type: ignore[arg-type]
    own = decode.by_url("http://own")
    itself = {**ANSWER, "remote_engine_id": decode.asking.questions._own_engine_id}
    if knows:
        decode.asking.servers.failed(own, OWN)
    else:
        for one in ("http://p1", "http://p2"):
            decode.by_url(one).asked[10**6] = 4096, 0.0
        decode.arrives("first")
        assert decode.url("first") == "http://own"
        decode.answers("first", itself)
        decode.asking.gone("first")
    num_before = len(decode.asker.asked)
    decode.arrives("a", adapter=adapter)
    for _ in range(2):
        decode.answers("a", MISSING if adapter and decode.url("a") == "http://p1" else BUSY)
    assert own.is_own and len(decode.asker.asked) == num_before + 2 and not decode.fetching.refused
    decode.clock.advance(3)
    decode.turn()
    assert decode.number("a") in decode.asking.questions.asked and decode.url("a") != "http://own"


@pytest.mark.parametrize("says", ["answer", "look-up"])
@pytest.mark.parametrize("outcome", [DEAD, BUSY], ids=["dead", "busy"])
@pytest.mark.parametrize("policy", [{"is_required": True, "recomputes": False}, {}], ids=["required", "computes"])
def test_one_that_was_this_engine_itself_is_asked_again(policy: dict[str, bool], outcome: Outcome, says: str) -> None:
    """What balances connections has this server and others behind it. Then the server beside it goes away."""
    decode = Decode("http://service", "http://p", num_free=10_000, **policy)  # type: ignore[arg-type]
    service = decode.by_url("http://service")
    itself = {**ANSWER, "remote_engine_id": decode.asking.questions._own_engine_id}
    decode.by_url("http://p").asked[10**6] = 4096, 0.0
    if says == "look-up":
        decode.asker.says = {"http://service": itself}
        decode.arrives("first", num_prompt_tokens=16 * BLOCK)
    else:
        decode.arrives("first")
        decode.answers("first", itself)
    assert decode.url("first") == "http://p" and service.is_own
    decode.answers("first", outcome)
    served = []
    for place in range(40):
        decode.arrives(f"r{place}")
        for number, wanted in [*decode.asking.questions.asked.items()]:
            is_away = wanted.tried[-1] is not service
            served += [] if is_away else [wanted.request.request_id]
            decode.asker.answers.append((number, outcome if is_away else itself if len(served) % 10 == 9 else ANSWER))
        decode.turn()
        decode.asking.computed([Step(one, 16 * BLOCK) for one in served])  # type: ignore[misc]
        decode.clock.advance(3)
    assert len(served) > 20 and "r39" in served


@pytest.mark.parametrize("adapter", ["", "known"])
@pytest.mark.parametrize("recomputes", [True, False], ids=["recompute", "fail"])
def test_a_prompt_that_is_refused_does_not_wait_for_a_busy_server(adapter: str, recomputes: bool) -> None:
    """Its adapter is there: it is too long, and would be refused again."""
    decode = Decode("http://p1", "http://p2", recomputes=recomputes, num_free=10_000)
    decode.asking.servers.failed(decode.by_url("http://p2"), BUSY)
    decode.arrives("a", adapter=adapter)
    decode.answers("a", TOO_LONG)
    assert "a" in decode.fetching.refused


def test_a_grammar_that_is_compiled_is_no_wait_for_a_server() -> None:
    decode = Decode("http://p1", num_free=10_000, queue_seconds=5.0)
    decode.arrives("a", awaits_grammar=True)
    decode.clock.advance(60)
    decode.turn()
    assert "a" not in decode.fetching.refused
    decode.blocks.requests["a"].awaits_grammar = False
    decode.clock.advance(GRAMMAR_SECONDS)
    decode.turn()
    assert decode.is_asked("a")


OF_DECODE = {"revoked", "quarantine", "no_blocks", "media", "queue_timeout"}


@pytest.mark.parametrize("cause", [*FailureCause], ids=lambda one: one.label)
def test_a_server_that_answers_and_whose_kv_never_comes_is_asked_less(cause: FailureCause) -> None:
    """It answers at once, so it seems to have nothing to do. For what is decode's own it does not pay."""
    decode = Decode("http://bad", "http://good", num_free=10_000)
    asked = [fails(decode, f"r{place}", cause) for place in range(40)]
    assert not decode.by_url("http://bad").num_failures if cause.label in OF_DECODE else sum(asked) <= 5


@pytest.mark.parametrize("is_dead", [False, True])
def test_servers_do_not_pay_for_decode_that_was_suspended(is_dead: bool) -> None:
    """For longer than ``handover_timeout``, with several hand-overs of each under way: all are late at once."""
    decode = Decode("http://p1", "http://p2", recomputes=False, num_free=10_000)
    for place in range(10):
        decode.arrives(f"r{place}")
    for place in range(10):
        decode.answers(f"r{place}")
    decode.clock.advance(SILENCE_SECONDS + 1)
    for place in range(10):
        decode.fetching.failures[f"r{place}"] = HandOverFailed(FailureCause.DEADLINE, "late")
        decode.asking.holds_again(decode.blocks.requests[f"r{place}"])  # type: ignore[arg-type]
    if is_dead:
        decode.asking.servers.failed(decode.by_url("http://p1"), DEAD)
    decode.turn()
    assert [one.num_failures for one in map(decode.by_url, ("http://p1", "http://p2"))] == [2 if is_dead else 1, 1]
    assert {one.url for one in decode.asking.servers.all if not decode.asking.servers.rests(one)} == (
        {"http://p2"} if is_dead else {"http://p1", "http://p2"}
    )


def fails(decode: Decode, name: str, cause: FailureCause) -> bool:
    """Whether the server whose KV does not come was asked for a prompt."""
    decode.arrives(name)
    decode.answers(name)
    is_bad = decode.url(name) == "http://bad"
    if is_bad:
        decode.fetching.failures[name] = HandOverFailed(cause, "it did not come")
        assert decode.asking.holds_again(decode.blocks.requests[name])  # type: ignore[arg-type]
        decode.turn()
    decode.asking.gone(name)
    return is_bad


WELL = Outcome("")
"""Of a server that has failed for nobody."""


@pytest.mark.parametrize(
    ("recomputes", "other", "expected"),
    [
        (True, None, "computed"),
        (True, WELL, "http://p2"),
        (True, BUSY, "waits"),
        (True, DEAD, "computed"),
        (False, None, "http://p1"),
        (False, WELL, "http://p2"),
        (False, BUSY, "waits"),
        (False, DEAD, "http://p1"),
    ],
)
@pytest.mark.parametrize("is_answered", [False, True], ids=["asked", "fetched"])
def test_one_prompt_shows_whether_a_server_serves_again(
    recomputes: bool, other: Outcome | None, expected: str, is_answered: bool
) -> None:
    """Others need not wait for that, unless a server that is only busy has KV for them."""
    decode = Decode("http://p1", *(["http://p2"] if other else []), recomputes=recomputes, num_free=10_000)
    servers, second = decode.asking.servers, decode.asking.servers.all[1:]
    servers.failed(decode.by_url("http://p1"), DEAD)
    for one in second:
        one.asked[10**6] = 4096, 0.0
    decode.clock.advance(1)
    decode.arrives("trial")
    assert decode.url("trial") == "http://p1"
    if is_answered:
        decode.answers("trial")
    if other in (BUSY, DEAD):
        servers.failed(decode.by_url("http://p2"), other)
    decode.arrives("a")
    found = "computed" if "a" in decode.fetching.refused else decode.url("a") if decode.is_asked("a") else "waits"
    assert found == expected
    if not is_answered:
        decode.answers("trial")
    decode.asking.computed([Step("trial")])  # type: ignore[list-item]
    decode.arrives("b")
    assert decode.url("b") == "http://p1"
    assert decode.is_asked("a") or expected == "computed", "it waits no longer"


@pytest.mark.parametrize("is_answered", [False, True], ids=["its answer is lost", "decode does not begin it"])
@pytest.mark.parametrize("adapter", ["", "new"])
def test_a_trial_ends_after_a_time_limit(adapter: str, is_answered: bool) -> None:
    """Else all others would be computed here, or wait for it if they need what only it and one that is busy have."""
    urls = ("http://p1", "http://p2", "http://p3") if adapter else ("http://p1",)
    decode = Decode(*urls, recomputes=not adapter, goes_by_priority=True, num_free=10_000)
    if adapter:
        decode.by_url("http://p2").asked[10**6] = 4096, 0.0
        decode.asking.servers.failed(decode.by_url("http://p3"), LONG_BUSY)
    decode.asking.servers.failed(decode.by_url("http://p1"), DEAD)
    decode.clock.advance(1)
    decode.arrives("trial", priority=5)
    until_seconds = decode.clock.now_seconds() + SILENCE_SECONDS
    if is_answered:
        decode.answers("trial")
    decode.arrives("a", adapter=adapter)
    if adapter:
        decode.answers("a", MISSING)
        decode.by_url("http://p2").asked.clear()
        assert decode.url("a") == "http://p2" and decode.asking.due_at_seconds == until_seconds
    else:
        assert not decode.is_asked("a") and "a" in decode.fetching.refused
    decode.clock.advance(SILENCE_SECONDS)
    assert decode.asking.has_news is bool(adapter)
    decode.turn()
    if not adapter:
        decode.arrives("b")
        decode.arrives("c")
    assert decode.url("b" if not adapter else "a") == "http://p1" and not decode.is_asked("c")


# ------------------------------------------------------- sequences that once ended badly, or in a look at all that wait


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


@pytest.mark.parametrize("policy", [{}, {"recomputes": False}, {"recomputes": False, "is_required": True}], ids=str)
@pytest.mark.parametrize("pushes", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("num_asked_between", [3, 60], ids=["others are served", "nobody for long"])
def test_a_prompt_that_costs_servers_behind_a_balancer_is_not_asked_for_again(
    num_asked_between: int, pushes: bool, policy: dict[str, bool]
) -> None:
    """Until the next one is there, the balancer says that none is; after long that does not count as busy."""
    decode = Decode("http://envoy", pushes=pushes, num_free=10_000, **policy)  # type: ignore[arg-type]
    decode.asking.servers.heard(decode.by_url("http://envoy"), engine_in(OF_P))
    decode.arrives("a")
    num_lost = num_asked = 0
    for _ in range(1000):
        if "a" in decode.fetching.refused:
            break
        if decode.number("a") > num_asked:
            num_asked, is_lost = decode.number("a"), num_asked % num_asked_between == 0
            num_lost += is_lost
            reason = "reset reason: connection termination" if is_lost else "no healthy upstream"
            with pytest.raises(AskFailed) as failed:
                read_answer(503, {}, reason.encode())
            decode.answers("a", failed.value.outcome)
            if num_asked_between < 60:
                decode.asking.servers.answered(decode.by_url("http://envoy"), 0)
        decode.asking.holds_again(decode.blocks.requests["a"])  # type: ignore[arg-type]
        decode.fetching.failures.clear()
        decode.clock.advance(31)
        decode.turn()
    assert "a" in decode.fetching.refused and num_lost <= 3


def of_status(status: int, headers: Mapping[str, str] = MappingProxyType({})) -> Outcome:
    with pytest.raises(AskFailed) as failed:
        read_answer(status, headers, b"")
    return failed.value.outcome


@pytest.mark.parametrize("policy", [{}, {"recomputes": False}, {"recomputes": False, "is_required": True}], ids=str)
@pytest.mark.parametrize("status", [204, 307, *range(400, 432), 451, 500, 501, 502, 503, 504])
def test_a_status_that_one_prompt_always_gets_ends_it(status: int, policy: dict[str, bool]) -> None:
    """Others are served meanwhile. They do not wait for what may be of this prompt: 408 after 60 s of its body, 431 for
    its client's ``tracestate``, 403 of a firewall that does not like its text. 408 and 425 are worth another try."""
    decode, num_asked, waited = Decode("http://p1", num_free=10_000, **policy), 0, 0  # type: ignore[arg-type]
    decode.arrives("a")
    for place in range(60):
        if "a" in decode.fetching.refused:
            break
        if decode.number("a") in decode.asking.questions.asked:
            num_asked += 1
            decode.answers("a", of_status(status))
        other = f"r{place}"
        decode.arrives(other)
        waited += not decode.is_asked(other)
        decode.clock.advance(31)
        decode.turn()
        if decode.is_asked(other):
            decode.answers(other)
            decode.asking.computed([Step(other)])  # type: ignore[list-item]
        decode.asking.gone(other)
        decode.turn()
    assert "a" in decode.fetching.refused
    assert status in (429, 503) or (2 if status in (408, 425) else 1) <= num_asked <= 4
    assert not waited or status in (204, 307, 401, 405, 407, 429, 503)


@pytest.mark.parametrize("are_others_served", [True, False])
def test_kv_of_one_prompt_that_never_comes_ends_it(are_others_served: bool) -> None:
    """Its server answers, and cannot be reached by NIXL. If that is so for all, they wait."""
    decode = Decode("http://p1", recomputes=False, is_required=True, num_free=10_000)
    decode.arrives("a")
    num_asked = 0
    for _ in range(20):
        if decode.number("a") in decode.asking.questions.asked:
            num_asked += 1
            decode.answers("a")
            decode.fetching.failures["a"] = HandOverFailed(FailureCause.UNREACHABLE, "refused")
            decode.asking.holds_again(decode.blocks.requests["a"])  # type: ignore[arg-type]
        decode.clock.advance(31)
        if are_others_served:
            decode.asking.servers.served(decode.asking.servers.all[0], decode.clock.now_seconds())
        decode.clock.advance(1)
        decode.turn()
    assert num_asked == (4 if are_others_served else 20)


def test_prompts_wait_for_a_server_that_fails_for_all() -> None:
    """A gateway whose key is changed answers 401 for a while."""
    decode = Decode("http://p1", recomputes=False, is_required=True, num_free=10_000)
    names = [f"r{number}" for number in range(8)]
    for one in names:
        decode.arrives(one)
    for _ in range(200):
        for one in names:
            if decode.number(one) in decode.asking.questions.asked:
                decode.answers(one, of_status(401))
        decode.clock.advance(0.25)
        decode.turn()
    assert not decode.fetching.refused


@pytest.mark.parametrize("headers", [None, {ROLE_HEADER: "decode"}], ids=["gone", "role"])
def test_prompts_wait_for_a_server_that_takes_none_and_whose_kv_is_still_fetched(
    headers: dict[str, str] | None,
) -> None:
    """It drains, or has another role now. What it had answered before says nothing of what it would answer."""
    outcome = DEAD if headers is None else of_status(503, headers)
    decode = Decode("http://p1", recomputes=False, is_required=True, num_free=10_000)
    for number in range(8):
        decode.arrives(f"old{number}")
        decode.answers(f"old{number}")
    for number in range(20):
        decode.arrives(f"new{number}")
    for turn in range(100):
        for number in list(decode.asking.questions.asked):
            decode.asker.answers.append((number, outcome))
        if turn % 5 == 0 and turn < 40:
            decode.asking.computed([Step(f"old{turn // 5}")])  # type: ignore[list-item]
        decode.clock.advance(0.1)
        decode.turn()
    assert not decode.fetching.refused


def test_a_prompt_with_whose_transfer_servers_end_is_not_asked_for_without_an_end() -> None:
    decode = Decode("http://p1", recomputes=False, is_required=True, num_free=10_000)
    decode.arrives("a")
    num_asked = 0
    for _ in range(20):
        if decode.number("a") in decode.asking.questions.asked:
            num_asked += 1
            decode.answers("a")
            decode.fetching.failures["a"] = HandOverFailed(FailureCause.LOST, "its process has ended")
            decode.asking.holds_again(decode.blocks.requests["a"])  # type: ignore[arg-type]
        decode.clock.advance(31)
        decode.turn()
    assert num_asked == 3


def test_a_prompt_for_which_servers_are_busy_ends_however_long_each_takes_to_say_so() -> None:
    """A balancer that queues. Others are served meanwhile."""
    decode = Decode("http://p1", recomputes=False, num_free=10_000)
    decode.arrives("a")
    for number in range(50):
        decode.clock.advance(LONGEST_RETRY_SECONDS + SILENCE_SECONDS + 5)
        decode.arrives(f"r{number}")
        if decode.is_asked(f"r{number}"):
            decode.answers(f"r{number}")
            decode.asking.computed([Step(f"r{number}")])  # type: ignore[list-item]
            decode.asking.gone(f"r{number}")
        if decode.number("a") in decode.asking.questions.asked:
            decode.answers("a", of_status(503))
        decode.clock.advance(1)
        decode.turn()
    assert "a" in decode.fetching.refused


def test_a_prompt_that_meets_a_busy_server_now_and_then_waits() -> None:
    """Decode was paused in between, or had no blocks."""
    decode = Decode("http://p1", recomputes=False, num_free=10_000)
    decode.arrives("a")
    for _ in range(5):
        decode.answers("a", of_status(503))
        decode.clock.advance(1300)
        decode.turn()
        assert decode.is_asked("a")
    assert not decode.fetching.refused


def test_engines_that_are_not_there_any_more_are_not_lost_with_a_prompt() -> None:
    """In push, after a rolling restart of all servers: decode has named an engine that had gone before the question."""
    decode = Decode(*(f"http://p{number}" for number in range(6)), pushes=True, recomputes=False, num_free=10_000)
    for server in decode.asking.servers.all:
        decode.asking.servers.heard(server, engine_in(OF_P))
    decode.arrives("a")
    wanted = decode.asking._wanted["a"]
    for _ in range(12):
        if wanted.named is None:
            decode.answers("a", BUSY)
        else:
            decode.fetching.failures["a"] = HandOverFailed(FailureCause.UNREACHABLE, "nobody listens there")
            assert decode.asking.holds_again(decode.blocks.requests["a"])  # type: ignore[arg-type]
            decode.fetching.failures.clear()
            decode.turn()
        if not decode.is_asked("a"):
            break
    assert wanted.num_lost == 0 and "a" not in decode.fetching.refused


@pytest.mark.parametrize("cause", [FailureCause.LOST, FailureCause.RESTARTED], ids=lambda one: one.label)
def test_a_prompt_that_costs_three_servers_is_not_asked_for_again_if_their_side_channels_say_so(
    cause: FailureCause,
) -> None:
    """In push, before the connection of its question ends. Others are served meanwhile, so that each is known."""
    decode = Decode("http://p1", pushes=True, recomputes=False, is_required=True, num_free=10_000)
    server = decode.by_url("http://p1")
    for _ in range(10):
        if "a" in decode.fetching.refused:
            break
        decode.asking.servers.heard(server, engine_in(OF_P))
        if not decode.is_asked("a"):
            decode.arrives("a")
        else:
            decode.turn()
        if decode.asking._wanted["a"].named is None:
            decode.answers("a", KILLED)
        else:
            decode.fetching.failures["a"] = HandOverFailed(cause, "lost")
            if not decode.asking.holds_again(decode.blocks.requests["a"]):  # type: ignore[arg-type]
                break
        decode.clock.advance(60)
    assert len(decode.asker.asked) == 3


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
