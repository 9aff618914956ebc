# SPDX-License-Identifier: Apache-2.0
"""experiments/bench_serve: its targets can be missed, and each arm sends what its name says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("rich")

from experiments.bench_serve.__main__ import kept
from experiments.bench_serve.arms import GROUPS, ONE, PAIRS, PULL, PUSH, STOCK_PULL, STOCK_PUSH, groups
from experiments.bench_serve.measure import Handed, Run
from experiments.bench_serve.report import judge, median, ratio

RUN = Run("decode asks, push", 4, 1, 48, 0, 1.0, 64.0, 100.0, 200.0, 10.0, 20.0, 12.0)
HANDED = Handed("decode asks, push", asked=9, moved=9)


@pytest.mark.parametrize(
    ("run", "handed", "missed"),
    [
        (RUN, HANDED, ""),
        (dataclasses.replace(RUN, failed=1), HANDED, "without an answer"),
        (RUN, dataclasses.replace(HANDED, moved=8), "with KV from prefill"),
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


def test_only_the_arms_of_two_servers_hand_over() -> None:
    assert [one.kv_transfer for one in ONE.specs(Path("model"))] == [None]
    for spec in PUSH.specs(Path("model")):
        assert spec.kv_transfer is not None and spec.environment["ENABLE_KVCACHED"] == "true"
        assert spec.kv_transfer["kv_connector_extra_config"] == {"num_threads": 0, "transfer_mode": "push"}
    arms = [arm for group in GROUPS.values() for arm in group]
    assert len({arm.name for arm in arms}) == len({arm.tag for arm in arms}) == len(arms)


def test_a_stock_arm_has_neither_kvcached_nor_this_packages_keys() -> None:
    for arm, connector in ((STOCK_PULL, "NixlConnector"), (STOCK_PUSH, "NixlPushConnector")):
        for spec in arm.specs(Path("model")):
            assert spec.environment == {} and spec.kv_transfer is not None
            assert spec.kv_transfer["kv_connector"] == connector
            assert spec.kv_transfer["kv_connector_extra_config"] == {"num_threads": 0}
    for ours, other in PAIRS:
        assert ours.mode == other.mode
        assert any(ours in group and other in group for group in GROUPS.values()), "they run side by side"


def test_without_stock_push_the_others_run() -> None:
    found = groups(("pull", "push"), has_stock_push=False)
    assert found["pull"] == GROUPS["pull"] and set(GROUPS["push"]) - set(found["push"]) == {STOCK_PUSH}


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"requests_per_second": 0.99}, ["requests/s"]),
        ({"first_token_p50_ms": 100.1}, ["first token"]),
        ({"token_p50_ms": 10.1}, ["further tokens"]),
        ({"cpu_token_ms": 12.1}, ["CPU"]),
    ],
)
def test_asking_is_held_to_others(changes: dict[str, float], missed: list[str]) -> None:
    ours = dataclasses.replace(RUN, arm=PULL.name, **changes)  # type: ignore[arg-type]
    stock = dataclasses.replace(RUN, arm=STOCK_PULL.name)
    found = [one for one in judge([ours, stock], []) if not one.reached]
    assert len(found) == len(missed) and all(word in one.target for word, one in zip(missed, found, strict=True))
    assert len(judge([ours], [])) == 1, "nothing is compared that was not run"


def test_a_ratio_is_of_the_same_prompts() -> None:
    def runs(arm: str, figures: dict[int, float]) -> list[Run]:
        return [dataclasses.replace(RUN, arm=arm, seed=seed, first_token_p50_ms=ms) for seed, ms in figures.items()]

    found = [*runs("a", {1: 10.0, 2: 40.0, 3: 90.0, 4: 1.0}), *runs("b", {1: 10.0, 2: 20.0, 3: 30.0})]
    assert ratio(found, "a", "b", RUN.at_a_time, "first_token_p50_ms") == 2.0
    assert ratio(found, "a", "c", RUN.at_a_time, "first_token_p50_ms") is None


def test_one_mode_leaves_the_other_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "last.json"
    assert kept(file, set()) == ([], [])
    other = dataclasses.replace(RUN, arm="router, pull")
    content = {"runs": [dataclasses.asdict(one) for one in (RUN, other)], "handed": [dataclasses.asdict(HANDED)]}
    file.write_text(json.dumps(content))
    assert kept(file, {RUN.arm}) == ([other], [])
    assert kept(file, {other.arm}) == ([RUN], [HANDED])
