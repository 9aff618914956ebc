# SPDX-License-Identifier: Apache-2.0
"""worker/handover/reported.py: what has ended crosses once, and a sleeping engine is told until it looks."""

from __future__ import annotations

from unit.worker_fakes import manifest, wanted

from kvcached_nixl.clock import ManualClock
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.causes import Cause, HandOverFailed
from kvcached_nixl.worker.handover.commands import Failed, Outcome
from kvcached_nixl.worker.handover.reported import TELL_AGAIN_SECONDS, Reported

P1 = PrefillRequestId("p1")


def test_everything_is_taken_once() -> None:
    reported = Reported(ManualClock())
    assert reported.take() == Outcome()
    reported.failed(wanted(1, manifest(7, 3, 9)), HandOverFailed(Cause.LEASE, "words"))
    reported.over(wanted(1))
    reported.done(P1)
    reported.quiet(4)
    reported.expired(P1)
    reported.moved("READ", 10, 2, 0.5)
    assert reported.take() == Outcome(
        over={1},
        failed={1: Failed(wanted(1).request_id, Cause.LEASE, "words")},
        done={P1},
        quiet={4},
        expired={P1},
        moved=[(10, 2, 0.5)],
    )
    assert reported.take() == Outcome()


def test_the_engine_is_told_at_once_and_again_until_it_looks() -> None:
    """A word may get lost, and memory would not come back before the next request."""
    clock = ManualClock()
    reported = Reported(clock)
    assert not reported.take_news()
    for report in (
        lambda: reported.over(wanted(1)),
        lambda: reported.failed(wanted(1), HandOverFailed(Cause.LOST, "")),
        lambda: reported.done(P1),
        lambda: reported.quiet(4),
    ):
        report()
        assert reported.take_news()
        report()
        assert not reported.take_news(), "one word for what it takes at once"
        clock.advance(TELL_AGAIN_SECONDS)
        assert reported.take_news()
        reported.take()
        clock.advance(TELL_AGAIN_SECONDS)
        assert not reported.take_news()


def test_what_can_wait_wakes_nobody() -> None:
    """Figures, and a lease whose request is done, too."""
    reported = Reported(ManualClock())
    reported.moved("WRITE", 1, 1, 1.0)
    reported.expired(P1)
    assert not reported.take_news()
