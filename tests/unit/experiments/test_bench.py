# SPDX-License-Identifier: Apache-2.0
"""experiments/bench: its statistics, and targets on both sides of their limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

pytest.importorskip("rich")
pytest.importorskip("psutil")

from experiments.bench import bench_serve, memory_path
from experiments.bench.samples import Samples, percentile
from experiments.common.report import Verdict

MIB = 2**20


def reached(verdicts: Sequence[Verdict]) -> list[bool]:
    return [one.reached for one in verdicts]


# ----------------------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("values", "hundredths", "expected"),
    [([3.0], 50, 3.0), ([3.0, 1.0], 50, 1.0), ([1.0, 2.0, 3.0], 50, 2.0), ([1.0, 2.0], 90, 2.0), ([2.0, 1.0], 0, 1.0)],
)
def test_a_percentile_is_one_of_the_values(values: list[float], hundredths: int, expected: float) -> None:
    """Nothing is interpolated, and few values have their largest as the 99th."""
    assert percentile(hundredths)(values) == expected


def test_arms_are_compared_where_both_were_measured() -> None:
    samples = Samples(("{} tokens",))
    for length, ours, stock in ((8, 1.15, 1.0), (16, 1.16, 1.0), (32, 1.0, None)):
        samples.add((length,), "ours", seconds=ours)
        if stock is not None:
            samples.add((length,), "stock", seconds=stock)
    found = samples.compare("ours", "stock", "seconds", "first token", most=1.15)
    assert [tuple(one) for one in found] == [
        ("8 tokens: first token (<= 1.15)", "1.15 x", True),
        ("16 tokens: first token (<= 1.15)", "1.16 x", False),
    ]
    assert reached(samples.compare("ours", "stock", "seconds", "", least=1.155)) == [False, True]
    assert reached(samples.compare("ours", "stock", "seconds", "", most=1.0, where=lambda one: one[0] > 8)) == [False]


# ----------------------------------------------------------------------------------- targets, on both sides of a limit


def samples_of(forms: Sequence[str], setting: tuple[object, ...], arms: Mapping[str, Mapping[str, float]]) -> Samples:
    samples = Samples(tuple(forms))
    for arm, figures in arms.items():
        samples.add(setting, arm, **figures)
    return samples


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({1: 105, 60: 105}, [True, True, True]),
        ({1: 106, 60: 105}, [False, True, True]),
        ({1: 95, 60: 105}, [True, True, False]),
        ({1: 100, 60: 6000}, [True, False, False]),
    ],
)
def test_resident_memory_is_the_slab_and_the_same_for_every_reservation(
    more: dict[float, int], expected: list[bool]
) -> None:
    """At most a twentieth more, and a twentieth apart."""
    samples = Samples(("{}", "{} GiB reserved"))
    for gib, mib in more.items():
        for arm, found in (("pull", 500), ("pull, staged", 500 + mib)):
            samples.add(("prefill", gib), arm, anonymous=found * MIB, buffer=gib * 2**30)
    assert reached(memory_path.judge_memory(samples, slab_gib=100 / 1024)) == expected


@pytest.mark.parametrize(("seconds", "is_reached"), [(0.012, True), (0.0121, False)])
def test_blocks_stay_taken_for_the_copy(seconds: float, is_reached: bool) -> None:
    """A fifth longer at most; of the direct path nothing is promised."""
    arms = {"pull, staged": {"occupied": seconds, "copied": 0.01}, "pull": {"occupied": 0.5, "copied": 0.0}}
    assert reached(memory_path.judge_pages(samples_of(("{} tokens",), (2048,), arms))) == [is_reached]


RUN = {"failed": 0, "requests_per_second": 1.0, "first_token_p50_ms": 100.0, "token_p50_ms": 10.0, "cpu_token_ms": 12.0}


@pytest.mark.parametrize(
    ("changes", "moved", "missed"),
    [
        ({}, 9, []),
        ({"failed": 1.0}, 9, ["without an answer"]),
        ({}, 8, ["with KV from prefill"]),
        ({"requests_per_second": 0.99}, 9, ["requests/s"]),
        ({"first_token_p50_ms": 100.1}, 9, ["first token"]),
        ({"token_p50_ms": 10.1}, 9, ["further tokens"]),
        ({"cpu_token_ms": 12.1}, 9, ["CPU"]),
    ],
)
def test_asking_is_held_to_stock(changes: dict[str, float], moved: int, missed: list[str]) -> None:
    arms = {bench_serve.PULL.name: RUN | changes, bench_serve.STOCK_PULL.name: RUN}
    verdicts = bench_serve.judge(samples_of(("{} at a time",), (8,), arms), {bench_serve.PULL.name: (9, moved)})
    found = [one.target for one in verdicts if not one.reached]
    assert len(found) == len(missed) and all(word in target for word, target in zip(missed, found, strict=True))
