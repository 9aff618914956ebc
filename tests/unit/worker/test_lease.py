# SPDX-License-Identifier: Apache-2.0
"""worker/lease.py on a clock that stands still: every transition, and against a simple model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_nixl.clock import ManualClock
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.worker.lease import Leases

LEASE = 30.0
EXTENSION = 20.0
P1, P2, P3 = (PrefillRequestId(name) for name in ("p1", "p2", "p3"))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(-1000.0)


@pytest.fixture
def leases(clock: ManualClock) -> Leases:
    return Leases(clock, extension_seconds=EXTENSION)


def test_a_lease_that_nobody_renews_expires_once(clock: ManualClock, leases: Leases) -> None:
    leases.grant(P1, LEASE)
    clock.advance(LEASE - 0.1)
    assert leases.expire() == [] and P1 in leases
    clock.advance(0.1)
    assert leases.expire() == [P1] and P1 not in leases
    assert leases.expire() == [] and len(leases) == 0


def test_a_beat_adds_two_thirds_from_then_on_and_never_takes_away(clock: ManualClock, leases: Leases) -> None:
    leases.grant(P1, LEASE)
    leases.renew([P1])
    assert leases.next_seconds == clock.now_seconds() + LEASE
    clock.advance(15)
    leases.renew([P1])
    assert leases.next_seconds == clock.now_seconds() + EXTENSION
    clock.advance(EXTENSION)
    assert leases.expire() == [P1]


def test_a_late_beat_revives_nothing(clock: ManualClock, leases: Leases) -> None:
    """Also one that comes when the time is over and nobody has looked yet: which of the two is first is chance."""
    leases.grant(P1, LEASE)
    clock.advance(LEASE)
    leases.renew([P1])
    assert leases.expire() == [P1]
    leases.renew([P1])
    assert P1 not in leases


def test_a_renewed_lease_shelters_no_expired_one(clock: ManualClock, leases: Leases) -> None:
    leases.grant(P1, LEASE)
    leases.grant(P2, LEASE)
    clock.advance(25)
    leases.renew([P1])
    clock.advance(5)
    assert leases.expire() == [P2]


def test_beats_of_two_decode_ranks_are_as_good_as_one(clock: ManualClock, leases: Leases) -> None:
    leases.grant(P1, LEASE)
    clock.advance(20)
    leases.renew([P1])
    leases.renew([P1, P1])
    assert leases.next_seconds == clock.now_seconds() + EXTENSION


def test_a_beat_for_what_was_fetched_or_is_not_granted_yet_does_nothing(clock: ManualClock, leases: Leases) -> None:
    leases.grant(P1, LEASE)
    leases.end(P1)
    leases.end(P1)
    leases.renew([P1, P2])
    clock.advance(LEASE)
    assert leases.expire() == []


def test_a_request_may_be_granted_a_lease_again(clock: ManualClock, leases: Leases) -> None:
    leases.grant(P1, LEASE)
    clock.advance(LEASE)
    leases.expire()
    leases.grant(P1, LEASE)
    assert leases.next_seconds == clock.now_seconds() + LEASE


IDS = st.sampled_from([P1, P2, P3])
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), IDS, st.integers(1, 40)),
        st.tuples(st.just("renew"), st.lists(IDS, max_size=3), st.none()),
        st.tuples(st.just("end"), IDS, st.none()),
        st.tuples(st.just("advance"), st.none(), st.integers(0, 15)),
        st.tuples(st.just("expire"), st.none(), st.none()),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_they_are_a_dictionary_that_is_searched(operations: list[tuple[str, Any, Any]]) -> None:
    clock = ManualClock()
    leases = Leases(clock, extension_seconds=EXTENSION)
    ends: dict[str, float] = {}
    for operation, what, amount in operations:
        now = clock.now_seconds()
        match operation:
            case "grant":
                leases.grant(what, float(amount))
                ends[what] = now + amount
            case "renew":
                leases.renew(what)
                ends |= {one: max(ends[one], now + EXTENSION) for one in what if ends.get(one, now) > now}
            case "end":
                leases.end(what)
                ends.pop(what, None)
            case "advance":
                clock.advance(amount)
            case _:
                due = {one for one, end in ends.items() if end <= now}
                assert sorted(leases.expire()) == sorted(due)
                ends = {one: end for one, end in ends.items() if one not in due}
        assert len(leases) == len(ends)
        assert all((one in leases) == (one in ends) for one in (P1, P2, P3))
        assert leases.next_seconds == min(ends.values(), default=None)
