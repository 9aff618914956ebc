# SPDX-License-Identifier: Apache-2.0
"""How long requests may wait to be asked for, and when those that are refused may try again."""

from __future__ import annotations

import math

import pytest

from kvcached_nixl.scheduler.asking.limits import QueueLimit
from kvcached_nixl.wire.causes import FailureCause


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def now_seconds(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def retry_after(limit: QueueLimit) -> int:
    refusal = limit.refusal()
    assert refusal.cause is FailureCause.QUEUE_TIMEOUT
    found, _, rest = refusal.tags("r").removeprefix("cause=queue_timeout retry_after=").partition(" ")
    assert rest == "request=r", "a client's id comes last"
    return int(found)


def test_those_that_are_neither_asked_for_nor_gone_are_late(clock: Clock) -> None:
    limit = QueueLimit(clock, 30.0)
    assert limit.due_at_seconds is None
    for one in "abc":
        limit.waits(one)
    limit.asked("b")
    limit.gone("c")
    assert limit.due_at_seconds == 130.0 and not limit.take_late()
    clock.now = 130.0
    assert limit.take_late() == ["a"] and limit.due_at_seconds is None


def test_what_counts_is_the_time_between_questions(clock: Clock) -> None:
    limit = QueueLimit(clock, 30.0)
    for waited_seconds in (10.0, 15.0):
        limit.waits("a")
        clock.now += waited_seconds
        limit.asked("a")
        clock.now += 1000.0
    limit.waits("a")
    assert limit.due_at_seconds == clock.now + 5.0
    limit.gone("a")
    limit.waits("a")
    assert limit.due_at_seconds == clock.now + 30.0, "another request"


def test_without_a_limit_nobody_is_late(clock: Clock) -> None:
    limit = QueueLimit(clock, math.inf)
    limit.waits("a")
    assert limit.due_at_seconds is None
    limit.asked("a")
    limit.gone("a")


def test_a_client_may_try_again_after_as_long_as_requests_wait(clock: Clock) -> None:
    limit = QueueLimit(clock, 300.0)
    limit.waits("a")
    limit.asked("a")
    assert retry_after(limit) == 1
    limit.waits("b")
    limit.waits("c")
    clock.now += 7.5
    limit.asked("b")
    assert retry_after(limit) == 8, "so long the last one has waited"
    clock.now += 20.0
    assert retry_after(limit) == 20, "nobody was asked for since"
    clock.now += 1000.0
    assert retry_after(limit) == 60
    limit.gone("c")
    limit.waits("d")
    assert retry_after(limit) == 8, "nobody has waited meanwhile"
