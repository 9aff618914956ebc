# SPDX-License-Identifier: Apache-2.0
"""The family benchmark's verdicts, from samples that the tests make up."""

from __future__ import annotations

import pytest

from experiments.family_cost.__main__ import judge
from experiments.family_cost.measure import ARMS, Sample


def verdicts(slower: float = 1.0, descriptors: float = 10.0) -> list[bool]:
    samples = []
    for arm in ARMS:
        is_judged = arm.name == "pull, contiguous"
        seconds = 0.1 * (slower if is_judged else 1.0)
        # One hand-over that the machine held up changes no verdict.
        for one in (seconds, seconds, 3.0):
            samples.append(Sample("gemma4", arm.name, 512, one, descriptors if is_judged else 40.0, 2**20))
    return [one.reached for one in judge(samples)]


def test_equal_times_and_few_descriptors_reach_every_target() -> None:
    assert verdicts() == [True, True]


@pytest.mark.parametrize(
    ("slower", "descriptors", "expected"), [(1.2, 10.0, [False, True]), (1.0, 21.0, [True, False])]
)
def test_a_missed_target_is_said(slower: float, descriptors: float, expected: list[bool]) -> None:
    assert verdicts(slower, descriptors) == expected
