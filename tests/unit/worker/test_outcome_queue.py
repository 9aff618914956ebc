# SPDX-License-Identifier: Apache-2.0
"""worker/outcomes.py: each outcome is delivered once, and a sleeping engine is woken until it takes it."""

from __future__ import annotations

from collections import Counter

from support.worker_fakes import manifest, wanted

from kvcached_nixl.deadlines import ManualClock
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed, RevocationCause
from kvcached_nixl.worker.outcomes import TELL_AGAIN_SECONDS, Failed, Outcome, OutcomeQueue
from kvcached_nixl.worker.staging.slab import SlabUse
from kvcached_nixl.worker.transfer.transfer_queue import TransferTally

P1 = PrefillRequestId("p1")


def test_everything_is_taken_once() -> None:
    outcomes = OutcomeQueue(ManualClock())
    assert outcomes.take() == Outcome()
    outcomes.failed(wanted(1, manifest(7, 3, 9)), HandOverFailed(FailureCause.LEASE, "token_table"))
    outcomes.finished(wanted(1))
    outcomes.done(P1)
    outcomes.hold_idle(4)
    outcomes.expired(P1)
    outcomes.moved(TransferTally(10, 2, 0.5))
    outcomes.revoked(RevocationCause.BLOCKS)
    outcomes.spared(3)
    outcomes.claimed(7)
    assert outcomes.take() == Outcome(
        finished={1},
        failed={1: Failed(wanted(1).request_id, FailureCause.LEASE, "token_table")},
        done={P1},
        idle_holds={4},
        expired={P1},
        moved=[(10, 2, 0.5)],
        revoked=Counter({RevocationCause.BLOCKS: 1}),
        spared={3},
        claimed={7},
    )
    assert outcomes.take() == Outcome()


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
    outcomes = OutcomeQueue(ManualClock())
    for num_bytes in (100, 20):
        outcomes.moved_bytes(num_bytes)
    assert not outcomes.take_news(), "the transfer's end is news"
    assert outcomes.take().moved_bytes == 120 and outcomes.take().moved_bytes == 0


def test_a_slabs_use_is_told_where_it_has_changed() -> None:
    """An idle engine is woken only when the slab is empty again: its figures would stay as they were for good."""
    outcomes = OutcomeQueue(ManualClock())
    empty, busy = SlabUse(1024, 8, 0, 0, 0, 0), SlabUse(1024, 8, 0, 3, 0, 1)
    outcomes.slab(empty, 0)
    assert outcomes.take().slab == empty and not outcomes.take_news()
    outcomes.slab(empty, 0)
    assert outcomes.take().slab is None
    outcomes.slab(busy, 1)
    outcomes.slab(busy, 2)
    assert not outcomes.take_news()
    found = outcomes.take()
    assert (found.slab, found.slab_waits) == (busy, 2)
    outcomes.slab(empty, 2)
    assert outcomes.take_news()
    found = outcomes.take()
    assert (found.slab, found.slab_waits) == (empty, 0)
