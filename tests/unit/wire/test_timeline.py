# SPDX-License-Identifier: Apache-2.0
"""`kvcached_nixl.wire.timeline`: states without gaps, and what a worker sends of them."""

from __future__ import annotations

import pytest

from kvcached_nixl.wire.timeline import MOST_MARKS, State, Timeline


def decoded() -> Timeline:
    found = Timeline()
    found.enter(State.DECODE_ALLOCATED, 1.0)
    found.enter(State.DECODE_HANDSHAKE, 1.5)
    found.enter(State.DECODE_MOVING, 2.0)
    return found


def test_states_add_up_to_the_whole() -> None:
    found = decoded()
    found.enter(State.DECODE_VERIFYING, 3.0)
    found.end(3.25)
    assert found.lasted() == {
        State.DECODE_ALLOCATED: 0.5,
        State.DECODE_HANDSHAKE: 0.5,
        State.DECODE_MOVING: 1.0,
        State.DECODE_VERIFYING: 0.25,
    }
    assert sum(found.lasted().values()) == 3.25 - 1.0
    found.end(9.0)
    assert found.end_seconds == 3.25, "it has ended"


def test_a_timeline_is_bounded() -> None:
    """However often an offer is asked for and given up."""
    found = decoded()
    for number in range(2 * MOST_MARKS):
        found.enter(State.PREFILL_OFFERED if number % 2 else State.PREFILL_SENDING, 5e3 + number)
    found.end(1e5)
    assert len(found.marks) == MOST_MARKS and sum(found.lasted().values()) == pytest.approx(1e5 - 1.0)


def test_a_workers_timeline_takes_the_place_of_the_time_in_which_the_scheduler_knew_nothing() -> None:
    of_request = Timeline()
    of_request.enter(State.DECODE_HELD, 0.0)
    of_request.enter(State.DECODE_QUEUED, 0.25)
    of_request.enter(State.DECODE_REPORTING, 0.5)
    of_rank = decoded()
    of_rank.end(3.0)
    of_request.take_in(of_rank.marks, 3.0)
    of_request.enter(State.DECODE_RESUMING, 3.125)
    of_request.end(4.0)
    assert [(one.state, one.begin_seconds) for one in of_request.intervals()] == [
        (State.DECODE_HELD, 0.0),
        (State.DECODE_QUEUED, 0.25),
        (State.DECODE_ALLOCATED, 0.5),
        (State.DECODE_HANDSHAKE, 1.5),
        (State.DECODE_MOVING, 2.0),
        (State.DECODE_REPORTING, 3.0),
        (State.DECODE_RESUMING, 3.125),
    ]
    assert sum(of_request.lasted().values()) == 4.0
