# SPDX-License-Identifier: Apache-2.0
"""A turn looks only at what is due, so each thing that can happen to a transfer must make it so.

In each test all is quiet before one thing happens, and the next turn alone has to do what follows from it.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvcached_nixl.clock import ManualClock
from kvcached_nixl.ids import DecodeRequestId, EngineId, PrefillRequestId
from kvcached_nixl.transport.base import Ranges, State
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.wire.push import Declined, Failed, Message, Peer, Registration, Withdrawal, Withdrawn, decode
from kvcached_nixl.worker.push_send import PushSender

PLANES = Planes((4096,), 16, 4, 4, 4, num_blocks=8, block_size=4, num_heads=1)
DECODE = Peer(EngineId("d"), "host", 1, 1, 0)
REQUEST = PrefillRequestId("p")
LEASE_SECONDS, UNMATCHED_SECONDS = 30.0, 120.0


class Transport:
    """Counts WRITEs, which stay in flight until told otherwise, and keeps what is said."""

    def __init__(self) -> None:
        self.writes = 0
        self.said: list[Message] = []
        self.stands = State.IN_FLIGHT

    def write(self, peer: str, local: Ranges, remote: Ranges, notification: bytes) -> int:
        assert np.array_equal(local[:, 1], remote[:, 1])
        self.writes += 1
        return self.writes

    def state(self, handle: int) -> State:
        return self.stands

    def release(self, handle: int) -> None:
        pass

    def send(self, peer: str, notification: bytes) -> None:
        self.said.append(decode(notification))


class Prefill:
    def __init__(self) -> None:
        self.transport, self.clock = Transport(), ManualClock()
        self.sender = PushSender(
            self.transport,  # type: ignore[arg-type]
            self.clock,
            PLANES,
            tp_rank=0,
            tp_size=1,
            lease_seconds=LEASE_SECONDS,
            unmatched_seconds=UNMATCHED_SECONDS,
        )

    def registers(self, attempt: int = 1) -> Registration:
        made = Registration("t", attempt, DecodeRequestId("r"), DECODE, 0, 8, 4, ((2, 3),))
        self.sender.handle("agent", made)
        return made

    def offers(self) -> None:
        self.sender.offer("t", REQUEST, ([0, 1],), 8)

    def settles(self) -> None:
        """Until nothing is due."""
        for _ in range(3):
            self.sender.tick()
        assert not self.transport.writes


@pytest.fixture
def prefill() -> Prefill:
    return Prefill()


def test_decode_becomes_known(prefill: Prefill) -> None:
    """Who waited for the handshake is written to, and is asked about no more."""
    prefill.offers()
    prefill.registers()
    prefill.settles()
    assert prefill.sender.unknown_peers() == {"agent": DECODE}
    prefill.sender.peer_known("agent", PLANES)
    prefill.sender.tick()
    assert prefill.transport.writes == 1
    assert prefill.sender.unknown_peers() == {}


def test_a_known_decode_registers(prefill: Prefill) -> None:
    prefill.sender.peer_known("agent", PLANES)
    prefill.offers()
    prefill.settles()
    prefill.registers()
    prefill.sender.tick()
    assert prefill.transport.writes == 1


def test_a_write_ends(prefill: Prefill) -> None:
    """It is due for as long as it is in flight, and afterwards nothing is."""
    prefill.sender.peer_known("agent", PLANES)
    prefill.offers()
    prefill.registers()
    for _ in range(3):
        prefill.sender.tick()
        assert prefill.sender.in_flight and not prefill.sender.is_delivering
    prefill.sender.finish(REQUEST)
    prefill.sender.tick()
    assert prefill.sender.is_delivering
    prefill.transport.stands = State.DONE
    assert prefill.sender.tick() is None
    assert prefill.sender.take_done() == [REQUEST]
    assert not prefill.sender.in_flight and not prefill.sender.is_delivering
    assert not len(prefill.sender)


def test_a_request_that_nobody_reads_is_preempted(prefill: Prefill) -> None:
    prefill.offers()
    prefill.settles()
    prefill.sender.restart(REQUEST, 7)
    prefill.sender.tick()
    assert prefill.sender.take_quiet() == [7]


@pytest.mark.parametrize("is_declined", [True, False])
def test_a_request_that_decode_needs_no_more_of_ends(prefill: Prefill, is_declined: bool) -> None:
    prefill.offers()
    if is_declined:
        prefill.sender.handle("agent", Declined("t"))
    else:
        prefill.registers()
        prefill.sender.peer_lost("agent", "gone")
    prefill.settles()
    assert prefill.sender.take_done() == []
    prefill.sender.finish(REQUEST)
    assert prefill.sender.tick() is None
    assert prefill.sender.take_done() == [REQUEST]


def test_decode_withdraws(prefill: Prefill) -> None:
    """The answer goes out, and nothing is left that would fail later."""
    prefill.sender.peer_known("agent", PLANES)
    made = prefill.registers()
    assert prefill.sender.tick() == UNMATCHED_SECONDS
    prefill.settles()
    prefill.sender.handle("agent", Withdrawal(*made.key, DECODE))
    assert prefill.sender.tick() is None
    assert [type(one) for one in prefill.transport.said] == [Withdrawn]


def test_decode_withdraws_what_has_not_arrived(prefill: Prefill) -> None:
    """The only rank of decode needs nothing more of a request that has ended."""
    prefill.offers()
    prefill.sender.finish(REQUEST)
    assert prefill.sender.tick() == LEASE_SECONDS
    prefill.settles()
    prefill.sender.handle("agent", Withdrawal("t", 9, DECODE))
    prefill.sender.tick()
    assert prefill.sender.take_done() == [REQUEST]


def test_decode_is_lost(prefill: Prefill) -> None:
    """Its attempt is over at once, and its answer waits for it to be known again."""
    prefill.registers()
    prefill.settles()
    prefill.sender.peer_lost("agent", "gone")
    assert prefill.sender.unknown_peers() == {}
    assert prefill.sender.tick() is None
    assert prefill.sender.unknown_peers() == {"agent": DECODE}
    prefill.sender.peer_known("agent", PLANES)
    assert [type(one) for one in prefill.transport.said] == [Failed]


def test_a_matched_registration_has_no_deadline(prefill: Prefill) -> None:
    prefill.registers()
    prefill.settles()
    prefill.offers()
    assert prefill.sender.tick() is None
    prefill.clock.advance(2 * UNMATCHED_SECONDS)
    prefill.sender.peer_known("agent", PLANES)
    prefill.sender.tick()
    assert prefill.transport.writes == 1


def test_a_lease_that_ends_while_decode_is_written_to_ends_nothing(prefill: Prefill) -> None:
    """Decode came in time; what its WRITE left is given back when that has ended."""
    prefill.sender.peer_known("agent", PLANES)
    prefill.offers()
    prefill.sender.finish(REQUEST)
    prefill.registers()
    prefill.sender.tick()
    prefill.clock.advance(LEASE_SECONDS)
    prefill.sender.tick()
    assert prefill.sender.take_done() == []
    prefill.transport.stands = State.DONE
    prefill.sender.tick()
    assert prefill.sender.take_done() == [REQUEST]
    assert prefill.transport.said == []
