# SPDX-License-Identifier: Apache-2.0
"""worker/outcomes.py: each outcome is delivered once, and a sleeping engine is woken until it takes it."""

from __future__ import annotations

from collections import Counter

import pytest
from support.worker_fakes import manifest, wanted

from kvcached_nixl.deadlines import ManualClock
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed, RevocationCause
from kvcached_nixl.wire.step import Report, Step, WakeAddress
from kvcached_nixl.worker.outcomes import MOST_REASON, TELL_AGAIN_SECONDS, OutcomeQueue, WorkerCounters
from kvcached_nixl.worker.transfer.slab import SlabUse
from kvcached_nixl.worker.transfer.transfer_queue import TransferTally

P1 = PrefillRequestId("p1")
WAKE = WakeAddress("127.0.0.1", 1, "k")


def test_everything_is_taken_once(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = OutcomeQueue(ManualClock(), 3)
    assert outcomes.take() == (set(), Report())
    outcomes.failed(wanted(1, manifest(7, 3, 9)), HandOverFailed(FailureCause.LEASE, "token_table"))
    outcomes.finished(wanted(1))
    outcomes.done(P1)
    outcomes.hold_idle(4)
    outcomes.spared(3)
    outcomes.claimed(7)
    outcomes.known(8)
    expected = Report({(1, 3)}, {(4, 3)}, {1: (FailureCause.LEASE, "token_table")}, {3}, {7}, {8})
    assert outcomes.take() == ({P1}, expected)
    assert outcomes.take() == (set(), Report())
    assert not caplog.text, "the scheduler logs it"
    outcomes.failed(wanted(2), HandOverFailed(FailureCause.CHECKSUM, "other bytes" * 1000))
    assert len(outcomes.take()[1].failed[2][1]) == MOST_REASON
    assert "cause=checksum" in caplog.text and "other bytes" in caplog.text


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_counts_are_taken_once_and_the_engines_own_by_one_rank(tp_rank: int, caplog: pytest.LogCaptureFixture) -> None:
    """Each rank reports its transfers and leases; only the first reports the scheduler's counts."""
    outcomes = OutcomeQueue(ManualClock(), tp_rank, ("push", "host"))
    for blocks in (3, None):
        counts = {FailureCause.LEASE: 1, FailureCause.LOST: 2}
        outcomes.computed(Step("h", 1, WAKE, "s", counts=counts, quarantined_blocks=blocks))
    outcomes.expired(P1)
    outcomes.moved(TransferTally(10, 2, 0.5))
    outcomes.revoked(RevocationCause.LIMIT)
    assert "KV was not fetched: cause=lease prefill_request=p1: " in caplog.text
    found, is_first = outcomes.take_counted(), tp_rank == 0
    assert (found.moved, found.expired, found.route) == ([(10, 2, 0.5)], 1, ("push", "host"))
    assert found.failures == (Counter({FailureCause.LEASE: 2, FailureCause.LOST: 4}) if is_first else Counter())
    assert found.quarantined_blocks == (3 if is_first else None)
    assert found.revoked == (Counter({RevocationCause.LIMIT: 1}) if is_first else Counter())
    assert outcomes.take_counted() == WorkerCounters(route=("push", "host"))


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


def test_what_can_wait_wakes_nobody() -> None:
    """Figures, and a lease whose request is done, too."""
    outcomes = OutcomeQueue(ManualClock())
    outcomes.moved(TransferTally(1, 1, 1.0))
    outcomes.expired(P1)
    assert not outcomes.take_news()


def test_bytes_are_added_up_until_they_are_taken() -> None:
    """From 0 on, so that the first bytes are a rise."""
    outcomes = OutcomeQueue(ManualClock())
    assert outcomes.take_counted().moved_bytes == 0
    for num_bytes in (100, 20):
        outcomes.moved_bytes(num_bytes)
    assert not outcomes.take_news(), "the transfer's end is news"
    assert outcomes.take_counted().moved_bytes == 120 and outcomes.take_counted().moved_bytes is None


def test_a_slabs_use_is_told_where_it_has_changed() -> None:
    """An idle engine is woken only when the slab is empty again: its figures would stay as they were for good."""
    outcomes = OutcomeQueue(ManualClock(), 1)
    empty, busy = SlabUse(1024, 8, 0, 0, 0, 0), SlabUse(1024, 8, 0, 3, 0, 1)
    outcomes.slab(empty, 0)
    assert outcomes.take_counted().slab == (1, empty) and not outcomes.take_news()
    outcomes.slab(empty, 0)
    assert outcomes.take_counted().slab is None
    outcomes.slab(busy, 1)
    outcomes.slab(busy, 2)
    assert not outcomes.take_news()
    found = outcomes.take_counted()
    assert (found.slab, found.slab_waits) == ((1, busy), 2)
    outcomes.slab(empty, 2)
    assert outcomes.take_news()
    found = outcomes.take_counted()
    assert (found.slab, found.slab_waits) == ((1, empty), 0)
