# SPDX-License-Identifier: Apache-2.0
"""The verdict over an experiment's targets."""

from __future__ import annotations

import pytest

from experiments.common.targets import Verdict, as_json, exit_status


@pytest.mark.parametrize(("reached", "status"), [([True, True], 0), ([True, False], 1), ([], 0)])
def test_one_missed_target_is_the_exit_status(reached: list[bool], status: int) -> None:
    assert exit_status(Verdict("less than 2 s", "1 s", one) for one in reached) == status


def test_the_results_hold_all_of_it() -> None:
    assert as_json([Verdict("less than 2 s", "3 s", False)]) == [
        {"target": "less than 2 s", "found": "3 s", "reached": False}
    ]
