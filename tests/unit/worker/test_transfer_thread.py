# SPDX-License-Identifier: Apache-2.0
"""worker/{transfer_thread,outcomes}.py: order, containment, time until the next turn. Mostly without a thread."""

from __future__ import annotations

import threading
import time
import typing
from typing import Any

import pytest
import torch
from support.clocks import ManualClock
from support.codecs import plain_id
from support.engine_fakes import grown
from support.internals import receiver_of, registry_of
from support.worker_fakes import DIGEST, START, TOKENS, WEIGHTS, Local, manifest, registration, wanted

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.ids import DecodeRequestId, EngineId, PrefillRequestId
from kvcached_nixl.settings import TransferMode
from kvcached_nixl.transport.agent import TransportError
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed, RevocationCause
from kvcached_nixl.wire.messages import PREFIX, Message, Peer, Reading, Release, Stopped, encode, heartbeats
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import (
    ORDER,
    Finish,
    LeaseRenewal,
    OfferUpdate,
    Report,
    Revocation,
    Revoke,
    WakeAddress,
    Withdraw,
)
from kvcached_nixl.worker import transfer_thread as thread
from kvcached_nixl.worker.decode.receiver import Receiver
from kvcached_nixl.worker.facade import Device, assemble
from kvcached_nixl.worker.outcomes import TELL_AGAIN_SECONDS, OutcomeQueue
from kvcached_nixl.worker.prefill.offers import OfferMatcher
from kvcached_nixl.worker.prefill.registry import OfferRegistry
from kvcached_nixl.worker.prefill.writer import Writer
from kvcached_nixl.worker.transfer.transfer_queue import MOVING_SECONDS
from kvcached_nixl.worker.transfer_thread import COMPUTING_POLL_SECONDS, IDLE_POLL_SECONDS, POLL_SECONDS

P1 = PrefillRequestId("p-1")
MANIFEST = manifest(17, 13, 19)
PREFILL = RemotePrefill("remote", "10.0.0.2", 5601, 1)
OWN = Peer(EngineId("local"), "10.0.0.1", 5600, 1, 0)
WAKE = WakeAddress("127.0.0.1", 5601, "key")
JOIN_SECONDS = 20.0
IDLE_TURN_SECONDS = 0.001


def always() -> bool:
    return True


def never() -> bool:
    return False


def writable(attempts: tuple[int, ...], is_reached: Any) -> thread.Reached:
    return thread.Reached(thread.BlocksWritable(attempts), is_reached)


class Worker(Local):
    """All parts of one worker; its thread's `turn` is called by the test."""

    def __init__(self, mode: TransferMode = TransferMode.PULL, clock: Clock | None = None) -> None:
        super().__init__(mode=mode, clock=clock)
        self.facade = assemble(self.side, Device(torch.device("cpu")), lambda weights: None, self.gates)
        self.thread = self.facade.thread
        self.thread.submit(thread.LocalIdentity(OWN, WAKE, START))
        self.facade.identify(WEIGHTS)

    def deliver(self, rounds: int = 6) -> tuple[set[str], Report]:  # type: ignore[override]
        for _ in range(rounds):
            self.thread.turn()
            self.network.deliver_all()
        return self.thread.take_outcome()

    def offer(self, is_reached: Any = always, request_id: PrefillRequestId = P1) -> None:
        made = manifest(7, 3, 9, request_id=request_id)
        update = OfferUpdate(request_id, "transfer:t", DIGEST, TOKENS, grown([7, 3, 9]), TOKENS, made)
        self.thread.submit(thread.Reached(update, is_reached))


@pytest.fixture
def pull() -> Worker:
    return Worker()


@pytest.fixture
def push() -> Worker:
    return Worker(TransferMode.PUSH)


# --------------------------------------------------------------------------------------------------------- its commands


def test_every_command_and_message_is_known() -> None:
    known = Worker().thread
    others = {thread.LocalIdentity, thread.NewWeights, thread.BlocksWritable}
    assert {*ORDER} | others == known._commands.keys()
    assert {*typing.get_args(Message), list} == known._messages.keys()


@pytest.mark.parametrize("message", ["reading", "heartbeat"])
def test_a_revocation_does_not_overtake_who_was_there_before_it(pull: Worker, message: str) -> None:
    """Both have arrived when the thread wakes up."""
    remote = pull.remote()
    pull.offer()
    pull.thread.submit(Finish(P1))
    pull.deliver()
    remote.transport.add_peer(b"local")
    for told in [encode(Reading(P1, 0))] if message == "reading" else heartbeats([P1]):
        remote.transport.send("local", told)
    pull.network.deliver_all()
    revocation = Revocation(RevocationCause.BLOCKS, "memory is short", spares_wanted=message == "heartbeat", number=7)
    pull.thread.submit(Revoke(P1, revocation))
    pull.thread.turn()
    assert pull.thread.take_outcome() == (set(), Report(spared={7}))


# ---------------------------------------------------------------------------------------------------------- containment


@pytest.mark.parametrize(
    "notification",
    [
        b"",
        b"\xff",
        b"HB:\xff",
        PREFIX,
        PREFIX + b"\x91" * 50_000,
        PREFIX + b"\xc1",
        b"PUSH_REG:\x80",
        b"HB:" + b"x" * 9999,
    ],
    ids=plain_id,
)
def test_a_message_that_cannot_be_read_is_dropped(pull: Worker, notification: bytes) -> None:
    remote = pull.remote()
    remote.transport.add_peer(b"local")
    for _ in range(3):
        if notification:
            remote.transport.send("local", notification)
    pull.offer()
    pull.thread.submit(Finish(P1))
    pull.thread.turn()
    remote.transport.send("local", next(heartbeats(["p-1"])))
    remote.say("local", Release("p-1", "", DIGEST, 0, 1))
    sent, _ = pull.deliver()
    assert sent == {"p-1"}
    assert pull.side.dropped["malformed"] == (3 if notification else 0)
    assert pull.side.dropped["defect"] == 0


def defective(*_: Any, **__: Any) -> Any:
    raise IndexError("of ours")


@pytest.mark.parametrize("where", ["want", "begin"])
def test_a_defect_in_decodes_command_fails_its_attempts(
    pull: Worker, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pull.thread.submit(wanted(2, MANIFEST))
    pull.thread.turn()
    if where == "want":
        monkeypatch.setattr(Receiver, "_release", defective)
    else:
        monkeypatch.setattr(Receiver, "begin", defective)
    pull.thread.submit(wanted(1, MANIFEST), writable((1, 2), always))
    _, report = pull.deliver()
    assert report.failed[1][0] is FailureCause.DEFECT
    assert (1, 0) in report.ended and pull.side.dropped["defect"] == 1
    assert "IndexError: of ours" in caplog.text and "internal error in kvcached_nixl" in caplog.text


@pytest.mark.parametrize("fails_twice", [False, True])
def test_a_defect_in_a_message_has_no_further_effect(
    fails_twice: bool, push: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt that the message names fails, and its sender is answered; if that fails, too, the engine goes on."""
    remote = push.remote()
    monkeypatch.setattr(OfferMatcher, "wanted_by", defective)
    if fails_twice:
        monkeypatch.setattr(Writer, "fail", defective)
    remote.say("local", registration(1, remote.address))
    push.deliver()
    told = [(type(one), one.attempt, one.cause) for one in remote.heard()]
    assert told == ([] if fails_twice else [(Stopped, 1, FailureCause.DEFECT)])
    assert push.side.dropped["defect"] == 1 + fails_twice


def test_an_agent_that_cannot_be_asked_is_asked_again(pull: Worker) -> None:
    """NIXL's own exception in one turn: notifications are read again in the next one."""
    remote = pull.remote()
    remote.table.publish("p-1", MANIFEST.ownership_token)
    real = pull.transport.received
    calls: list[int] = []

    def failing() -> list[tuple[str, bytes]]:
        calls.append(1)
        if len(calls) < 3:
            raise TransportError("NIXL cannot be asked")
        return real()

    pull.transport.received = failing  # type: ignore[method-assign]
    pull.thread.submit(wanted(1, MANIFEST), writable((1,), always))
    assert pull.deliver()[1].ended == {(1, 0)}


def test_a_defect_with_prefills_blocks_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler must learn when prefill's blocks are free, so half-updated state stops the engine."""
    monkeypatch.setattr(OfferRegistry, "offer", defective)
    push = Worker(TransferMode.PUSH)
    has_stopped = threading.Event()

    def wake(host: str, port: int, key: str) -> None:
        push.asking.woken.append((host, port, key))
        has_stopped.set()

    monkeypatch.setattr(push.asking, "wake", wake)
    push.thread.start()
    push.offer()
    assert has_stopped.wait(JOIN_SECONDS)
    with pytest.raises(RuntimeError, match="IndexError"):
        push.thread.take_outcome()
    with pytest.raises(RuntimeError, match="IndexError"):
        push.thread.submit(Finish(P1))
    assert ("127.0.0.1", 5601, "key") in push.asking.woken, "an engine that sleeps must be woken"
    push.thread.close()


# --------------------------------------------------------------------------------------------------- when to look again


def test_it_looks_soon_while_something_is_in_flight_or_awaited(pull: Worker, push: Worker) -> None:
    pull.remote()
    pull.thread.submit(wanted(1, MANIFEST))
    assert pull.thread.turn() == 2 * POLL_SECONDS
    pull.thread.submit(writable((1,), always))
    pull.thread.turn()
    assert pull.thread.turn() == POLL_SECONDS
    pull.thread.engine_computes = True
    assert pull.thread.turn() == COMPUTING_POLL_SECONDS
    push.offer()
    assert push.thread.turn() == 2 * POLL_SECONDS


def test_the_end_of_a_hand_over_is_seen_soon_while_the_engine_computes(pull: Worker) -> None:
    remote = pull.remote()
    remote.table.publish("p-1", MANIFEST.ownership_token)
    pull.thread.submit(wanted(1, MANIFEST), writable((1,), always))
    pull.thread.engine_computes = True
    pull.thread.turn()
    pull.thread.turn()
    pull.network.deliver_all()
    assert pull.thread.turn() == POLL_SECONDS, "the ownership token is being read"
    pull.clock.advance(MOVING_SECONDS)
    assert pull.thread.turn() == COMPUTING_POLL_SECONDS, "prefill stands still"
    pull.network.deliver_all()
    pull.thread.turn()
    assert pull.thread.take_outcome()[1].ended == {(1, 0)}


def test_decode_that_waits_for_the_last_write_is_not_kept_waiting_for_a_step(push: Worker) -> None:
    remote = push.remote()
    push.offer()
    remote.say("local", registration(1, remote.address))
    push.network.deliver_all()
    push.thread.turn()
    push.thread.turn()
    push.thread.engine_computes = True
    assert push.thread.turn() == POLL_SECONDS


def test_what_has_not_come_for_long_is_looked_for_less_often(push: Worker) -> None:
    """At least every 10 ms: a peer's own wait may begin at any time."""
    remote = push.remote()
    for waited, expected in ((0.05, 2 * POLL_SECONDS), (0.5, 0.005), (5.0, COMPUTING_POLL_SECONDS)):
        push.offer(request_id=PrefillRequestId(f"p-{waited}"))
        push.thread.turn()
        push.clock.advance(waited)
        assert push.thread.turn() == pytest.approx(expected)
    remote.say("local", b"anything")
    push.network.deliver_all()
    assert push.thread.turn() == 2 * POLL_SECONDS


def test_a_deadline_that_is_near_is_not_overslept(pull: Worker) -> None:
    pull.thread.submit(LeaseRenewal(DecodeRequestId("d1"), PREFILL, "p-1", 30.0))
    pull.remote()
    pull.thread.turn()
    pull.clock.advance(5.0 - 0.03)
    assert pull.thread.turn() == pytest.approx(0.03)
    pull.clock.advance(1.0)
    assert pull.thread.turn() >= 0.0


def test_the_engine_is_woken_when_something_has_ended_and_not_else(pull: Worker) -> None:
    pull.thread.submit(wanted(1, None))
    pull.thread.turn()
    assert pull.asking.woken == [("127.0.0.1", 5601, "key")]
    for _ in range(5):
        pull.thread.turn()
    assert len(pull.asking.woken) == 1
    pull.clock.advance(1.0)
    pull.thread.turn()
    assert len(pull.asking.woken) == 2, "a word may get lost"
    pull.thread.take_outcome()
    pull.clock.advance(1.0)
    pull.thread.turn()
    assert len(pull.asking.woken) == 2


# ------------------------------------------------------------------------------------------------------------- its cost


def idle_turn_seconds(worker: Worker) -> float:
    """The fastest of many turns, so that other load of the machine does not count."""
    taken = []
    for _ in range(50):
        begun = time.perf_counter()
        worker.thread.turn()
        taken.append(time.perf_counter() - begun)
    return min(taken)


@pytest.mark.parametrize("mode", TransferMode)
def test_ten_thousand_attempts_that_wait_cost_a_turn_nothing(mode: TransferMode) -> None:
    """A turn takes some microseconds; visiting every attempt would take milliseconds."""
    worker = Worker(mode)
    if mode is TransferMode.PUSH:
        worker.remote()
    for number in range(10_000):
        worker.thread.submit(wanted(number, MANIFEST))
    worker.thread.submit(writable(tuple(range(10_000)), always))
    for _ in range(3):
        worker.thread.turn()
    assert len(receiver_of(worker.thread)) == 10_000
    assert idle_turn_seconds(worker) < IDLE_TURN_SECONDS


def test_ten_thousand_offers_and_registrations_cost_a_turn_nothing() -> None:
    worker = Worker(TransferMode.PUSH)
    remote = worker.remote()
    for number in range(5_000):
        worker.offer(request_id=PrefillRequestId(f"p{number}"))
        worker.transport.inbox.append(("remote-0", encode(registration(number, remote.address, name="transfer:u"))))
    for _ in range(3):
        worker.thread.turn()
    assert len(registry_of(worker.thread)) == 10_000
    assert idle_turn_seconds(worker) < IDLE_TURN_SECONDS


# -------------------------------------------------------------------------------------------------------- a real thread


def test_closing_waits_for_what_is_in_flight() -> None:
    worker = Worker(clock=Clock())
    remote = worker.remote()
    remote.table.publish("p-1", MANIFEST.ownership_token)
    posted = threading.Event()
    real = worker.transport.post

    def post(*arguments: Any, **more: Any) -> Any:
        found = real(*arguments, **more)
        posted.set()
        return found

    worker.transport.post = post  # type: ignore[method-assign]
    worker.thread.start()
    worker.thread.submit(wanted(1, MANIFEST), writable((1,), always))
    assert posted.wait(JOIN_SECONDS)
    closer = threading.Thread(target=worker.thread.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive() and not worker.asking.is_closed
    while closer.is_alive():
        worker.network.deliver_all()
        closer.join(0.001)
    assert worker.asking.is_closed
    assert worker.transport.unreleased() == []


def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread, "CLOSE_SECONDS", 0.05)
    worker = Worker(clock=Clock())
    worker.remote()
    worker.network.vanish("remote-0")
    worker.thread.start()
    worker.thread.submit(wanted(1, MANIFEST), writable((1,), always))
    deadline = time.monotonic() + JOIN_SECONDS
    while not worker.network.pending and time.monotonic() < deadline:
        worker.thread.submit()
    worker.thread.close()
    assert worker.asking.is_closed and worker.network.pending


def test_a_thread_that_was_not_started_can_be_closed() -> None:
    worker = Worker()
    worker.thread.close()
    assert worker.asking.is_closed


def test_a_writer_that_says_nothing_does_not_keep_the_thread_awake(push: Worker) -> None:
    remote = push.remote()
    push.thread.submit(wanted(1, None), writable((1,), always))
    push.deliver()
    push.network.vanish(remote.transport.name)
    assert push.thread.turn() < IDLE_POLL_SECONDS
    push.thread.submit(Withdraw(1, "dead"))
    assert push.thread.turn() < IDLE_POLL_SECONDS, "it is about to say that it has stopped"
    for _ in range(20):
        push.clock.advance(5.0)
        push.thread.turn()
    assert push.thread.turn() == IDLE_POLL_SECONDS


# ---------------------------------------------------------------------------------------------- what the engine is told


def test_the_engine_is_told_at_once_and_again_until_it_looks() -> None:
    """A wake-up may get lost, and memory would stay held until the next request."""
    clock = ManualClock()
    outcomes = OutcomeQueue(clock)
    assert not outcomes.take_news()
    for report in (
        lambda: outcomes.finished(wanted(1)),
        lambda: outcomes.failed(wanted(1), HandOverFailed(FailureCause.LOST, "")),
        lambda: outcomes.done(P1),
        lambda: outcomes.hold_idle(4),
        lambda: outcomes.spared(3),
        lambda: outcomes.claimed(7),
    ):
        report()
        assert outcomes.take_news()
        report()
        assert not outcomes.take_news(), "one word for what it takes at once"
        clock.advance(TELL_AGAIN_SECONDS)
        assert outcomes.take_news()
        outcomes.take()
        clock.advance(TELL_AGAIN_SECONDS)
        assert not outcomes.take_news()
