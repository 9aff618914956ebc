# SPDX-License-Identifier: Apache-2.0
"""Leases and their renewals on a clock that the test moves: every transition, and comparison with a simple model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import leftovers

from kvcached_nixl.deadlines import ManualClock
from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import LeaseRenewal
from kvcached_nixl.worker.decode.receiver import MOST_DUE, Renewals
from kvcached_nixl.worker.prefill.registry import Leases

LEASE = 30.0
EXTENSION = 20.0
P1, P2, P3 = (PrefillRequestId(name) for name in ("p1", "p2", "p3"))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(-1000.0)


@pytest.fixture
def leases(clock: ManualClock) -> Leases:
    return Leases(clock, lease_seconds=LEASE)


def test_a_heartbeat_adds_two_thirds_from_then_on_and_never_takes_away(clock: ManualClock, leases: Leases) -> None:
    leases.grant(P1)
    leases.renew([P1])
    assert leases.first_seconds == clock.now_seconds() + LEASE
    clock.advance(15)
    leases.renew([P1])
    assert leases.first_seconds == clock.now_seconds() + EXTENSION
    clock.advance(EXTENSION)
    assert leases.take_due(clock.now_seconds()) == [P1]


def test_a_late_heartbeat_renews_what_nobody_has_looked_for(clock: ManualClock, leases: Leases) -> None:
    """It may have waited for a long step of prefill's to end. It revives nothing."""
    leases.grant(P1)
    clock.advance(2 * LEASE)
    leases.renew([P1])
    assert leases.take_due(clock.now_seconds()) == []
    clock.advance(EXTENSION)
    assert leases.take_due(clock.now_seconds()) == [P1]
    leases.renew([P1])
    assert P1 not in leases


IDS = st.sampled_from([P1, P2, P3])
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), IDS, st.none()),
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
    leases = Leases(clock, lease_seconds=LEASE)
    ends: dict[str, float] = {}
    for operation, what, amount in operations:
        now = clock.now_seconds()
        match operation:
            case "grant":
                leases.grant(what)
                ends[what] = now + LEASE
            case "renew":
                leases.renew(what)
                ends |= {one: max(ends[one], now + EXTENSION) for one in what if one in ends}
            case "end":
                assert leases.pop(what, None) == ends.pop(what, None)
            case "advance":
                clock.advance(amount)
            case _:
                due = {one for one, end in ends.items() if end <= now}
                assert sorted(leases.take_due(clock.now_seconds())) == sorted(due)
                ends = {one: end for one, end in ends.items() if one not in due}
        assert leases == ends
        assert leases.first_seconds == min(ends.values(), default=None)


# --------------------------------------------------------------------------------------------------------------- decode


HERE, THERE = RemotePrefill("p", "h", 1), RemotePrefill("q", "h", 2)
D1, D2, D3 = (DecodeRequestId(name) for name in ("d1", "d2", "d3"))


@pytest.fixture
def renewals(clock: ManualClock) -> Renewals:
    return Renewals(clock)


def test_a_request_is_renewed_at_once_and_then_once_an_interval(clock: ManualClock, renewals: Renewals) -> None:
    renewals.begin(LeaseRenewal(D1, HERE, "p1", LEASE))
    assert renewals.first_seconds == clock.now_seconds()
    assert renewals.take_due() == {HERE: ["p1"]}
    assert renewals.take_due() == {}
    clock.advance(LEASE / 6 - 0.1)
    assert renewals.take_due() == {}
    clock.advance(0.1)
    assert renewals.take_due() == {HERE: ["p1"]}
    assert renewals.first_seconds == pytest.approx(clock.now_seconds() + LEASE / 6)


def test_each_lease_has_its_own_interval(clock: ManualClock, renewals: Renewals) -> None:
    """Prefill says how long it grants."""
    renewals.begin(LeaseRenewal(D1, HERE, "p1", LEASE))
    renewals.begin(LeaseRenewal(D2, HERE, "p2", LEASE / 10))
    renewals.take_due()
    clock.advance(LEASE / 60)
    assert renewals.take_due() == {HERE: ["p2"]}


def test_those_of_one_prefill_are_renewed_together(renewals: Renewals) -> None:
    for name, prefill in ((D1, HERE), (D2, THERE), (D3, HERE)):
        renewals.begin(LeaseRenewal(name, prefill, f"of {name}", LEASE))
    assert renewals.take_due() == {HERE: ["of d1", "of d3"], THERE: ["of d2"]}


def test_a_lease_is_renewed_until_the_last_request_that_wants_it_has_ended(
    clock: ManualClock, renewals: Renewals
) -> None:
    """``n`` > 1: several of decode's want one of prefill's; it is beaten for once."""
    for name in (D1, D2):
        renewals.begin(LeaseRenewal(name, HERE, "p1", LEASE))
    assert renewals.take_due() == {HERE: ["p1"]}
    renewals.end(D1)
    renewals.end(D1)
    clock.advance(LEASE)
    assert renewals.take_due() == {HERE: ["p1"]}
    renewals.end(D2)
    clock.advance(LEASE)
    assert renewals.take_due() == {} and renewals.first_seconds is None and not leftovers(renewals)


def test_a_request_arrives_once(renewals: Renewals) -> None:
    renewals.begin(LeaseRenewal(D1, HERE, "p1", LEASE))
    renewals.begin(LeaseRenewal(D1, THERE, "p2", LEASE))
    assert renewals.take_due() == {HERE: ["p1"]}
    renewals.end(D1)
    assert not leftovers(renewals)


def test_a_turn_renews_so_many_and_the_next_one_the_others(renewals: Renewals) -> None:
    for number in range(3 * MOST_DUE):
        renewals.begin(LeaseRenewal(DecodeRequestId(f"d{number}"), HERE, f"p{number}", LEASE))
    found = [name for _ in range(4) for names in renewals.take_due().values() for name in names]
    assert sorted(found) == sorted(f"p{number}" for number in range(3 * MOST_DUE))


EVENTS = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "advance"]), st.integers(0, 3), st.integers(0, 2)), max_size=60
)


@given(EVENTS)
def test_what_is_wanted_is_never_without_a_heartbeat_for_longer_than_an_interval(
    events: list[tuple[str, int, int]],
) -> None:
    clock = ManualClock()
    renewals = Renewals(clock)
    wanted: dict[int, int] = {}
    beaten: dict[int, float] = {}
    for event, request, lease in events:
        name = DecodeRequestId(str(request))
        if event == "begin" and request not in wanted:
            wanted[request] = lease
            renewals.begin(LeaseRenewal(name, HERE, str(lease), LEASE))
        elif event == "end":
            renewals.end(name)
            wanted.pop(request, None)
        elif event == "advance":
            clock.advance(1.0)
        for found in renewals.take_due().get(HERE, []):
            assert int(found) in wanted.values()
            beaten[int(found)] = clock.now_seconds()
        for one in wanted.values():
            assert clock.now_seconds() - beaten[one] < LEASE / 6
