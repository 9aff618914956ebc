# SPDX-License-Identifier: Apache-2.0
"""worker/outcomes.py: each outcome is delivered once, and a sleeping engine is woken until it takes it."""

from __future__ import annotations

from support.clocks import ManualClock
from support.worker_fakes import wanted

from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.worker.outcomes import TELL_AGAIN_SECONDS, OutcomeQueue

P1 = PrefillRequestId("p1")


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
