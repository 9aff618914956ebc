# SPDX-License-Identifier: Apache-2.0
"""Decode's half of a push, message by message. Whole pushes and every fault: tests/flow/test_push.py."""

from __future__ import annotations

import pytest

from kvcached_nixl.clock import ManualClock
from kvcached_nixl.ids import DecodeRequestId, EngineId
from kvcached_nixl.transport.memory import Network
from kvcached_nixl.wire.push import (
    Declined,
    Failed,
    Message,
    Peer,
    Registration,
    Withdrawal,
    Withdrawn,
    Written,
    decode,
)
from kvcached_nixl.worker.push_receive import Ended, PushReceiver

REGISTRATION = Registration("t", 7, DecodeRequestId("d"), Peer(EngineId("e"), "h", 1, 1, 0), 0, 8, 4, ((1, 2),))


@pytest.fixture
def receiver() -> PushReceiver:
    """One that waits for ranks 0 and 1 of prefill, the agents ``p0`` and ``p1``."""
    network = Network(immediate=True)
    transport = network.agent("d")
    for name in ("p0", "p1"):
        network.agent(name)
        transport.add_peer(name.encode())
    made = PushReceiver(transport, ManualClock(), registration_timeout_seconds=60.0, repeat_seconds=5.0)
    made.register(REGISTRATION, [(0, "p0"), (1, "p1")])
    return made


def said(receiver: PushReceiver, name: str) -> list[Message]:
    return [decode(notification) for _, notification in receiver._transport.network.agents[name].received()]  # type: ignore[attr-defined]


def written(rank: int, index: int, is_last: bool = False) -> Written:
    return Written("t", 7, rank, 2, index, is_last)


def test_it_ends_once_every_write_of_every_contributor_has_arrived(receiver: PushReceiver) -> None:
    """In any order, doubles not counted."""
    for peer, message in [
        ("p0", written(0, 1, True)),
        ("p1", written(1, 0, True)),
        ("p0", written(0, 1, True)),
    ]:
        receiver.handle(peer, message)
        assert receiver.take_ended() == []
    receiver.handle("p0", written(0, 0))
    assert receiver.take_ended() == [Ended(DecodeRequestId("d"))]
    assert receiver.dropped == {"doubled": 1}
    receiver.handle("p0", written(0, 0))
    assert receiver.take_ended() == []
    assert receiver.dropped["unknown attempt"] == 1


def test_one_failure_asks_the_others_to_stop_and_waits_for_them(receiver: PushReceiver) -> None:
    """vllm#56104: freed at the first error, the blocks would be written by the others."""
    said(receiver, "p1")
    receiver.handle("p0", Failed("t", 7, 0, 2, "no memory"))
    assert receiver.take_ended() == []
    assert said(receiver, "p1") == [Withdrawal("t", 7, REGISTRATION.decode)]
    receiver.handle("p1", Withdrawn("t", 7, 1, 2))
    (ended,) = receiver.take_ended()
    assert "no memory" in ended.failed
    assert len(receiver) == 0


@pytest.mark.parametrize(
    ("peer", "message", "reason"),
    [
        ("p1", written(0, 0, True), "not a contributor"),
        ("p0", Written("t", 7, 5, 8, 0, True), "not a contributor"),
        ("p0", Written("t", 8, 0, 2, 0, True), "unknown attempt"),
        ("p0", Written("u", 7, 0, 2, 0, True), "unknown attempt"),
        ("p0", Declined("t"), "not for decode"),
        ("p0", REGISTRATION, "not for decode"),
    ],
    ids=["another's rank", "unknown rank", "other attempt", "other transfer", "declined", "registration"],
)
def test_what_does_not_fit_is_dropped_and_counted(
    receiver: PushReceiver, peer: str, message: Message, reason: str
) -> None:
    receiver.handle(peer, message)
    assert receiver.dropped == {reason: 1}
    receiver.handle("p0", written(0, 0, True))
    assert receiver.take_ended() == []


@pytest.mark.parametrize(
    "messages",
    [
        [written(0, 1, True), written(0, 2), written(0, 0)],
        [written(0, 3), written(0, 1, True)],
        [written(0, 2, True), written(0, 1, True), written(0, 0)],
    ],
    ids=["beyond the last", "a last before it", "two last ones"],
)
def test_wrong_numbers_never_make_a_request_received(receiver: PushReceiver, messages: list[Message]) -> None:
    """The bytes cannot be trusted, and who counts wrongly has not said that it stopped."""
    receiver.handle("p1", written(1, 0, True))
    for message in messages:
        receiver.handle("p0", message)
    receiver.handle("p0", Withdrawn("t", 7, 0, 2))
    (ended,) = receiver.take_ended()
    assert "wrongly" in ended.failed


def test_a_contributor_that_cannot_be_told_fails_the_request_at_once(receiver: PushReceiver) -> None:
    """Nobody will write, so its blocks are free at once."""
    other = Registration("u", 8, DecodeRequestId("e"), REGISTRATION.decode, 0, 4, 4, ((3,),))
    receiver.register(other, [(0, "nobody")])
    (ended,) = receiver.take_ended()
    assert ended.request_id == "e"
    assert "not reached" in ended.failed


def test_a_request_is_registered_once(receiver: PushReceiver) -> None:
    with pytest.raises(ValueError, match="one registration"):
        receiver.register(REGISTRATION, [(0, "p0")])
    with pytest.raises(ValueError, match="0 contributors"):
        receiver.register(Registration("u", 8, DecodeRequestId("e"), REGISTRATION.decode, 0, 4, 4, ((3,),)), [])


def test_silent_contributors_are_named_and_asked_again(receiver: PushReceiver) -> None:
    """Whoever watches over peers finds out whether they live."""
    clock = receiver._clock
    assert isinstance(clock, ManualClock)
    said(receiver, "p0")
    assert receiver.tick() == 60.0
    clock.advance(60.0)
    assert receiver.tick() == 65.0
    clock.advance(5.0)
    assert receiver.tick() == 70.0
    assert said(receiver, "p0") == [Withdrawal("t", 7, REGISTRATION.decode)] * 2
    assert receiver.silent_peers() == {"p0", "p1"}
    receiver.peer_gone("p0")
    assert receiver.silent_peers() == {"p1"}
    receiver.handle("p1", written(1, 0, True))
    (ended,) = receiver.take_ended()
    assert "60 s" in ended.failed
    assert receiver.tick() is None
