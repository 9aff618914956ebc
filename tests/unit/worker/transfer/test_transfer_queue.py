# SPDX-License-Identifier: Apache-2.0
"""transfer/transfer_queue.py: bytes in flight are bounded, ends of transfers are awaited, no peer blocks another."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clocks import ManualClock
from support.internals import bytes_in_flight, leftovers, num_dropped
from support.memory_transport import Network, Posted

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.transport.agent import TransferState, TransportError
from kvcached_nixl.worker.transfer.transfer_queue import (
    DROPPED_POLL_SECONDS,
    MOVING_SECONDS,
    POSTING_SECONDS,
    Budget,
    TransferJob,
    TransferQueue,
)

ROW = 8
SMALL = Budget(descriptors=4, batch_bytes=2 * ROW, peer_bytes=4 * ROW, all_bytes=6 * ROW, peer_transfers=3)


class Mover:
    """`TransferQueue` to some peers, and memory of its own to move."""

    def __init__(
        self,
        budget: Budget | None = SMALL,
        peers: tuple[str, ...] = ("a", "b", "c"),
        clock: Clock | None = None,
    ) -> None:
        self.network = Network()
        self.clock = ManualClock()
        self.transport = self.network.agent("here")
        for peer in peers:
            self.network.agent(peer)
            self.transport.add_peer(peer.encode())
        self.lost: list[str] = []
        self.ended: dict[str, str] = {}
        self.moved: list[int] = []
        self.transfer_queue = TransferQueue(
            self.transport,
            self.clock if clock is None else clock,
            self.lose,
            budget,
            self.moved.append,
        )
        self.memory = np.zeros((2, 4096), dtype=np.int64)

    def lose(self, peer: str) -> None:
        self.lost.append(peer)
        self.transport.remove_peer(peer)

    def job(self, name: str, rows: int, peer: str = "a", *, is_urgent: bool = False, **more: Any) -> TransferJob:
        starts = self.memory.ctypes.data + ROW * np.arange(rows, dtype=np.int64)
        ranges = np.stack((starts, np.full(rows, ROW)), axis=1)
        there = ranges + np.array([self.memory.strides[0], 0])
        job = TransferJob("WRITE", peer, ranges, there, lambda failed: self.end(name, failed), **more)
        self.transfer_queue.submit(job, is_urgent=is_urgent)
        return job

    def end(self, name: str, failed: str) -> None:
        assert name not in self.ended, "ended twice"
        self.ended[name] = failed

    def in_flight(self, peer: str | None = None) -> list[Posted]:
        return [one for one in self.network.pending if peer in (None, one.receiver)]

    def rows(self, peer: str | None = None) -> int:
        return sum(len(one.local) for one in self.in_flight(peer) if one.local is not None)

    def deliver(self, *posted: Posted) -> None:
        for one in posted:
            self.network.deliver(one)
        self.transfer_queue.turn()


@pytest.mark.parametrize(
    ("budget", "rows", "batches"),
    [
        (Budget(descriptors=3, batch_bytes=100 * ROW), 10, [3, 3, 3, 1]),
        (Budget(descriptors=100, batch_bytes=4 * ROW), 10, [4, 4, 2]),
        (Budget(descriptors=100, batch_bytes=1), 3, [1, 1, 1]),
        (Budget(peer_transfers=2, descriptors=3), 10, [3, 3]),
        (Budget(), 10, [10]),
    ],
    ids=["descriptors", "bytes", "less than a row", "transfers", "as it is"],
)
def test_batches_are_cut_to_size(budget: Budget, rows: int, batches: list[int]) -> None:
    mover = Mover(budget)
    mover.job("one", rows)
    mover.transfer_queue.turn()
    assert [len(one.local) for one in mover.in_flight() if one.local is not None] == batches


def test_however_many_peers_have_nothing_in_flight_there_is_an_end() -> None:
    """At most twice the common budget is in flight."""
    peers = tuple(f"p{number}" for number in range(40))
    mover = Mover(peers=peers)
    for peer in peers:
        mover.job(peer, 10, peer)
    for _ in range(10):
        mover.transfer_queue.turn()
    assert 12 <= mover.rows() <= 14
    while len(mover.ended) < 40:
        mover.deliver(mover.in_flight()[0])


def test_a_peer_that_takes_nothing_costs_the_others_its_budget_and_no_more() -> None:
    mover = Mover()
    mover.job("slow", 1000, "a")
    mover.transfer_queue.turn()
    for number in range(20):
        mover.job(str(number), 10, "b")
    for _ in range(200):
        mover.deliver(*mover.in_flight("b"))
    assert [str(number) in mover.ended for number in range(20)] == [True] * 20
    assert mover.rows("a") == 4


def test_where_a_turns_time_runs_out_another_peer_comes_first_in_the_next() -> None:
    class Slow:
        """A clock that advances by half of a turn's time whenever it is read."""

        def __init__(self) -> None:
            self.now = 0.0

        def now_seconds(self) -> float:
            self.now += POSTING_SECONDS / 2
            return self.now

    mover = Mover(Budget(descriptors=1, peer_bytes=1000 * ROW), peers=("a", "b"), clock=Slow())
    mover.job("a", 100, "a")
    mover.job("b", 100, "b")
    posted = []
    for _ in range(4):
        before = set(mover.in_flight())
        mover.transfer_queue.turn()
        posted.append({one.receiver for one in mover.in_flight() if one not in before})
    assert {"a"} in posted and {"b"} in posted
    assert all(len(one) == 1 for one in posted)


def test_what_is_left_to_post_counts_as_moving_unless_its_peer_stands_still() -> None:
    clock = ManualClock(100.0)
    mover = Mover(Budget(descriptors=1, peer_transfers=2), clock=clock)
    assert not mover.transfer_queue.is_moving
    mover.job("a", 4)
    mover.transfer_queue.turn()
    assert mover.transfer_queue.is_moving and not mover.transfer_queue.has_more, "the budget is used up"
    clock.advance(MOVING_SECONDS)
    mover.transfer_queue.turn()
    assert not mover.transfer_queue.is_moving
    mover.deliver(mover.in_flight()[0])
    mover.transfer_queue.turn()
    assert mover.transfer_queue.is_moving
    while mover.network.pending:
        mover.deliver(*mover.in_flight())
    assert mover.ended == {"a": ""} and not mover.transfer_queue.is_moving


# -------------------------------------------------------------------------------------------------------------- failure


def test_a_failed_transfer_loses_the_peer_and_ends_when_the_rest_is_idle() -> None:
    """A failed transfer may have moved any part of its bytes, and others of its job are still in flight (nixl#2044)."""
    mover = Mover()
    mover.job("one", 100)
    mover.job("behind", 1)
    mover.job("other", 3, "b")
    mover.transfer_queue.turn()
    first, second = mover.in_flight("a")
    mover.network.fail(first)
    mover.transfer_queue.turn()
    assert set(mover.lost) == {"a"}
    assert "one" not in mover.ended, "its second batch is in flight"
    assert second.state is TransferState.IN_FLIGHT and not second.released
    assert not first.released, "the connection is open, and what is left of it may arrive"
    with pytest.raises(TransportError, match="could not be closed yet"):
        mover.transport.add_peer(b"a")
    mover.network.fail(second)
    for _ in range(2):
        mover.clock.advance(DROPPED_POLL_SECONDS)
        mover.transfer_queue.turn()
    assert mover.ended["one"] == "a WRITE failed" and "no peer" in mover.ended["behind"]
    while mover.network.pending:
        mover.deliver(*mover.in_flight())
    assert mover.ended["other"] == ""
    assert mover.transport.unreleased() == []


# ------------------------------------------------------------------------------------------------------------- given up


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_order_of_ends_leaves_nothing_behind(data: st.DataObject) -> None:
    """Jobs of any size to any peer, dropped, failed, delivered in any order: each ends once, and nothing is left."""
    mover = Mover()
    jobs = []
    for number in range(data.draw(st.integers(1, 8))):
        peer = data.draw(st.sampled_from("abc"))
        jobs.append(mover.job(str(number), data.draw(st.integers(0, 9)), peer, is_urgent=data.draw(st.booleans())))
    for _ in range(200):
        mover.transfer_queue.turn()
        mover.clock.advance(0.03)
        pending = mover.in_flight()
        if not pending and not mover.transfer_queue.is_busy and not num_dropped(mover.transfer_queue):
            break
        assert mover.rows() <= 2 * 6 + 2 + 2 * num_dropped(mover.transfer_queue)
        match data.draw(st.sampled_from(["deliver", "deliver", "fail", "drop"])):
            case "drop":
                job = jobs[data.draw(st.integers(0, len(jobs) - 1))]
                if not job.is_idle:
                    mover.transfer_queue.drop(job)
            case "fail" if pending:
                mover.network.fail(pending[data.draw(st.integers(0, len(pending) - 1))])
            case _ if pending:
                mover.network.deliver(pending[data.draw(st.integers(0, len(pending) - 1))])
        for peer in mover.lost:
            with contextlib.suppress(TransportError):
                mover.transport.add_peer(peer.encode())
    assert len(mover.ended) == len(jobs)
    assert mover.transport.unreleased() == []
    assert not leftovers(mover.transfer_queue) and bytes_in_flight(mover.transfer_queue) == 0


def test_nixl_posts_nothing_on_threads_of_its_own() -> None:
    """From 1,024 descriptors on NIXL's UCX backend posts on its own threads, which select no device."""
    assert Budget().descriptors < 1024
