# SPDX-License-Identifier: Apache-2.0
"""experiments/bench_serve: its targets can be missed, and each arm sends what its name says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("rich")

from experiments.bench_serve.arms import ARMS, ONE, PUSH
from experiments.bench_serve.measure import Handed, Run
from experiments.bench_serve.report import judge, median

RUN = Run("router, push", 4, 48, 0, 1.0, 64.0, 100.0, 200.0, 10.0, 20.0)
HANDED = Handed("router, push", in_its_direction=9, others=1, computed_by_decode=0)


@pytest.mark.parametrize(
    ("run", "handed", "missed"),
    [
        (RUN, HANDED, ""),
        (dataclasses.replace(RUN, failed=1), HANDED, "without an answer"),
        (RUN, dataclasses.replace(HANDED, computed_by_decode=1), "computed instead"),
        (RUN, dataclasses.replace(HANDED, others=2), "in this direction"),
        (RUN, Handed("router, push", 0, 0, 0), "router, push"),
    ],
    ids=str,
)
def test_each_target_can_be_missed(run: Run, handed: Handed, missed: str) -> None:
    verdicts = judge([run], [handed])
    assert [one.target for one in verdicts if not one.reached] == [
        one.target for one in verdicts if missed and missed in one.target
    ]


def test_a_figure_is_the_median_of_its_own_arm_and_load() -> None:
    others = [dataclasses.replace(RUN, arm="one instance"), dataclasses.replace(RUN, at_a_time=16)]
    runs = [dataclasses.replace(RUN, first_token_p50_ms=ms) for ms in (1.0, 2.0, 9.0)]
    assert median([*others, *runs], RUN.arm, RUN.at_a_time, "first_token_p50_ms") == 2.0


def test_only_the_arms_of_the_router_hand_over() -> None:
    assert [one.kv_transfer for one in ONE.specs(Path("model"))] == [None]
    for spec in PUSH.specs(Path("model")):
        assert spec.kv_transfer is not None and spec.environment["ENABLE_KVCACHED"] == "true"
        assert spec.kv_transfer["kv_connector_extra_config"] == {"num_threads": 0, "transfer_mode": "push"}
    assert len({arm.name for arm in ARMS}) == len(ARMS)
