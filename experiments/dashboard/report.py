# SPDX-License-Identifier: Apache-2.0
"""Asks the queries, judges what they return, and draws the dashboard from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.targets import Verdict
from experiments.dashboard.fleet import OK, Load
from experiments.dashboard.prometheus import Prometheus, labels_of
from experiments.dashboard.queries import PENDING, Query

if TYPE_CHECKING:
    from rich.table import Table

PLANTED = Query("planted", "a metric that does not exist", "sum(rate(kvcached_nixl:no_such_metric_total[10s]))")
COLUMNS, INCHES_PER_COLUMN, INCHES_PER_LINE, DOTS_PER_INCH = 24, 0.72, 0.33, 84
COLOURS = 96
MOST_NAMES = 8
"""Series that a panel's legend names: those with the largest values, if above 0."""


@dataclass(frozen=True)
class Answer:
    """What a query returned: each series' labels, and its (seconds since the start, value) pairs that are finite."""

    query: Query
    series: list[tuple[dict[str, str], list[tuple[float, float]]]] = field(default_factory=list)

    @property
    def num_values(self) -> int:
        return sum(len(values) for _, values in self.series)

    def as_json(self) -> dict[str, Any]:
        """Return the query with its size and its largest value."""
        largest = max((value for _, values in self.series for _, value in values), default=None)
        return {
            "row": self.query.row,
            "panel": self.query.panel,
            "query": self.query.expression,
            "series": len(self.series),
            "values": self.num_values,
            "largest": largest,
        }


def run_queries(prometheus: Prometheus, queries: Sequence[Query]) -> list[Answer]:
    """Run each query over the whole time, and one that must return nothing."""
    seconds = max(1, int(prometheus.over_time("time()")[0]["values"][-1][0] - prometheus.began_at))
    found = []
    for query in (*queries, PLANTED):
        series = []
        for one in prometheus.over_time(query.over(seconds)):
            pairs = [(float(at) - prometheus.began_at, float(value)) for at, value in one["values"]]
            finite = [pair for pair in pairs if math.isfinite(pair[1])]
            if finite:
                named = {label: prometheus.names.get(value, value) for label, value in one["metric"].items()}
                series.append((named, finite))
        found.append(Answer(query, series))
    return found


def judge(found: Sequence[Answer], loads: Sequence[Load]) -> list[Verdict]:
    """Return the targets."""
    asked = [one for one in found if one.query is not PLANTED]
    empty = [f"{one.query.row}: {one.query.panel}" for one in asked if not one.num_values and not one.query.is_pending]
    (planted,) = [one for one in found if one.query is PLANTED]
    verdicts = [
        Verdict(
            "queries that return no value (0)",
            "; ".join(empty) or f"0 of {len(asked)}; pending: {', '.join(sorted(PENDING)) or 'none'}",
            not empty,
        ),
        Verdict("values of a metric that does not exist (0)", str(planted.num_values), not planted.num_values),
    ]
    for load in loads:
        right, number = load.outcomes.get(OK, 0), sum(load.outcomes.values())
        verdicts.append(
            Verdict(f"{load.pair}: answered (most)", f"{right} of {number}: {load.outcomes}", 2 * right > number)
        )
        again = "yes" if load.is_idle_again else "no"
        verdicts.append(Verdict(f"{load.pair}: no KV in use when idle again (yes)", again, load.is_idle_again))
    return verdicts


def table_of(found: Sequence[Answer]) -> Table:
    """Return a row per query."""
    from rich.table import Table

    table = Table(title="what each query returned")
    for column in ("row", "panel", "series", "values"):
        table.add_column(column, justify="left" if column in ("row", "panel") else "right")
    for one in found:
        pending = " (pending)" if one.query.is_pending else ""
        table.add_row(one.query.row, one.query.panel + pending, str(len(one.series)), str(one.num_values))
    return table


# --------------------------------------------------------------------------------------------------------- the picture


def draw(dashboard: Sequence[Query], found: Sequence[Answer], loads: Sequence[Load], path: Path) -> None:
    """Draw the dashboard's panels where Grafana has them."""
    from matplotlib.figure import Figure
    from PIL import Image

    answers = {id(one.query): one for one in found}
    lines = max(query.place[1] + query.place[3] for query in dashboard)
    width, height = COLUMNS * INCHES_PER_COLUMN, lines * INCHES_PER_LINE
    figure = Figure(figsize=(width, height))
    panels: dict[tuple[str, str], list[Query]] = {}
    for query in dashboard:
        panels.setdefault((query.row, query.panel), []).append(query)
    drawn_rows: set[str] = set()
    seconds = max((at for one in found for _, values in one.series for at, _ in values), default=1.0)
    for (row, title), queries in panels.items():
        x, y, w, h = queries[0].place
        if row not in drawn_rows:
            drawn_rows.add(row)
            top = 1 - (y - 0.3) / lines
            figure.text(0.006, top, row, fontsize=12, fontweight="bold", va="center")
        left, bottom = (x + 1.1) / COLUMNS, 1 - (y + h - 2.6) / lines
        axes = figure.add_axes((left, bottom, (w - 1.5) / COLUMNS, (h - 3.6) / lines))
        axes.set_title(title, fontsize=8.5, loc="left")
        _draw_panel(axes, queries, [answers[id(one)] for one in queries])
        axes.set_xlim(0, seconds)
    began = ", ".join(f"{load.pair} from {load.began_seconds:.0f} s" for load in loads)
    figure.text(0.994, 1 - 0.4 / lines, f"seconds since the start: {began}", fontsize=8.5, ha="right", va="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    # A quarter of the size.
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def _draw_panel(axes: Any, queries: Sequence[Query], answers: Sequence[Answer]) -> None:
    drawn = []
    for query, answer in zip(queries, answers, strict=True):
        for metric, values in answer.series:
            name = labels_of(metric, query.legend)
            drawn.append((max(value for _, value in values), name, values))
    drawn.sort(key=lambda one: (-one[0], one[1]))
    for place, (largest, name, values) in enumerate(drawn):
        is_named = place == 0 or (place < MOST_NAMES and largest > 0)
        axes.plot(*_with_gaps(values), linewidth=1.1, label=name or "all" if is_named else None)
    is_pending = any(query.is_pending for query in queries)
    if not drawn:
        text = "not exported yet" if is_pending else "no data"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color="grey" if is_pending else "red")
    axes.set_ylim(bottom=0, top=1.1 * drawn[0][0] if drawn and drawn[0][0] > 0 else 1.0)
    axes.yaxis.set_major_formatter(_format_of(queries[0].unit))
    axes.tick_params(labelsize=7)
    axes.locator_params(axis="y", nbins=4)
    axes.grid(alpha=0.3)
    if drawn:
        axes.legend(
            fontsize=6.5, loc="upper left", bbox_to_anchor=(-0.02, -0.14), ncols=2, frameon=False, borderaxespad=0.0,
            labelspacing=0.15, handlelength=1.0, columnspacing=0.8,
        )  # fmt: skip


def _with_gaps(values: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return times and values, with a gap where the series was not there for a while."""
    times: list[float] = []
    heights: list[float] = []
    for at, value in values:
        if times and at - times[-1] > 10:
            times.append(at)
            heights.append(math.nan)
        times.append(at)
        heights.append(value)
    return times, heights


def _format_of(unit: str) -> Any:
    from matplotlib.ticker import EngFormatter, FuncFormatter, PercentFormatter

    if unit == "percentunit":
        return PercentFormatter(1.0, decimals=0)
    if unit in ("bytes", "Bps"):
        return EngFormatter(unit="B" if unit == "bytes" else "B/s", places=0)
    if unit == "s":
        return EngFormatter(unit="s")
    per_second = "/s" if unit in ("ops", "reqps") else ""
    return FuncFormatter(lambda value, _: f"{value:g}{per_second}")
