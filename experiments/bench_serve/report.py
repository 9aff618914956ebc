# SPDX-License-Identifier: Apache-2.0
"""Computes a table and targets from runs. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from experiments.bench_serve.arms import PAIRS
from experiments.bench_serve.measure import Handed, Run
from experiments.common.targets import Verdict

FIGURES = ("requests_per_second", "tokens_per_second", "first_token_p50_ms", "first_token_p99_ms", "token_p50_ms")


def median(runs: Sequence[Run], arm: str, at_a_time: int, figure: str) -> float:
    """Return the median of ``figure`` over an arm's runs with ``at_a_time`` requests at a time."""
    return statistics.median(getattr(one, figure) for one in runs if (one.arm, one.at_a_time) == (arm, at_a_time))


def ratio(runs: Sequence[Run], arm: str, other: str, at_a_time: int, figure: str) -> float | None:
    """Return the median of ``figure`` of ``arm`` divided by that of ``other``, of the same prompts; None if there is
    none."""
    both = {
        name: {one.seed: getattr(one, figure) for one in runs if (one.arm, one.at_a_time) == (name, at_a_time)}
        for name in (arm, other)
    }
    found = [value / both[other][seed] for seed, value in both[arm].items() if seed in both[other]]
    return statistics.median(found) if found else None


def table_of(runs: Sequence[Run]) -> Table:
    """Return a table of medians over the rounds."""
    table = Table(title="vllm bench serve; medians over the rounds")
    for column in ("at a time", "arm", "requests/s", "tokens/s", "TTFT, ms: p50", "p99", "TPOT, ms: p50"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for at_a_time, arm in sorted(dict.fromkeys((one.at_a_time, one.arm) for one in runs)):
        figures = [median(runs, arm, at_a_time, figure) for figure in FIGURES]
        digits = (2, 0, 0, 0, 1)
        table.add_row(str(at_a_time), arm, *(f"{found:.{n}f}" for found, n in zip(figures, digits, strict=True)))
    return table


def judge(runs: Sequence[Run], handed: Sequence[Handed]) -> list[Verdict]:
    """Return the targets: every request is answered, every one through a router by a hand-over, as fast as stock."""
    failed = sum(one.failed for one in runs)
    verdicts = [Verdict("requests without an answer (0)", f"{failed} of {len(runs)} runs' requests", failed == 0)]
    for one in handed:
        total = one.in_its_direction + one.others
        verdicts += [
            Verdict(
                f"{one.arm}: prompts that decode computed instead (0)",
                f"{one.computed_by_decode} of {total}",
                one.computed_by_decode == 0 and total > 0,
            ),
            Verdict(
                f"{one.arm}: handed over in this direction, after the warm-up (>= 0.9)",
                f"{one.in_its_direction} of {total}",
                one.in_its_direction >= 0.9 * total > 0,
            ),
        ]
    return [*verdicts, *_beside_stock(runs)]


def _beside_stock(runs: Sequence[Run]) -> list[Verdict]:
    verdicts = []
    for arm, stock in PAIRS:
        for at_a_time in sorted({one.at_a_time for one in runs}):
            rate = ratio(runs, arm.name, stock.name, at_a_time, "requests_per_second")
            first = ratio(runs, arm.name, stock.name, at_a_time, "first_token_p50_ms")
            if rate is None or first is None:
                continue
            words = f"{arm.name} / {stock.name}, {at_a_time} at a time"
            verdicts += [
                Verdict(f"{words}: requests/s (>= 1.0)", f"{rate:.2f} x", rate >= 1.0),
                Verdict(f"{words}: first token p50 (<= 1.0)", f"{first:.2f} x", first <= 1.0),
            ]
    return verdicts
