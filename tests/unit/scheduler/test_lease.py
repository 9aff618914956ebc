# SPDX-License-Identifier: Apache-2.0
"""scheduler/lease.py: who is renewed when, on a clock that stands still."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_nixl.clock import ManualClock
from kvcached_nixl.ids import DecodeRequestId
from kvcached_nixl.scheduler.lease import Renewals
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.params import RemotePrefill

INTERVAL = 5.0
HERE, THERE = RemotePrefill("here", "10.0.0.1", 5600, 1), RemotePrefill("there", "10.0.0.2", 5600, 2)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def renewals(clock: ManualClock) -> Renewals:
    made = Renewals(clock, lease_seconds=6 * INTERVAL)
    made.take_beats()
    return made


def params(theirs: object, prefill: RemotePrefill = HERE, **others: Any) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "remote_request_id": theirs,
        "remote_engine_id": prefill.engine_id,
        "remote_host": prefill.host,
        "remote_port": prefill.port,
        "tp_size": prefill.tp_size,
        **others,
    }


def begin(renewals: Renewals, ours: str, theirs: str, prefill: RemotePrefill = HERE) -> None:
    renewals.begin(DecodeRequestId(ours), params(theirs, prefill), theirs)


def end(renewals: Renewals, ours: str) -> None:
    renewals.end(DecodeRequestId(ours))


def test_a_request_is_renewed_with_the_next_step_and_then_once_an_interval(
    clock: ManualClock, renewals: Renewals
) -> None:
    """Before anything is allocated for it."""
    begin(renewals, "d1", "p1")
    assert renewals.take_beats() == [(HERE, ["p1"])]
    assert renewals.take_beats() == []
    clock.advance(INTERVAL - 0.1)
    assert renewals.take_beats() == []
    clock.advance(0.1)
    assert renewals.take_beats() == [(HERE, ["p1"])]
    end(renewals, "d1")
    clock.advance(INTERVAL)
    assert renewals.take_beats() == [] and len(renewals) == 0


def test_those_of_one_prefill_are_renewed_together(clock: ManualClock, renewals: Renewals) -> None:
    """And those that are new do not wait for the others, nor bring them along."""
    for number in range(3):
        begin(renewals, f"d{number}", f"p{number}", THERE if number == 1 else HERE)
    assert renewals.take_beats() == [(HERE, ["p0", "p2"]), (THERE, ["p1"])]
    clock.advance(INTERVAL / 2)
    begin(renewals, "d3", "p3")
    assert renewals.take_beats() == [(HERE, ["p3"])]
    clock.advance(INTERVAL / 2)
    assert renewals.take_beats() == [(HERE, ["p0", "p2", "p3"]), (THERE, ["p1"])]


def test_a_lease_is_renewed_until_the_last_request_that_wants_it_has_ended(
    clock: ManualClock, renewals: Renewals
) -> None:
    """A client that repeats its request: prefill's id is the same, decode's are two."""
    begin(renewals, "d1", "p1")
    begin(renewals, "d2", "p1")
    assert renewals.take_beats() == [(HERE, ["p1"])]
    for ours, beaten in (("d1", [(HERE, ["p1"])]), ("d1", [(HERE, ["p1"])]), ("d2", [])):
        end(renewals, ours)
        clock.advance(INTERVAL)
        assert renewals.take_beats() == beaten


def test_a_request_that_comes_and_goes_between_two_steps(renewals: Renewals) -> None:
    begin(renewals, "d1", "p1")
    end(renewals, "d1")
    assert renewals.take_beats() == []
    begin(renewals, "d1", "p1")
    assert renewals.take_beats() == [(HERE, ["p1"])]


@pytest.mark.parametrize(
    "given_params",
    [
        None,
        {},
        params("p1", do_remote_prefill=False),
        params(None),
        params(""),
        params(7),
        params("p1", remote_port=0),
        {"do_remote_prefill": True, "remote_request_id": "p1"},
    ],
    ids=str,
)
def test_a_request_without_somebody_elses_kv_has_no_lease(
    renewals: Renewals, given_params: dict[str, Any] | None
) -> None:
    renewals.begin(DecodeRequestId("d1"), given_params, (given_params or {}).get("remote_request_id"))
    end(renewals, "d1")
    assert renewals.take_beats() == []


def test_an_id_that_a_beat_cannot_name_is_warned_of_once(renewals: Renewals, caplog: pytest.LogCaptureFixture) -> None:
    """The others go on being renewed."""
    with caplog.at_level(logging.WARNING, SERVER_LOGGER):
        begin(renewals, "d1", "a,b")
        begin(renewals, "d2", "c,d")
        begin(renewals, "d3", "p3")
    assert len(caplog.messages) == 1
    assert all(word in caplog.text for word in ("d1", "'a,b'", "comma", "X-Request-Id"))
    assert renewals.take_beats() == [(HERE, ["p3"])]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 5), st.integers(0, 2)),
        st.tuples(st.just("end"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("step"), st.just(0), st.integers(0, 4)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_what_is_wanted_is_never_without_a_beat_for_longer_than_an_interval(events: list[tuple[str, int, int]]) -> None:
    """And nothing else is renewed."""
    clock = ManualClock()
    renewals = Renewals(clock, lease_seconds=6 * INTERVAL)
    wanted: dict[str, str] = {}
    beaten: dict[str, float] = {}
    for event, ours, number in [*events, ("step", 0, 0)]:
        if event == "begin":
            begin(renewals, f"d{ours}", f"p{number}")
            wanted.setdefault(f"d{ours}", f"p{number}")
        elif event == "end":
            end(renewals, f"d{ours}")
            wanted.pop(f"d{ours}", None)
        else:
            clock.advance(number)
            renewed = [theirs for _, group in renewals.take_beats() for theirs in group]
            assert len(set(renewed)) == len(renewed) and set(renewed) <= set(wanted.values())
            beaten |= dict.fromkeys(renewed, clock.now_seconds())
            assert all(clock.now_seconds() - beaten[one] < INTERVAL for one in wanted.values())
