# SPDX-License-Identifier: Apache-2.0
"""experiments/dashboard: what it makes of Prometheus' answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("yaml", reason="needs an environment: bash experiments/env.sh")

from experiments.dashboard.pairs import OK, Load
from experiments.dashboard.queries import Query
from experiments.dashboard.report import PLANTED, Answer, judge, run_queries

GOOD, OTHER = Query("row", "good", "sum(up)", "{{a}}"), Query("row", "other", "sum($__range)")


class Prometheus:
    """Answers each expression with the values that a test gives."""

    began_at = 100.0

    def __init__(self, **answers: list[Any]) -> None:
        self.answers: dict[str, list[Any]] = {"time()": [{"metric": {}, "values": [[130, "130"]]}], **answers}
        self.asked: list[str] = []
        self.names = {"127.0.0.1:1": "x"}

    def over_time(self, expression: str) -> list[Any]:
        self.asked.append(expression)
        return self.answers.get(expression, [])


def missed(*found: Answer, loads: tuple[Load, ...] = ()) -> list[str]:
    return [one.target for one in judge([*found, Answer(PLANTED)], loads) if not one.reached]


def test_values_that_are_no_numbers_do_not_count() -> None:
    """A quantile of a histogram without observations."""
    values: list[Any] = [
        {"metric": {"a": "127.0.0.1:1"}, "values": [[101, "1.5"], [103, "NaN"]]},
        {"metric": {}, "values": [[101, "NaN"]]},
    ]
    prometheus = Prometheus(**{"sum(up)": values})
    good, other, planted = run_queries(prometheus, [GOOD, OTHER])  # type: ignore[arg-type]
    assert good.series == [({"a": "x"}, [(1.0, 1.5)])] and good.as_json()["largest"] == 1.5
    assert (other.num_values, planted.query) == (0, PLANTED)
    assert "sum(30s)" in prometheus.asked, "as long as the run"


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
