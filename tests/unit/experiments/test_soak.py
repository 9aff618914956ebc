# SPDX-License-Identifier: Apache-2.0
"""The soak's judgement: planted leaks, wrong answers and unexplained errors are misses, and noise is none."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from experiments.lease_recovery.growth import FEWEST_READINGS, Reading, grown, rise, table_of
from experiments.lease_recovery.soak import Size, Soaked, judge, prompts
from experiments.lease_recovery.traffic import Ended, salt_of

SIZE = Size(5000, 25, 50)
MEMORY = "memory (MiB)"
BOUND = {MEMORY: 1.0}
RESTARTS = sorted(random.Random(1).sample(range(50), 13))


def readings(value: Callable[[float, int], float]) -> list[Reading]:
    """Return what 50 readings find; ``value`` gets the thousands of hand-overs and the restarts."""
    count = [sum(at < place for at in RESTARTS) for place in range(50)]
    return [Reading(50 * place, count[place], {MEMORY: value(place / 20, count[place])}) for place in range(50)]


def noisy(value: Callable[[float, int], float], spread: float = 0.2) -> list[Reading]:
    draw = random.Random(2)
    return readings(lambda thousands, restarts: value(thousands, restarts) + draw.gauss(0.0, spread))


FLAT = readings(lambda *_: 300.0)


@pytest.mark.parametrize(
    ("value", "is_grown"),
    [
        (lambda thousands, _: 500 + 2.0 * thousands, True),
        (lambda _, restarts: 500 + 0.5 * restarts, True),
        (lambda *_: 500.0, False),
        (lambda *_: 0.0, False),
        (lambda thousands, _: 500 - thousands, False),
        (lambda thousands, _: 500 + 100 * min(thousands, 0.4), False),
    ],
    ids=["with hand-overs", "with restarts", "constant", "none", "falls", "fills at first"],
)
def test_a_leak_is_found_and_noise_is_none(value: Callable[[float, int], float], is_grown: bool) -> None:
    assert bool(grown(noisy(value), FLAT, BOUND)) == bool(grown(readings(value), FLAT, BOUND)) == is_grown


def test_a_leak_is_named_and_measured() -> None:
    leaks = noisy(lambda thousands, restarts: 3 * thousands + 0.5 * restarts)
    (said,) = grown(leaks, FLAT, BOUND)
    assert said.startswith("memory (MiB) +5.") and said.endswith("per 1,000, stock +0.000 ± 0.000")
    found = rise(leaks, MEMORY)
    assert 5 < found.rise - 2 * found.error < found.most < 6.5


def test_what_a_stock_server_grows_by_is_not_held_against_the_pair() -> None:
    leaks = noisy(lambda thousands, _: 500 + 5.0 * thousands)
    assert not grown(leaks, noisy(lambda thousands, _: 300 + 5.0 * thousands), BOUND)
    assert grown(leaks, noisy(lambda thousands, _: 300 + 3.5 * thousands), BOUND)


def test_too_few_or_too_noisy_readings_do_not_show_that_it_is_flat() -> None:
    assert grown(FLAT[: FEWEST_READINGS - 1], FLAT, BOUND) and grown(FLAT, FLAT[: FEWEST_READINGS - 1], BOUND)
    assert grown(noisy(lambda *_: 500.0, 20.0), FLAT, BOUND)


def test_the_table_has_what_is_too_short_for_a_slope_too() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table_of({"decode": FLAT, "prefill": FLAT[:3], "none": readings(lambda *_: 0.0)}, "a soak"))
    assert console.export_text().count("300.0") == 4


def test_neighbours_that_resemble_each_other_make_errors_larger() -> None:
    draw, walk = random.Random(3), [0.0]
    for _ in range(49):
        walk.append(0.9 * walk[-1] + draw.gauss(0.0, 1.0))
    some = iter(walk)
    alike = rise(readings(lambda *_: next(some)), MEMORY)
    assert alike.error > 2 * rise(noisy(lambda *_: 0.0, 1.0), MEMORY).error


FINE = Soaked("pull", 5000, 25, [Ended("right", "none", 0.0, 1.0)] * 5000, [], {}, (1, 1))


@pytest.mark.parametrize(
    ("soaked", "missed"),
    [
        (FINE, []),
        (replace(FINE, hand_overs=4999), [0]),
        (replace(FINE, restarts=24), [1]),
        (replace(FINE, ended=[*FINE.ended, Ended("wrong", "none", 0.0, 1.0)]), [2]),
        (replace(FINE, ended=[*FINE.ended, Ended("hangs", "none", 0.0, 1.0)]), [3]),
        (replace(FINE, failed=[Ended("error", "none", 0.0, 1.0)]), [4]),
        (replace(FINE, hits=(1, 0)), [5]),
        (replace(FINE, series={"decode's engine": readings(lambda *_: 1.0)[:5]}), [6]),
    ],
    ids=["fine", "too few", "restarts", "wrong", "hangs", "error", "no prefix cache", "not read"],
)
def test_each_target_can_be_missed(soaked: Soaked, missed: list[int]) -> None:
    verdicts = judge(soaked, SIZE, {"stock: engine": FLAT})
    assert [place for place, one in enumerate(verdicts) if not one.reached] == missed


def test_requests_share_prefix_caches_and_some_do_not() -> None:
    salts = [salt_of(f"r-{number}", 100) for number in range(200)]
    assert set(salts[0::3]) == {f"r-{number}" for number in range(0, 200, 3)}
    assert set(salts[1::3]) | set(salts[2::3]) == {"shared-0", "shared-1"}
    assert salt_of("stale-7", 0) == "stale-7"
    lengths = [len(one) for one in prompts(240)]
    assert min(lengths) < 8 and max(lengths) > 600
