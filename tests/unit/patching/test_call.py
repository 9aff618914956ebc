# SPDX-License-Identifier: Apache-2.0
"""`kvcached_nixl.patching.patch`: an argument is found as Python itself would bind it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_nixl.patching.patch import Call, positions_of


def ordinary(one: Any, two: Any, three: Any = 3) -> Any:
    return one, two, three


def variadic(one: Any, *more: Any, two: Any = 2, **others: Any) -> Any:
    return one, more, two, others


def by_position(one: Any, /, two: Any, three: Any = 3) -> Any:
    return one, two, three


@pytest.mark.parametrize(
    ("called", "expected"),
    [
        (ordinary, {"one": 0, "two": 1, "three": 2}),
        (variadic, {"one": 0}),
        (by_position, {"one": 0, "two": 1, "three": 2}),
        (lambda: None, {}),
    ],
)
def test_positions_are_those_of_parameters_that_may_be_passed_by_position(
    called: Callable[..., Any], expected: dict[str, int]
) -> None:
    assert positions_of(inspect.signature(called)) == expected


@given(
    called=st.sampled_from([ordinary, variadic, by_position]),
    args=st.lists(st.integers(), max_size=4),
    kwargs=st.dictionaries(st.sampled_from(["one", "two", "three", "four"]), st.integers(), max_size=3),
    overrides=st.dictionaries(st.sampled_from(["one", "two", "three", "four"]), st.text(max_size=1), max_size=2),
)
def test_a_call_is_bound_as_python_binds_it(
    called: Callable[..., Any], args: list[int], kwargs: dict[str, int], overrides: dict[str, str]
) -> None:
    """Whatever a caller that Python would accept passes by position or by keyword."""
    signature = inspect.signature(called)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return
    call = Call(called, None, tuple(args), kwargs, signature, positions_of(signature))
    bound.apply_defaults()
    for name in ("one", "two", "three", "four"):
        assert outcome(call.argument, name) == bound.arguments.get(name, TypeError)
    expected: Any = TypeError
    if overrides.keys() <= signature.parameters.keys():
        bound.arguments.update(overrides)
        expected = called(*bound.args, **bound.kwargs)
    assert outcome(call.proceed, **overrides) == expected
    assert outcome(Call(called, None, tuple(args), kwargs).proceed, **overrides) == expected, "signature is read"


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except TypeError:
        return TypeError
