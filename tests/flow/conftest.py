# SPDX-License-Identifier: Apache-2.0
"""Each flow is watched: a request whose KV is asked for goes from stage to stage as it may, and nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.flow_pair import Pair, nothing_is_left_of_any

from kvcached_nixl.scheduler.asking.wanted import Stage, Wanted

WAITING, LOOKING, ASKED, FETCHING, FAILED, LOCAL, OVER = Stage
NEXT = {
    WAITING: {LOOKING, ASKED, FETCHING, LOCAL, OVER},
    LOOKING: {WAITING, LOCAL, OVER},
    ASKED: {FETCHING, WAITING, LOCAL, OVER},
    FETCHING: {FAILED, LOCAL, OVER},
    FAILED: {WAITING, LOCAL, OVER},
    LOCAL: {OVER},
    OVER: set[Stage](),
}


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    moves: set[tuple[Stage, Stage]] = set()

    def write(wanted: Wanted, name: str, value: Any) -> None:
        before = vars(wanted).get(name, value)
        if name == "stage" and before is not value:
            moves.add((before, value))
        object.__setattr__(wanted, name, value)

    monkeypatch.setattr(Wanted, "__setattr__", write)
    yield
    assert not [(before.name, after.name) for before, after in moves if after not in NEXT[before]]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    Pair.made.clear()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    found = yield
    nothing_is_left_of_any()
    return found
