# SPDX-License-Identifier: Apache-2.0
"""Computes targets, a table and a plot from the measured rows. No side effects except the plot's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.plots import make_panels, save
from experiments.common.targets import Verdict

if TYPE_CHECKING:
    from rich.table import Table

ADDED_MS, AT_STREAMS = 3.0, 64
TIMES_PASSTHROUGH = 1.5
MEMORY_GROWTH = 1.1

Rows = Sequence[Mapping[str, Any]]


def find(rows: Rows, arm: str, streams: int, paced: bool) -> Mapping[str, Any] | None:
    """Return the row of an arm, or None if it was not measured."""
    wanted = (arm, streams, paced)
    return next((row for row in rows if (row["arm"], row["streams"], row["paced"]) == wanted), None)


def judge(rows: Rows, memory: Mapping[str, float] | None) -> list[Verdict]:
    """Return the targets: latency where the router has spare time, throughput where it is saturated, and memory."""
    verdicts = []
    direct, router = find(rows, "direct", AT_STREAMS, True), find(rows, "router", AT_STREAMS, True)
    if direct and router:
        added = router["first_p50_ms"] - direct["first_p50_ms"]
        words = f"p50 of time to first token, added at {AT_STREAMS} streams, paced (< {ADDED_MS:g} ms)"
        verdicts.append(Verdict(words, f"{added:.2f} ms", added < ADDED_MS))
    for streams in sorted({row["streams"] for row in rows if not row["paced"]}):
        ours, theirs = find(rows, "router", streams, False), find(rows, "pass-through", streams, False)
        if ours and theirs:
            times = ours["per_second"] / theirs["per_second"]
            words = f"requests a second, {streams} streams, router / pass-through (>= {TIMES_PASSTHROUGH:g})"
            verdicts.append(Verdict(words, f"{times:.2f}", times >= TIMES_PASSTHROUGH))
    failed = sum(row["failed"] for row in rows if row["arm"] == "router")
    verdicts.append(Verdict("requests that failed at the router (0)", str(failed), failed == 0))
    if memory is not None:
        growth = memory["end_bytes"] / memory["begin_bytes"]
        words = f"memory after {memory['requests']:,.0f} requests / after a tenth of them (<= {MEMORY_GROWTH:g})"
        verdicts.append(Verdict(words, f"{growth:.3f}", growth <= MEMORY_GROWTH))
        begin, end = memory["begin_files"], memory["end_files"]
        words = f"open files, at the same times (<= {MEMORY_GROWTH:g})"
        verdicts.append(Verdict(words, f"{begin:.0f} and {end:.0f}", end <= MEMORY_GROWTH * begin))
    return verdicts


def table_of(rows: Rows) -> Table:
    """Return a table with a row for each arm, number of streams and pace."""
    from rich.table import Table

    table = Table(
        title="with servers that answer at once; milliseconds (core: CPU time of the measured process per request)"
    )
    for column in ("arm", "streams", "pace", "requests/s", "first p50", "p99", "whole p50", "p99", "core", "failed"):
        table.add_column(column, justify="left" if column in ("arm", "pace") else "right")
    for row in rows:
        times = (f"{row[name]:.2f}" for name in ("first_p50_ms", "first_p99_ms", "whole_p50_ms", "whole_p99_ms"))
        pace = "paced" if row["paced"] else "as fast as possible"
        table.add_row(
            row["arm"],
            str(row["streams"]),
            pace,
            f"{row['per_second']:.0f}",
            *times,
            f"{row['cpu_ms']:.2f}",
            str(row["failed"]),
        )
    return table


def plot(rows: Rows, path: Path) -> None:
    """Plot requests a second and time to first token over the number of streams."""
    figure, panels = make_panels(2, 10, 3.8)
    for panel, name, paced in ((panels[0], "per_second", False), (panels[1], "first_p50_ms", True)):
        for arm in dict.fromkeys(row["arm"] for row in rows):
            line = [row for row in rows if row["arm"] == arm and row["paced"] is paced]
            panel.plot([row["streams"] for row in line], [row[name] for row in line], marker="o", label=arm)
        panel.set(xscale="log", yscale="log", xlabel="streams")
        panel.grid(alpha=0.3)
    panels[0].set_title("requests a second, as fast as possible")
    panels[1].set_title("time to first token, p50, paced, ms")
    panels[0].legend(fontsize=8)
    save(figure, "", path)
