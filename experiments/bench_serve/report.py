# SPDX-License-Identifier: Apache-2.0
"""Computes a table and targets from runs. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from experiments.bench_serve.arms import PAIRS
from experiments.bench_serve.measure import Handed, Run
from experiments.common.targets import Verdict

FIGURES = {
    "requests_per_second": ("requests/s", 2),
    "tokens_per_second": ("tokens/s", 0),
    "first_token_p50_ms": ("TTFT, ms: p50", 0),
    "first_token_p99_ms": ("p99", 0),
    "token_p50_ms": ("TPOT, ms: p50", 1),
    "cpu_token_ms": ("CPU, ms a token", 1),
}
"""Column and digits of each."""
TARGETS = (
    ("requests_per_second", "requests/s", False),
    ("first_token_p50_ms", "first token p50", True),
    ("token_p50_ms", "further tokens p50", True),
    ("cpu_token_ms", "CPU a token", True),
)
"""Figures that are compared, and whether less is better."""


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
    for column in ("at a time", "arm", *(column for column, _ in FIGURES.values())):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for at_a_time, arm in sorted(dict.fromkeys((one.at_a_time, one.arm) for one in runs)):
        figures = (f"{median(runs, arm, at_a_time, one):.{digits}f}" for one, (_, digits) in FIGURES.items())
        table.add_row(str(at_a_time), arm, *figures)
    return table


def judge(runs: Sequence[Run], handed: Sequence[Handed]) -> list[Verdict]:
    """Return the targets: every request is answered, every one with KV from prefill, and as fast as others."""
    failed = sum(one.failed for one in runs)
    verdicts = [Verdict("requests without an answer (0)", f"{failed} of {len(runs)} runs' requests", failed == 0)]
    verdicts += [
        Verdict(
            f"{one.arm}: requests with KV from prefill (all)", f"{one.moved} of {one.asked}", one.moved >= one.asked
        )
        for one in handed
    ]
    for arm, other in PAIRS:
        for at_a_time in sorted({one.at_a_time for one in runs}):
            words = f"{arm.name} / {other.name}, {at_a_time} at a time"
            verdicts += [
                Verdict(f"{words}: {column} ({'<' if is_time else '>'}= 1.0)", f"{found:.2f} x", is_reached)
                for figure, column, is_time in TARGETS
                if (found := ratio(runs, arm.name, other.name, at_a_time, figure)) is not None
                for is_reached in [found <= 1.0 if is_time else found >= 1.0]
            ]
    return verdicts
