# SPDX-License-Identifier: Apache-2.0
"""What does a hand-over cost? Each question compares arms, whose servers run at the same time and take turns.

Targets: printed, each with its limit. The results have the question's name, and a plot may lie beside them.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from rich.table import Table

from experiments.common import report
from experiments.common.report import Verdict, make_table

RESULTS = Path(__file__).resolve().parent / "results"
Setting = tuple[Any, ...]
Statistic = Callable[[Sequence[float]], float]


def main(options: argparse.Namespace) -> int:
    with Run(options) as run:
        found = importlib.import_module(f"experiments.bench.{options.question}").answer(run)
    if found.plot is not None:
        found.plot(run.path.with_suffix(".png"))
    return run.conclude(found.tables, found.verdicts, found.content)


class Run(report.Run):
    """One run of a question, from its command line. Settings or arms that are measured have ``only`` in their names."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.quick, self.rounds, self.only = options.quick, options.rounds, options.only
        name = f"-{options.question}{'-quick' if self.quick else ''}"
        super().__init__(options.question, options.vllm, RESULTS, name, is_part=bool(self.only))

    def times(self, full: int, quick: int) -> int:
        return quick if self.quick else self.rounds or full

    def chosen(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.only.lower() in name.lower()]


@dataclass(frozen=True)
class Answer:
    """What a question's run has found. ``plot`` writes a picture to a path."""

    tables: Sequence[Table]
    verdicts: Sequence[Verdict]
    content: dict[str, Any]
    plot: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Column:
    """One column of a table: a statistic of a figure, times ``scale``."""

    heading: str
    figure: str
    scale: float = 1e3
    digits: int = 0
    of: Statistic = statistics.median

    def cell(self, values: Sequence[float]) -> str:
        return f"{self.of(values) * self.scale:,.{self.digits}f}" if values else ""


@dataclass
class Samples:
    """See the module. ``forms``: how each part of a setting is written, such as "{} tokens"."""

    forms: tuple[str, ...]
    figures: dict[tuple[Setting, str], dict[str, list[float]]] = field(default_factory=dict)

    def add(self, setting: Setting, arm: str, **figures: float) -> None:
        for name, value in figures.items():
            self.figures.setdefault((setting, arm), {}).setdefault(name, []).append(value)

    @property
    def settings(self) -> list[Setting]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(setting for setting, _ in self.figures))

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(arm for _, arm in self.figures))

    def values(self, setting: Setting, arm: str, figure: str) -> list[float]:
        """Return all values of a figure; none if it was not measured there."""
        return self.figures.get((setting, arm), {}).get(figure, [])

    def median(self, setting: Setting, arm: str, figure: str) -> float:
        return statistics.median(self.values(setting, arm, figure))

    def words(self, setting: Setting) -> str:
        return ", ".join(form.format(part) for form, part in zip(self.forms, setting, strict=True))

    def table(self, title: str, columns: Sequence[Column]) -> Table:
        headings = [form.format("").strip() for form in self.forms]
        rows = [
            [*map(str, setting), arm, *(column.cell(self.values(setting, arm, column.figure)) for column in columns)]
            for setting, arm in itertools.product(self.settings, self.arms)
            if (setting, arm) in self.figures
        ]
        return make_table(title, [*headings, "arm", *(column.heading for column in columns)], rows)

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {"setting": dict(zip(self.forms, setting, strict=True)), "arm": arm, **figures}
            for (setting, arm), figures in self.figures.items()
        ]

    def compare(
        self,
        arm: str,
        other: str,
        figure: str,
        words: str,
        *,
        most: float | None = None,
        least: float | None = None,
        of: Statistic = statistics.median,
        where: Callable[[Setting], bool] = lambda _: True,
        by_round: bool = False,
    ) -> list[Verdict]:
        """Return a target for each setting that has both arms: a figure of ``arm`` as a multiple of that of ``other``.

        Args:
            most, least: the limit; one of them.
            by_round: the statistic is that of the ratios of each round, in which both had the same prompts; else the
                ratio is that of both statistics.
        """
        rows = []
        for setting in filter(where, self.settings):
            ours, theirs = (self.values(setting, one, figure) for one in (arm, other))
            if not ours or not theirs:
                continue
            if by_round:
                ratio = of([one / beside for one, beside in zip(ours, theirs, strict=True)])
            else:
                ratio = of(ours) / of(theirs)
            is_reached = (most is None or ratio <= most) and (least is None or ratio >= least)
            limit = f"<= {most}" if least is None else f">= {least}"
            rows.append(Verdict(f"{self.words(setting)}: {words} ({limit})", f"{ratio:.2f} x", is_reached))
        return rows


def percentile(hundredths: int) -> Statistic:
    """Return a statistic: the smallest value that at least ``hundredths`` percent of the values do not exceed."""
    return lambda values: float(numpy.percentile(values, hundredths, method="inverted_cdf"))
