# SPDX-License-Identifier: Apache-2.0
"""experiments/dashboard: what it makes of Prometheus' answers."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("yaml", reason="needs an environment: bash experiments/env.sh")

from experiments.dashboard.pairs import OK, Load
from experiments.dashboard.queries import Query
from experiments.dashboard.report import PLANTED, Answer, judge

GOOD, OTHER = Query("row", "good", "sum(up)", "{{a}}"), Query("row", "other", "sum($__range)")


def missed(*found: Answer, loads: tuple[Load, ...] = ()) -> list[str]:
    return [one.target for one in judge([*found, Answer(PLANTED)], loads) if not one.reached]


def test_each_query_has_to_return_something() -> None:
    full, empty = Answer(GOOD, [({}, [(0.0, 0.0)])]), Answer(OTHER)
    assert missed(full) == []
    assert missed(full, empty) == ["queries that return no value (0)"]


@pytest.mark.parametrize(
    ("load", "found"),
    [
        (Load("pull", 0.0, Counter({OK: 9, "503": 3}), True), []),
        (Load("pull", 0.0, Counter({OK: 3, "503": 9}), True), ["pull: answered (most)"]),
        (Load("pull", 0.0, Counter(), True), ["pull: answered (most)"]),
        (Load("pull", 0.0, Counter({OK: 9}), False), ["pull: no KV in use when idle again (yes)"]),
    ],
)
def test_pairs_have_to_answer_and_to_give_their_memory_back(load: Load, found: list[str]) -> None:
    assert missed(loads=(load,)) == found
