# SPDX-License-Identifier: Apache-2.0
"""The cost benchmark's verdicts, from samples that the tests make up."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.handshake_cost.__main__ import SIZES_GIB, judge
from experiments.handshake_cost.measure import Sample


def sample(arm: str, reserved_gib: int, **changed: Any) -> Sample:
    fields: dict[str, Any] = {
        "first_seconds": 0.2,
        "cold_seconds": [0.2, 0.1, 0.1, 0.1, 3.0],
        "warm_seconds": 0.01,
        "resident_bytes": 2**30,
        "peak_resident_bytes": 2**30,
        "descriptors": 100,
        "descriptors_per_block": 1,
        "step_seconds": 0.003,
        "idle_seconds": 2e-6,
    }
    return Sample(arm=arm, reserved_gib=reserved_gib, **(fields | changed))


def verdicts(**of_the_largest: Any) -> list[bool]:
    samples = [sample("stock", 0), *(sample("ours", gib) for gib in SIZES_GIB[:-1])]
    samples.append(sample("ours", SIZES_GIB[-1], **of_the_largest))
    return [reached for _, _, reached in judge(samples, ["ours"], "stock")]


def test_equal_costs_reach_every_target() -> None:
    """A hand-over that the machine held up (3 s) changes no verdict."""
    assert verdicts() == [True] * 4


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"cold_seconds": [0.14] * 5}, [0, 1]),
        ({"cold_seconds": [0.125] * 5}, [1]),
        ({"resident_bytes": 2**30 + 65 * 2**20}, [2]),
        ({"idle_seconds": 33e-6}, [3]),
    ],
    ids=["slow", "slower than stock", "memory", "wrappers"],
)
def test_a_missed_target_is_said(changed: dict[str, Any], missed: list[int]) -> None:
    """Each of the four verdicts falls on its own figure."""
    assert [place for place, reached in enumerate(verdicts(**changed)) if not reached] == missed
