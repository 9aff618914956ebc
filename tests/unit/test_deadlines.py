# SPDX-License-Identifier: Apache-2.0
"""Compares `Deadlines` with a plain dictionary that is searched each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_nixl.deadlines import Deadlines

KEYS = st.integers(0, 5)
TIMES = st.integers(0, 20).map(float)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, TIMES),
        st.tuples(st.just("discard"), KEYS, st.none()),
        st.tuples(st.just("take"), st.none(), TIMES),
    ),
    max_size=80,
)


@given(OPERATIONS)
def test_it_is_a_dictionary_that_is_searched(operations: list[tuple[str, int, float]]) -> None:
    """Whatever is set, moved, dropped and taken, and in whatever order."""
    found, model = Deadlines[int](), dict[int, float]()
    for operation, key, at in operations:
        if operation == "set":
            found[key] = at
            model[key] = at
        elif operation == "discard":
            assert found.pop(key, None) == model.pop(key, None)
        else:
            due = found.take_due(at)
            assert sorted(due) == sorted(one for one, when in model.items() if when <= at)
            assert [model[one] for one in due] == sorted(model[one] for one in due)
            model = {one: when for one, when in model.items() if when > at}
        assert found.first_seconds == min(model.values(), default=None)
        assert found == model and len(found) == len(model)
        assert all((one in found) == (one in model) for one in range(6))


@pytest.mark.parametrize("held", [1, 1000])
def test_what_is_moved_again_and_again_takes_no_more_room(held: int) -> None:
    """A lease that is renewed for hours is one entry."""
    found = Deadlines[int]()
    for turn in range(50):
        for key in range(held):
            found[key] = float(turn)
    assert len(found._heap) <= 2 * held + 17
