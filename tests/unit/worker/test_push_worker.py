# SPDX-License-Identifier: Apache-2.0
"""worker/push.py: what a step of the scheduler becomes on the writer thread, and what its outcomes become for vLLM."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvcached_nixl.idle import LONGEST_IDLE_STEP_SECONDS, SHORTEST_IDLE_STEP_SECONDS
from kvcached_nixl.ids import DecodeRequestId, EngineId, PrefillRequestId
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.push import Peer
from kvcached_nixl.wire.push_step import BlockIds, Computed, PushStep, Unusable, Wanted, quiet_id
from kvcached_nixl.worker.push import Place, PushWorker
from kvcached_nixl.worker.push_commands import (
    Command,
    Decline,
    Finish,
    Offer,
    Outcome,
    Refuse,
    Register,
    Renew,
    Restart,
    Stop,
    Withdraw,
)
from kvcached_nixl.worker.push_writer import Push

HOST, PORT = "10.0.0.1", 5600
TRANSFER = "transfer:t"
D1, D2 = DecodeRequestId("d1"), DecodeRequestId("d2")
P1, P2, P3 = (PrefillRequestId(name) for name in ("p1", "p2", "p3"))


class Writer:
    """The writer thread, as far as the engine's thread sees it."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.outcome = Outcome()
        self.waited_seconds: list[float] = []
        self.engine_computes = False
        self.is_closed = False

    def submit(self, command: Command) -> None:
        self.commands.append(command)

    def take_outcome(self, wait_seconds: float = 0.0) -> Outcome:
        self.waited_seconds.append(wait_seconds)
        outcome, self.outcome = self.outcome, Outcome()
        return outcome

    def close(self) -> None:
        self.is_closed = True


class Device:
    """Counts the events that are recorded; each is a function of its own."""

    def __init__(self) -> None:
        self.events: list[Callable[[], bool]] = []

    def record(self) -> Callable[[], bool]:
        self.events.append(lambda: False)
        return self.events[-1]


class Worker:
    """A push worker at a place, with its writer thread and its device recorded."""

    def __init__(self, *, ratio: int = 1, tp_size: int = 1, tp_rank: int = 0, is_latent: bool = False) -> None:
        self.writer, self.device = Writer(), Device()
        place = Place(EngineId("e"), tp_size, tp_rank, 4, ratio, is_latent)
        self.push = PushWorker(cast(Push, self.writer), place, self.device.record)

    def takes(self, **step: Any) -> list[Command]:
        """Begin a step; what that makes of it."""
        self.push.begin_step(PushStep(HOST, PORT, **step))
        commands, self.writer.commands = self.writer.commands, []
        return commands


def prefill(tp_size: int = 1) -> RemotePrefill:
    return RemotePrefill("p", "10.0.0.2", 5601, tp_size)


def ranks(tp_size: int, *numbers: int) -> tuple[Peer, ...]:
    return tuple(Peer(EngineId("p"), "10.0.0.2", 5601, tp_size, rank) for rank in numbers)


def wanted(
    request_id: DecodeRequestId = D1, blocks: BlockIds = ([5, 3],), tp_size: int = 1, first_token: int = 8
) -> Wanted:
    return Wanted(request_id, TRANSFER, prefill(tp_size), first_token, 14, blocks)


def of(command: Command) -> Register:
    assert isinstance(command, Register)
    return command


# -------------------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize(
    ("tp_size", "is_latent", "heard"), [(1, False, (0,)), (2, False, (1,)), (4, False, (2, 3)), (4, True, (2, 3))]
)
def test_beats_go_to_every_rank_that_has_something_for_this_one(
    tp_size: int, is_latent: bool, heard: tuple[int, ...]
) -> None:
    worker = Worker(tp_size=2, tp_rank=1, is_latent=is_latent)
    assert worker.takes(beats=[(prefill(tp_size), [P1, P2])]) == [Renew([P1, P2], ranks(tp_size, *heard))]


def test_a_prefill_of_which_nothing_can_come_gets_no_beat() -> None:
    assert Worker(tp_size=2).takes(beats=[(prefill(3), [P1])]) == []


@pytest.mark.parametrize(
    ("ratio", "blocks", "expected"),
    [
        (1, ([5, 3],), ((5, 3),)),
        (2, ([5, 3],), ((10, 11, 6, 7),)),
        (2, ([5], [0, 2]), ((10, 11), (0, 1, 4, 5))),
        (3, ([1],), ((3, 4, 5),)),
    ],
    ids=str,
)
def test_a_registration_names_this_rank_and_the_blocks_as_the_kernel_counts_them(
    ratio: int, blocks: BlockIds, expected: tuple[tuple[int, ...], ...]
) -> None:
    worker = Worker(ratio=ratio, tp_size=2, tp_rank=1)
    (command,) = worker.takes(wanted=[wanted(blocks=blocks)])
    registration = of(command).registration
    assert registration.transfer == TRANSFER
    assert registration.decode_request_id == "d1"
    assert registration.decode == Peer(EngineId("e"), HOST, PORT, 2, 1)
    assert (registration.first_token, registration.end_token, registration.block_size) == (8, 14, 4)
    assert registration.block_ids == expected
    assert of(command).contributors == ranks(1, 0)


def test_every_registration_is_an_attempt_of_its_own() -> None:
    """A request that is asked for again must not meet messages of the earlier one."""
    commands = Worker().takes(wanted=[wanted(D1), wanted(D2)])
    assert len({of(command).registration.attempt for command in commands}) == 2


@pytest.mark.parametrize(
    ("tp_size", "tp_rank", "prefill_size", "is_latent", "writers", "others"),
    [
        (1, 0, 1, False, [0], []),
        (4, 3, 2, False, [1], []),
        (4, 3, 2, True, [1], []),
        (2, 1, 4, False, [2, 3], []),
        (2, 1, 4, True, [2], [3]),
        (1, 0, 4, True, [0], [1, 2, 3]),
    ],
)
def test_it_registers_with_those_that_write_and_tells_the_others_that_they_need_not(
    tp_size: int, tp_rank: int, prefill_size: int, is_latent: bool, writers: list[int], others: list[int]
) -> None:
    """A latent is the same on all ranks of prefill, so one of them is enough."""
    worker = Worker(tp_size=tp_size, tp_rank=tp_rank, is_latent=is_latent)
    register, *declines = worker.takes(wanted=[wanted(tp_size=prefill_size)])
    assert of(register).contributors == ranks(prefill_size, *writers)
    assert declines == ([Decline(TRANSFER, ranks(prefill_size, *others))] if others else [])


def test_all_ranks_of_prefill_are_told_of_a_transfer_that_is_not_needed() -> None:
    assert Worker().takes(unneeded=[(TRANSFER, prefill(3))]) == [Decline(TRANSFER, ranks(3, 0, 1, 2))]


def test_sizes_that_do_not_divide_fail_the_request_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """Not the engine: nothing is raised, the request's blocks are named, and others go on."""
    worker = Worker(tp_size=2)
    commands = worker.takes(wanted=[wanted(D1, ([5, 3],), tp_size=3), wanted(D2, ([6],), tp_size=2)])
    assert [of(command).registration.decode_request_id for command in commands] == ["d2"]
    with caplog.at_level(logging.WARNING, SERVER_LOGGER):
        assert worker.push.take_ended() == (set(), {"d1"}, {"d1"}, {5, 3}, set())
    assert "d1" in caplog.text and "size 3 and decode's 2" in caplog.text
    assert worker.push.take_ended() == (set(), set(), set(), set(), set())
    worker.writer.outcome.received.add(D2)
    assert worker.push.take_ended() == (set(), {"d2"}, set(), set(), set())


def test_a_request_that_nobody_can_fill_fails_once_with_its_blocks(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(ratio=2)
    assert worker.takes(unusable=[Unusable(D1, "no such port", ([5, 3], [9]))]) == []
    with caplog.at_level(logging.WARNING, SERVER_LOGGER):
        assert worker.push.take_ended() == (set(), {"d1"}, {"d1"}, {3, 5, 9}, set())
    assert "d1" in caplog.text and "no such port" in caplog.text
    assert worker.push.take_ended() == (set(), set(), set(), set(), set())


def test_a_failed_request_is_received_without_its_kv(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's rule: it is named as received, and its blocks as not loaded, in the scheduler's count of blocks."""
    worker = Worker(ratio=2)
    worker.takes(wanted=[wanted(D1, ([5, 3],)), wanted(D2, ([6, 7],))])
    worker.writer.outcome = Outcome(received={D2}, failed={D1: "prefill is gone"})
    with caplog.at_level(logging.WARNING, SERVER_LOGGER):
        assert worker.push.take_ended() == (set(), {"d1", "d2"}, {"d1"}, {5, 3}, set())
    assert len(caplog.messages) == 1
    assert "d1" in caplog.text and "prefill is gone" in caplog.text
    assert worker.push._waiting == {}


def test_a_request_may_be_received_again_under_its_id() -> None:
    """The blocks are those of the last time."""
    worker = Worker()
    worker.takes(wanted=[wanted(D1, ([5, 3],))])
    worker.writer.outcome.received.add(D1)
    worker.push.take_ended()
    worker.takes(wanted=[wanted(D1, ([8, 9],))])
    worker.writer.outcome.failed[D1] = "no"
    assert worker.push.take_ended() == (set(), {"d1"}, {"d1"}, {8, 9}, set())


def test_only_a_step_that_computes_nothing_waits_for_something_to_end() -> None:
    """Decode's and prefill's: engines take such steps only while something is owed. What is over is not held up."""
    worker = Worker()

    def wait_of(**step: Any) -> float:
        worker.takes(**step)
        worker.push.take_ended()
        return worker.writer.waited_seconds[-1]

    assert wait_of(wanted=[wanted(D1)], is_idle=False) == 0
    assert wait_of(is_idle=False) == 0
    assert wait_of() == SHORTEST_IDLE_STEP_SECONDS
    assert wait_of(unusable=[Unusable(D2, "no such port", ([7],))]) == 0
    worker.writer.outcome.received.add(D1)
    assert wait_of() == SHORTEST_IDLE_STEP_SECONDS
    assert wait_of(is_idle=False, finished=[P1]) == 0
    assert wait_of() == SHORTEST_IDLE_STEP_SECONDS


def test_the_longer_nothing_comes_the_longer_is_a_step_that_waits() -> None:
    worker = Worker()
    worker.takes(wanted=[wanted(D1)], is_idle=False)
    for _ in range(20):
        worker.takes()
        worker.push.take_ended()
    waits = worker.writer.waited_seconds
    assert waits[:3] == [SHORTEST_IDLE_STEP_SECONDS, 2 * SHORTEST_IDLE_STEP_SECONDS, 3 * SHORTEST_IDLE_STEP_SECONDS]
    assert waits[-2:] == [LONGEST_IDLE_STEP_SECONDS] * 2
    worker.takes(is_idle=False)
    worker.push.take_ended()
    worker.takes()
    worker.push.take_ended()
    assert waits[-2:] == [0, SHORTEST_IDLE_STEP_SECONDS]


# ------------------------------------------------------------------------------------------------------------- prefill


def test_a_lease_that_ended_is_logged_with_its_request(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker()
    worker.writer.outcome = Outcome(done={P1, P2}, expired={P2})
    with caplog.at_level(logging.WARNING, SERVER_LOGGER):
        ended = worker.push.take_ended()
    assert (ended.sent, ended.expired) == ({"p1", "p2"}, {"p2"})
    assert len(caplog.messages) == 1 and "p2" in caplog.text


def test_what_is_free_is_reported_by_its_request_or_by_its_hold() -> None:
    worker = Worker()
    worker.writer.outcome = Outcome(done={P1}, quiet={0, 7})
    assert worker.push.take_ended() == ({"p1", quiet_id(0), quiet_id(7)}, set(), set(), set(), set())
    assert worker.push.take_ended() == (set(), set(), set(), set(), set())


def test_a_step_is_offered_when_it_was_given_to_the_device() -> None:
    """One event for all of its requests, recorded then and not before."""
    worker = Worker(ratio=2)
    first, second = Computed(P1, TRANSFER, ([5, 3],), 7), Computed(P2, "transfer:u", ([1],), 4)
    assert worker.takes(computed=[first, second]) == []
    assert worker.device.events == []
    worker.push.end_step()
    (event,) = worker.device.events
    assert worker.writer.commands == [
        Offer(TRANSFER, P1, ([10, 11, 6, 7],), 7, event),
        Offer("transfer:u", P2, ([2, 3],), 4, event),
    ]
    worker.push.end_step()
    assert len(worker.writer.commands) == 2, "each step once"


def test_a_step_that_computes_nothing_to_push_costs_no_event() -> None:
    worker = Worker()
    worker.push.end_step()
    worker.takes(wanted=[wanted()])
    worker.push.end_step()
    assert worker.device.events == []


def test_the_writer_thread_knows_while_a_step_is_given_to_the_device() -> None:
    """It looks less often then. A step without work takes nothing from it."""
    worker = Worker()
    for is_idle in (False, True):
        worker.takes(is_idle=is_idle)
        assert worker.writer.engine_computes is not is_idle
        worker.push.end_step()
        assert not worker.writer.engine_computes


def test_a_step_that_was_not_ended_is_offered_before_the_next_begins() -> None:
    """vLLM ends no step in which nothing is computed, and an exception may keep it from ending one."""
    worker = Worker()
    worker.takes(computed=[Computed(P1, TRANSFER, ([5],), 4)])
    commands = worker.takes(finished=[P1], computed=[Computed(P2, "transfer:u", ([6],), 4)])
    (event,) = worker.device.events
    assert commands == [Offer(TRANSFER, P1, ([5],), 4, event), Finish(P1)]
    worker.push.end_step()
    assert worker.writer.commands == [Offer("transfer:u", P2, ([6],), 4, worker.device.events[1])]


def test_a_step_is_taken_in_in_the_order_that_it_says() -> None:
    """A preempted request is let go of before it is offered again; all of it before what is computed."""
    worker = Worker()
    commands = worker.takes(
        computed=[Computed(P1, TRANSFER, ([5],), 4)],
        refused={"transfer:v": "never"},
        stopped={P3: "aborted"},
        finished=[P2],
        preempted=[(P1, 3)],
        withdrawn={D2: "gone"},
        unneeded=[("transfer:u", prefill())],
        unusable=[Unusable(D2, "no", ([1],))],
        wanted=[wanted()],
    )
    assert commands == [
        Register(of(commands[0]).registration, ranks(1, 0)),
        Decline("transfer:u", ranks(1, 0)),
        Withdraw(D2, "gone"),
        Restart(P1, 3),
        Finish(P2),
        Stop(P3, "aborted"),
        Refuse("transfer:v", "never"),
    ]
    worker.push.end_step()
    assert [type(command) for command in worker.writer.commands] == [Offer]


def test_closing_stops_the_writer_thread() -> None:
    worker = Worker()
    worker.push.close()
    assert worker.writer.is_closed
