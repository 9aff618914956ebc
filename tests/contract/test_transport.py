# SPDX-License-Identifier: Apache-2.0
"""What a hand-over requires of a transport: the same cases on the in-memory one and on real NIXL."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.memory_transport import MemoryTransport
from support.transports import MEMORY_BYTES, Side, sides  # noqa: F401
from support.waiting import until

from kvcached_nixl.transport.agent import TransferState, Transport, TransportError

UNASKED_SECONDS = 0.3


def notifications(
    transport: Transport, count: int, written: Sequence[tuple[Side, Any]] = ()
) -> list[tuple[str, bytes]]:
    """At least ``count`` notifications; meanwhile the ``written`` sides ask for their WRITEs' states."""
    found: list[tuple[str, bytes]] = []

    def enough() -> bool:
        for side, handle in written:
            side.transport.state(handle)
        found.extend(transport.received())
        return len(found) >= count

    until(enough)
    return found


def ranges(side: Side, *pairs: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([(side.address + offset, length) for offset, length in pairs], dtype=np.int64)


def test_a_write_moves_its_ranges_and_nothing_else_and_then_notifies(sides: tuple[Side, Side]) -> None:
    """Ranges of different lengths in one WRITE; its bytes are in place when its notification is."""
    one, other = sides
    one.memory[:] = np.random.default_rng(1).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
    peer = one.transport.add_peer(other.transport.metadata())
    handle = one.transport.post(
        "WRITE", peer, ranges(one, (10, 5000), (200_000, 3)), ranges(other, (77_777, 5000), (0, 3)), b"written"
    )
    ((_, notification),) = notifications(other.transport, 1, [(one, handle)])
    assert notification == b"written"
    expected = np.zeros(MEMORY_BYTES, dtype=np.uint8)
    expected[77_777:82_777] = one.memory[10:5010]
    expected[:3] = one.memory[200_000:200_003]
    assert np.array_equal(other.memory, expected)
    until(lambda: one.transport.state(handle) is TransferState.DONE)
    one.transport.release(handle)


@pytest.mark.parametrize("is_host", [False, True])
def test_a_read_fetches_its_ranges_and_nothing_else(is_host: bool, sides: tuple[Side, Side]) -> None:
    """Its bytes are in place when it is done, in host memory as in the KV cache's; nobody is notified."""
    one, other = sides
    other.memory[:] = np.random.default_rng(1).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
    peer = one.transport.add_peer(other.transport.metadata())
    here, there = ranges(one, (10, 5000), (200_000, 3)), ranges(other, (77_777, 5000), (0, 3))
    handle = one.transport.post("READ", peer, here, there, is_host=is_host)
    until(lambda: one.transport.state(handle) is TransferState.DONE)
    expected = np.zeros(MEMORY_BYTES, dtype=np.uint8)
    expected[10:5010] = other.memory[77_777:82_777]
    expected[200_000:200_003] = other.memory[:3]
    assert np.array_equal(one.memory, expected)
    one.transport.release(handle)
    assert other.transport.received() == one.transport.received() == []


def test_a_connection_lasts_until_its_peer_is_removed(sides: tuple[Side, Side]) -> None:
    """A repeated handshake adds the peer again. What moves bytes then belongs to the same connection."""
    transport, metadata = sides[0].transport, sides[1].transport.metadata()
    peer = transport.add_peer(metadata)
    first = transport.connection(peer)
    assert first is not None and transport.add_peer(metadata) == peer and transport.connection(peer) is first
    transport.remove_peer(peer)
    assert transport.connection(peer) is None
    transport.add_peer(metadata)
    assert transport.connection(peer) not in (None, first)


def test_a_write_whose_state_nobody_asks_for_may_never_notify(sides: tuple[Side, Side]) -> None:
    """NIXL notifies from the writer's own question, or from the post if the WRITE ended within it.

    The writer's thread must therefore not sleep while a WRITE is in flight. Which of the two it is depends on how
    far NIXL's progress thread came during the post, so some of the WRITEs may notify by themselves, not all.
    """
    one, other = sides
    peer = one.transport.add_peer(other.transport.metadata())
    one.memory[:] = 7

    def stays_silent(length: int) -> bool:
        other.memory[:] = 0
        handle = one.transport.post("WRITE", peer, ranges(one, (0, length)), ranges(other, (0, length)), b"written")
        until(lambda: other.memory[length - 1] == 7)
        begun = time.monotonic()
        while time.monotonic() - begun < UNASKED_SECONDS:
            if other.transport.received():
                one.transport.release(handle)
                return False
        notifications(other.transport, 1, [(one, handle)])
        one.transport.release(handle)
        return True

    assert any(stays_silent(length) for length in (10, MEMORY_BYTES) * 10), "every WRITE notified unasked"


def test_notifications_without_a_write_arrive_in_order_in_both_directions(sides: tuple[Side, Side]) -> None:
    """Sizes from nothing much to more than a registration of 10,000 blocks takes."""
    one, other = sides
    there, back = (
        one.transport.add_peer(other.transport.metadata()),
        other.transport.add_peer(one.transport.metadata()),
    )
    sent = [b"a", b"b" * 60_000, b"c"]
    for notification in sent:
        one.transport.send(there, notification)
    arrived = notifications(other.transport, 3)
    assert [notification for _, notification in arrived] == sent
    assert len({sender for sender, _ in arrived}) == 1
    other.transport.send(back, b"d")
    assert [notification for _, notification in notifications(one.transport, 1)] == [b"d"]


def test_an_unknown_or_removed_peer_is_an_error_and_nothing_is_posted(sides: tuple[Side, Side]) -> None:
    one, other = sides
    some = ranges(one, (0, 10)), ranges(other, (0, 10))
    with pytest.raises(TransportError):
        one.transport.post("WRITE", "nobody", *some, b"x")
    with pytest.raises(TransportError):
        one.transport.send("nobody", b"x")
    whole = other.transport.metadata()
    for metadata in (b"", b"no metadata", b"nixlSerDes|nothing", whole[: len(whole) // 2]):
        with pytest.raises(TransportError):
            one.transport.add_peer(metadata)
    peer = one.transport.add_peer(other.transport.metadata())
    one.transport.remove_peer(peer)
    for operation in ("READ", "WRITE"):
        with pytest.raises(TransportError):
            one.transport.post(operation, peer, *some)
    with pytest.raises(TransportError):
        one.transport.send(peer, b"x")
    # Finding B6: whatever state it is in.
    for again in (peer, "nobody", ""):
        one.transport.remove_peer(again)


def test_a_peer_may_be_removed_whatever_nixl_says(sides: tuple[Side, Side]) -> None:
    """Finding B6: NIXL may have let go of it by itself; and it is met again like a new one."""
    one, other = sides
    peer = one.transport.add_peer(other.transport.metadata())
    one.kept[0].remove_remote_agent(peer)
    one.transport.remove_peer(peer)
    assert one.transport.add_peer(other.transport.metadata()) == peer
    assert one.transport.add_peer(other.transport.metadata()) == peer
    other.memory[:8] = 7
    handle = one.transport.post("READ", peer, ranges(one, (0, 8)), ranges(other, (0, 8)))
    until(lambda: one.transport.state(handle) is TransferState.DONE)
    assert (one.memory[:8] == 7).all()
    one.transport.release(handle)


def test_memory_that_was_not_registered_is_an_error(sides: tuple[Side, Side]) -> None:
    """NIXL refuses the descriptors; the in-memory transport, which registers nothing, is left out."""
    one, other = sides
    if isinstance(one.transport, MemoryTransport):
        pytest.skip("the in-memory transport registers nothing")
    stray = np.zeros(4096, dtype=np.uint8)
    peer = one.transport.add_peer(other.transport.metadata())
    with pytest.raises(TransportError):
        one.transport.post(
            "WRITE", peer, np.array([(stray.ctypes.data, 10)], dtype=np.int64), ranges(other, (0, 10)), b"x"
        )
    with pytest.raises(TransportError):
        one.transport.post(
            "WRITE", peer, ranges(one, (0, 10)), np.array([(stray.ctypes.data, 10)], dtype=np.int64), b"x"
        )
