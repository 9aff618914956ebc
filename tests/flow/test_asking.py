# SPDX-License-Identifier: Apache-2.0
"""Decode asks prefill for the KV of its prompts: whole requests, step by step."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from support.flow_asking import DIRECTIONS, OTHER, POLICIES, PULL, PUSH, Asks, is_fetched
from support.flow_cluster import LEASE_SECONDS, TIMEOUT_SECONDS
from support.flow_engine import Request, Status
from support.flow_pair import BLOCKS_EACH, PROMPT, is_computed, kind, prompt

from kvcached_nixl.wire.question import Outcome

# ------------------------------------------------------------------------------------------------- one that goes well


@DIRECTIONS
@POLICIES
def test_an_answer_is_used(mode: str, recomputes: bool) -> None:
    pair = Asks(mode, recomputes=recomputes)
    found = [pair.arrives(prompt(seed)) for seed in range(4)]
    pair.compute()
    assert len(pair.decode.held) == (3 if pair.is_at_once else 4)
    for one in reversed(pair.asked):
        one.deliver()
    pair.settle()
    assert all(map(is_fetched, found)) and not pair.causes()
    pair.nothing_is_left(LEASE_SECONDS)


@DIRECTIONS
def test_what_prefill_had_cached_is_told(mode: str) -> None:
    """In push, if its answer comes before the first token: most often with the KV."""
    pair = Asks(mode)
    prefix = PROMPT[:16]
    pair.prefill.add(Request("alone", prefix))
    pair.compute()
    found = pair.arrives()
    pair.answers()
    pair.serve()
    assert is_fetched(found) and found.told_cached == len(prefix)
    pair.nothing_is_left(LEASE_SECONDS)


def test_a_prompt_that_is_cached_here_is_computed_here() -> None:
    pair = Asks(PULL)
    first = pair.arrives()
    pair.serve()
    found = pair.arrives((*PROMPT[:16], 7, 7))
    pair.settle()
    assert is_fetched(first) and is_computed(found) and not pair.causes()


@DIRECTIONS
@pytest.mark.parametrize("accepts_params", [False, True], ids=["refused", "accepted"])
@pytest.mark.parametrize("said", [True, [], {}, ""], ids=repr)
def test_what_a_client_names_is_not_used_unless_it_may_be(mode: str, accepts_params: bool, said: Any) -> None:
    """Whatever the type: servers that are well would pay for it."""
    pair = Asks(mode, accepts_params=accepts_params)
    found = pair.ask_decode(pair.meet(remote_host="nowhere", do_remote_prefill=said))
    pair.decode.handover.ask()
    assert bool(pair.asked) is not accepts_params
    pair.serve()
    assert is_fetched(found) is not accepts_params
    assert not any(one.num_failures for one in pair.decode.handover.asking.servers.all)


def test_what_the_next_server_keeps_is_renewed() -> None:
    """Push, with engines that are known: the first one dies when decode has gone on. In one step decode ends its lease,
    and begins the next one's; then it has no room for longer than a lease."""
    pair = Asks(PUSH, "q", recomputes=False)
    pair.cluster.answers_at_once = True
    for seed in range(4):
        pair.arrives(prompt(seed))
        pair.settle()
    pair.cluster.answers_at_once = False
    found = pair.arrives(prompt(9))
    first = pair.of(found)
    pair.decode.step()
    pair.cluster.kill(first.server)
    first.deliver()
    while first in pair.asked or not pair.asked:
        pair.decode.step()
    assert found.status is Status.WAITING and found.request_id not in pair.decode.held
    pair.decode.admits, pair.cluster.answers_at_once = False, True
    pair.pass_time(3 * LEASE_SECONDS)
    pair.decode.admits = True
    pair.settle()
    assert is_fetched(found)


# ------------------------------------------------------------------------------------------------------ equal prompts


def stage_asked(pair: Asks, request: Request) -> None:
    """Prefill has not begun."""


def stage_computed(pair: Asks, request: Request) -> None:
    """The answer is under way."""
    pair.compute()


def stage_answered(pair: Asks, request: Request) -> None:
    """It waits for its turn."""
    pair.decode.admits = False
    pair.answers()
    assert not pair.decode.held.get(request.request_id)


def stage_moving(pair: Asks, request: Request) -> None:
    pair.answers()
    pair.until_posted()
    assert request.status is Status.REMOTE


def stage_come(pair: Asks, request: Request) -> None:
    """Its KV is here, and it is not computed yet."""
    pair.answers()
    pair.until(request, Status.REMOTE)
    pair.decode.admits = False
    pair.settle()
    assert request.status is Status.REMOTE and not pair.transfers


def stage_running(pair: Asks, request: Request) -> None:
    pair.answers()
    while request.status is not Status.RUNNING:
        pair.wire.deliver_all()
        pair.round()


STAGES = pytest.mark.parametrize(
    "stage",
    [stage_asked, stage_computed, stage_answered, stage_moving, stage_come, stage_running],
    ids=lambda one: one.__name__[6:],
)


@DIRECTIONS
def test_equal_prompts_are_asked_for_once(mode: str) -> None:
    pair = Asks(mode)
    found = [pair.arrives() for _ in range(4)]
    assert len(pair.asked) == 1
    pair.answers()
    pair.settle()
    assert not pair.asked and is_fetched(found[0]) and all(map(is_computed, found[1:]))
    assert not pair.causes()
    pair.nothing_is_left(LEASE_SECONDS)


# --------------------------------------------------------------------------------------------------- clients that leave


@DIRECTIONS
@STAGES
@POLICIES
@pytest.mark.parametrize("num_equal", [0, 2])
def test_a_client_that_leaves_leaves_nothing(
    mode: str, stage: Callable[[Asks, Request], None], recomputes: bool, num_equal: int
) -> None:
    """Those with an equal prompt are served."""
    pair = Asks(mode, recomputes=recomputes)
    first = pair.arrives()
    found = [pair.arrives() for _ in range(num_equal)]
    stage(pair, first)
    pair.decode.abort(first)
    assert first.status is Status.ABORTED and (found or not pair.asked)
    pair.decode.admits = True
    if found:
        pair.serve()
    pair.nothing_is_left(2 * LEASE_SECONDS)
    assert all(one.status is Status.STOPPED for one in found) and not pair.causes()


@DIRECTIONS
def test_what_is_answered_for_a_client_that_left_is_not_kept_for_a_lease(mode: str) -> None:
    pair = Asks(mode)
    found = pair.arrives()
    pair.settle()
    pair.asked[0].deliver()
    pair.decode.abort(found)
    pair.settle()
    assert not pair.prefill.requests
    pair.nothing_is_left(LEASE_SECONDS)


# ----------------------------------------------------------------------------------------------------- servers that die


@DIRECTIONS
@STAGES
@POLICIES
@pytest.mark.parametrize("then", ["nothing else", "it restarts", "there is another one"])
def test_a_server_dies(mode: str, stage: Callable[[Asks, Request], None], recomputes: bool, then: str) -> None:
    is_alone, restarts = then != "there is another one", then == "it restarts"
    pair = Asks(mode, *(() if is_alone else ("q",)), recomputes=recomputes)
    found = pair.arrives()
    server = pair.asked[0].server
    stage(pair, found)
    if restarts:
        pair.prefill = pair.cluster.restart(pair.prefill)
    else:
        pair.cluster.kill(server)
    pair.decode.admits = True
    pair.serve()
    pair.pass_time(TIMEOUT_SECONDS)
    came = stage in (stage_come, stage_running)
    assert found.status is (Status.STOPPED if recomputes or came or then != "nothing else" else Status.ERROR)
    assert is_alone or is_fetched(found)
    if restarts:
        assert recomputes or found.num_external, "it is waited for"
        again = pair.arrives(prompt(1))
        pair.settle()
        assert is_fetched(again), "it is asked again"


# ------------------------------------------------------------------------------------------------------- wrong answers

GARBAGE = [
    {},
    {"do_remote_decode": True},
    {"do_remote_prefill": True},
    {"do_remote_prefill": 1},
    {"do_remote_prefill": True, "do_remote_decode": True},
    {"do_remote_prefill": True, "remote_engine_id": 3, "remote_host": [], "remote_port": -1},
    {"do_remote_prefill": True, "remote_engine_id": "d", "remote_host": "host-d", "remote_port": 5600},
    None,
]


@DIRECTIONS
@pytest.mark.parametrize("said", GARBAGE, ids=str)
@pytest.mark.parametrize("others", [(), ("q",)], ids=["alone", "two"])
def test_garbage(mode: str, said: Any, others: tuple[str, ...]) -> None:
    pair = Asks(mode, *others)
    found = pair.arrives()
    pair.compute()
    pair.asked[0].say(said)
    pair.serve()
    pair.pass_time(TIMEOUT_SECONDS)
    assert is_fetched(found), "another server is asked, or the same one if there is no other"


@DIRECTIONS
@POLICIES
@pytest.mark.parametrize("others", [(), ("q",)], ids=["alone", "two"])
@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
def test_parameters_of_another_prompt(mode: str, recomputes: bool, others: tuple[str, ...], leaves: bool) -> None:
    """They are refused, and what they name is not kept for ever."""
    pair = Asks(mode, *others, recomputes=recomputes)
    first, second = pair.arrives(), pair.arrives(prompt(1))
    pair.compute()
    of_first, of_second = pair.of(first), pair.of(second)
    of_first.say(copy.deepcopy(of_second.request.answer))
    pair.settle()
    of_second.deliver()
    pair.settle()
    if leaves:
        pair.decode.abort(first)
    pair.serve()
    pair.pass_time(TIMEOUT_SECONDS)
    assert is_fetched(second) and (leaves or is_fetched(first))


# --------------------------------------------------------------------------------------------------------- busy servers

BUSY = Outcome("HTTP 503", is_of_server=True, is_busy=True, retry_after_seconds=10.0)


@DIRECTIONS
def test_a_busy_server_is_waited_for_and_the_client_may_leave_meanwhile(mode: str) -> None:
    pair = Asks(mode)
    first, second = pair.arrives(), pair.arrives(prompt(1))
    for one in list(pair.asked):
        one.ends(BUSY)
    pair.settle()
    pair.decode.abort(first)
    pair.pass_time(15.0)
    pair.serve()
    assert is_fetched(second) and not pair.causes()


@DIRECTIONS
@POLICIES
@pytest.mark.parametrize(
    "stage", [stage_asked, stage_computed, stage_answered, stage_moving], ids=lambda one: one.__name__[6:]
)
@pytest.mark.parametrize("restarts", [False, True])
def test_where_prefill_is_required_a_request_waits_for_one_that_lives(
    mode: str, stage: Callable[[Asks, Request], None], recomputes: bool, restarts: bool
) -> None:
    pair = Asks(mode, recomputes=recomputes, is_required=True)
    found = pair.arrives()
    stage(pair, found)
    name = pair.prefill.own.engine_id
    pair.cluster.kill(pair.prefill)
    if restarts:
        pair.prefill = pair.cluster.engine(name)
    pair.decode.admits = True
    pair.serve()
    pair.pass_time(TIMEOUT_SECONDS)
    if not restarts:
        assert found.status is Status.WAITING
        pair.prefill = pair.cluster.engine(name)
    pair.pass_time(TIMEOUT_SECONDS)
    assert is_fetched(found)


# ------------------------------------------------------------------------------------------- those that wait too long

QUEUE_SECONDS = 20.0
"""Less than a lease."""


@DIRECTIONS
@POLICIES
@pytest.mark.parametrize("is_required", [False, True])
def test_one_that_waits_too_long_to_be_asked_for_is_refused(mode: str, recomputes: bool, is_required: bool) -> None:
    """Whatever the policy says. One that was asked for waits as long as it takes, and so do its equals: a request with
    ``n`` fails if one of its choices does."""
    pair = Asks(mode, recomputes=recomputes, is_required=is_required, queue_seconds=QUEUE_SECONDS)
    asked = [pair.arrives()] if mode is PULL else []
    busy = pair.arrives(prompt(3))
    pair.of(busy).ends(msgspec.structs.replace(BUSY, retry_after_seconds=1.2 * QUEUE_SECONDS))
    pair.decode.handover.ask()
    late = [busy, pair.arrives(prompt(1)), pair.arrives(prompt(1))]
    asked += [pair.arrives() for _ in asked]
    pair.settle()
    assert pair.decode.handover.due_in_seconds == pytest.approx(QUEUE_SECONDS), "nothing else wakes the engine"
    pair.pass_time(QUEUE_SECONDS / 2)
    later = pair.arrives(prompt(2))
    pair.pass_time(QUEUE_SECONDS / 2 + 1)
    assert {one.status for one in late} == {Status.ERROR} and later.status is Status.WAITING
    assert all(one.status is Status.WAITING for one in asked)
    assert pair.causes()["queue_timeout"] == len(late)
    pair.serve()
    pair.pass_time(QUEUE_SECONDS)
    assert all(map(is_fetched, (*asked[:1], later))) and all(map(is_computed, asked[1:]))


def test_one_that_waits_for_busy_servers_is_refused_and_says_when_to_try_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = Asks(PULL, queue_seconds=30.0)
    found = pair.arrives()
    for _ in range(2):
        pair.of(found).ends(BUSY)
        pair.settle()
        pair.pass_time(11.0)
    pair.pass_time(10 * QUEUE_SECONDS)
    assert found.status is Status.WAITING, "it is asked for now"
    pair.of(found).ends(BUSY)
    pair.pass_time(11.0)
    assert found.status is Status.ERROR and "cause=queue_timeout retry_after=" in caplog.text
    pair.nothing_is_left(LEASE_SECONDS)


# ----------------------------------------------------------------------------------------------- queues, memory, pauses


@DIRECTIONS
@POLICIES
def test_by_priority(mode: str, recomputes: bool) -> None:
    """One that is asked for again, too."""
    pair = Asks(mode, "q", recomputes=recomputes, goes_by_priority=True, num_blocks=1 + BLOCKS_EACH + 1)
    first = pair.arrives(prompt(1), priority=5)
    assert pair.of(first)
    later = [pair.arrives(prompt(2 + place), priority=priority) for place, priority in enumerate((9, 0))]
    assert len(pair.asked) == 1, "there is room for one"
    pair.answers()
    pair.until_posted()
    assert pair.of(later[1]), "the urgent one"
    pair.cluster.kill(pair.prefill if pair.prefill.requests else pair.others[0])
    pair.serve()
    pair.pass_time(TIMEOUT_SECONDS)
    assert all(map(is_fetched, (first, *later)))


@DIRECTIONS
def test_a_paused_engine_starts_nothing_and_goes_on(mode: str) -> None:
    pair = Asks(mode)
    found = [pair.arrives(prompt(1))]
    pair.decode.is_paused = True
    found.append(pair.arrives(prompt(2)))
    pair.answers()
    pair.pass_time(2 * LEASE_SECONDS)
    assert len(pair.decode.held) == 1 and [one.status for one in found] == [Status.WAITING] * 2
    pair.decode.is_paused = False
    pair.serve()
    assert all(map(is_fetched, found)) and not pair.causes()
    pair.nothing_is_left(LEASE_SECONDS)


@DIRECTIONS
@POLICIES
def test_a_request_without_any_room_ends(mode: str, recomputes: bool) -> None:
    pair = Asks(mode, recomputes=recomputes, allocation_seconds=20.0)
    pair.decode.pool.limit_blocks = BLOCKS_EACH - 1
    pair.decode.pool.apply_limit()
    found = [pair.arrives(prompt(seed)) for seed in range(3)]
    pair.cluster.answers_at_once = True
    pair.pass_time(200.0)
    assert all(one.status is Status.ERROR for one in found) and pair.causes() == {"no_blocks": 3}
    pair.decode.pool.limit_blocks = None


@DIRECTIONS
@STAGES
@pytest.mark.parametrize(
    ("who", "kind_of_change"),
    [*itertools.product(["p", "d", "both"], ["told", "untold"]), ("both", "adapter")],
    ids="-".join,
)
def test_weights_or_an_adapter_change(
    mode: str, stage: Callable[[Asks, Request], None], who: str, kind_of_change: str
) -> None:
    """Whatever the stage, the bytes are those of the weights that decode has."""
    pair = Asks(mode)
    adapter = int(kind_of_change == "adapter")
    found = pair.arrives(max_tokens=8, adapter=adapter)
    stage(pair, found)
    for name, engine in (("p", pair.prefill), ("d", pair.decode)):
        if adapter:
            engine.load_again(adapter)
        elif who in (name, "both"):
            engine.update(OTHER, is_known=kind_of_change == "told")
    pair.decode.admits = True
    pair.serve()
    pair.pass_time(TIMEOUT_SECONDS)
    assert found.status is Status.STOPPED
    again = pair.arrives(prompt(1), adapter=adapter)
    pair.pass_time(TIMEOUT_SECONDS)
    assert is_fetched(again) if who == "both" else is_computed(again)


@DIRECTIONS
def test_a_prefill_of_another_model_is_asked_in_vain(mode: str) -> None:
    pair = Asks(mode, "q", recomputes=False)
    pair.prefill.update(OTHER)
    pair.cluster.answers_at_once = True
    found = [pair.arrives(prompt(seed)) for seed in range(4)]
    pair.pass_time(TIMEOUT_SECONDS)
    assert all(map(is_fetched, found)) and "refused" in pair.causes()


@DIRECTIONS
@POLICIES
@pytest.mark.parametrize("num_blocks", [100, pytest.param(3 * BLOCKS_EACH, marks=pytest.mark.long), BLOCKS_EACH + 2])
def test_two_that_ask_each_other(mode: str, recomputes: bool, num_blocks: int) -> None:
    pair = Asks(mode)
    room = {"num_blocks": num_blocks, "recomputes": recomputes, "is_asked": True}
    one, two = (pair.cluster.engine(name, kind(asks=(other,), **room)) for name, other in ("xy", "yx"))
    found = [pair.arrives(prompt(seed), engine=(one, two)[seed % 2]) for seed in range(12)]
    pair.cluster.answers_at_once = True
    pair.pass_time(0.0 if num_blocks == 100 else 10 * TIMEOUT_SECONDS)
    assert all(one.status.is_finished for one in found)
    assert num_blocks < 100 or (all(map(is_fetched, found)) and not pair.causes())


@DIRECTIONS
def test_a_client_of_decode_keeps_no_blocks_there(mode: str) -> None:
    """It sends what a decode server sends to prefill."""
    pair = Asks(mode)
    pair.cluster.answers_at_once = True
    found = [pair.ask_decode({"do_remote_decode": True}, prompt(seed)) for seed in range(4)]
    pair.settle()
    assert all(map(is_computed, found)) and not pair.decode.handover.offering.kept.num_kept


def test_a_full_decode_engine_costs_another_one_nothing() -> None:
    """Push. It leaves as much KV waiting as a step of prefill computes. The other one registers for a prompt at once,
    and for others only after the answer, because prefill has something to compute then."""
    pair = Asks(PUSH, num_blocks=40)
    object.__setattr__(pair.prefill.handover.engine.stock, "max_num_batched_tokens", len(PROMPT))
    other = pair.cluster.engine("b", kind(asks=("p",), num_blocks=40))
    pair.cluster.answers_at_once = True
    known = pair.ask_decode(None, prompt(20), engine=other)
    left = [pair.arrives(prompt(seed)) for seed in (1, 2)]
    pair.decode.admits = False
    pair.pass_time(5.0)
    assert is_fetched(known) and pair.prefill.handover.offering.kept.is_left_waiting
    begun = pair.clock.now_seconds()
    found = [pair.ask_decode(None, prompt(3), engine=other)]
    other.handover.ask()
    while not pair.prefill.workers[0].registry.writer.tasks:
        pair.round()
    found += [pair.ask_decode(None, prompt(seed), engine=other) for seed in (4, 5)]
    other.handover.ask()
    while not all(one.status.is_finished for one in found):
        pair.pass_time(1.0)
    assert all(map(is_fetched, found)) and pair.clock.now_seconds() < begun + 10
    assert not any(one.status.is_finished for one in left)
    pair.decode.admits = True


@DIRECTIONS
def test_a_server_that_vanishes_is_given_up(mode: str) -> None:
    pair = Asks(mode, "q")
    found = [pair.arrives(prompt(seed)) for seed in range(4)]
    pair.cluster.vanish(pair.prefill)
    pair.cluster.answers_at_once = True
    pair.pass_time(2 * TIMEOUT_SECONDS)
    assert all(map(is_fetched, found)) and not pair.asked
    pair.cluster.come_back(pair.prefill)
