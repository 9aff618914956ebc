# SPDX-License-Identifier: Apache-2.0
"""experiments/fleet_change: each target can be missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("openai", reason="the official client is not installed")

from experiments.fleet_change import measure
from experiments.fleet_change.measure import KILL_DECODE, Phase, judge, table_of

GOOD = Phase("pull", "restart", 1.0, {"right": 9}, 0)


@pytest.mark.parametrize(
    ("change", "outcomes", "more", "missed"),
    [
        ("restart", {}, {}, ""),
        ("kill a decode", {"error in a stream that had begun": 1}, {"failed_hand_overs": 1}, ""),
        ("kill a decode", {"wrong": 1}, {}, "wrong"),
        ("version", {"no end": 1}, {}, "without an end"),
        ("kill a prefill", {"error before the first token": 1}, {}, "errors"),
        ("busy", {"error in a stream that had begun": 1}, {}, "errors"),
        ("kill all prefills", {}, {"failed_hand_overs": 9}, ""),
    ],
)
def test_each_target_can_be_missed(change: str, outcomes: dict[str, int], more: dict[str, int], missed: str) -> None:
    phases = [GOOD, replace(GOOD, change=change, outcomes={"right": 9, **outcomes}, **more)]
    found = [one.target for one in judge(phases) if not one.reached]
    assert found == [one.target for one in judge(phases) if missed and missed in one.target]
    assert len(found) == bool(missed) and {change, KILL_DECODE} <= {*measure.CHANGES}
    assert table_of(phases).row_count == 2
