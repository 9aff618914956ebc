# SPDX-License-Identifier: Apache-2.0
"""Computes cells, targets, a table and a plot from samples. No side effects except the plot's file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.plots import make_panels, save
from experiments.common.targets import Verdict
from experiments.transfer_rate.arms import ARMS, OURS, OURS_COMPUTING, PLAIN, PLAIN_COMPUTING, Sample

if TYPE_CHECKING:
    from rich.table import Table

LEAST_SHARE = 0.9
LEAST_COMPUTING_SHARE = 0.8
MOST_PIECE_RATIO = 1.02
MOST_HOLD_SECONDS = 0.001
PARTS = ("descriptors", "posting", "looking", "word")


@dataclass(frozen=True)
class Cell:
    """Medians of all samples of one arm in one setting.

    Attributes:
        parts: seconds of a hand-over, by what they were spent on; the rest is waiting.
        transfers: number of transfers that a hand-over was cut into.
        piece_seconds: mean and 99th percentile of the engine's pieces of work, see `timing.PIECE_SECONDS`.
    """

    transport: str
    direction: str
    layout: str
    arm: str
    seconds: float
    gigabytes_per_second: float
    descriptors: int
    parts: Mapping[str, float]
    transfers: int
    piece_seconds: tuple[float, float] | None

    @property
    def setting(self) -> tuple[str, str, str]:
        return self.transport, self.direction, self.layout


def cells(samples: Sequence[Sample], num_bytes: int) -> list[Cell]:
    """Summarise samples in the order of the settings, with the arms of one setting adjacent."""
    found = []
    for transport, direction, layout in dict.fromkeys((one.transport, one.direction, one.layout) for one in samples):
        for arm in ARMS:
            these = [
                one
                for one in samples
                if (one.transport, one.direction, one.layout, one.arm) == (transport, direction, layout, arm.name)
            ]
            if not these:
                continue
            seconds = statistics.median(one.seconds for one in these)
            pieces = sorted(piece for one in these for piece in one.piece_seconds)
            found.append(
                Cell(
                    transport,
                    direction,
                    layout,
                    arm.name,
                    seconds,
                    num_bytes / seconds / 1e9,
                    max(one.descriptors for one in these),
                    {part: statistics.median(one.parts.get(part, 0.0) for one in these) for part in PARTS},
                    int(statistics.median(one.parts.get("transfers", 0) for one in these)),
                    (statistics.fmean(pieces), pieces[-(-99 * len(pieces) // 100) - 1]) if pieces else None,
                )
            )
    return found


def judge(found: Sequence[Cell], held: Mapping[tuple[str, str, str], float]) -> list[Verdict]:
    """Return the targets. ``held``: by setting, how long one post blocks the interpreter."""
    table = {(one.setting, one.arm): one for one in found}
    rows = []
    for setting in dict.fromkeys(one.setting for one in found):
        name = ", ".join(setting)
        plain, ours = table.get((setting, PLAIN.name)), table.get((setting, OURS.name))
        if plain is not None and ours is not None:
            share = plain.seconds / ours.seconds
            target = f"{name}: fraction of plain NIXL's rate (>= {LEAST_SHARE})"
            rows.append(Verdict(target, f"{share:.2f}", share >= LEAST_SHARE))
        plain, ours = table.get((setting, PLAIN_COMPUTING.name)), table.get((setting, OURS_COMPUTING.name))
        if plain is None or ours is None:
            continue
        share = plain.seconds / ours.seconds
        target = f"{name}, engine computing: fraction of plain NIXL's rate (>= {LEAST_COMPUTING_SHARE})"
        rows.append(Verdict(target, f"{share:.2f}", share >= LEAST_COMPUTING_SHARE))
        if plain.piece_seconds and ours.piece_seconds:
            ratio = ours.piece_seconds[0] / plain.piece_seconds[0]
            target = f"{name}: the engine's pieces take as long as beside plain NIXL (mean, <= {MOST_PIECE_RATIO})"
            rows.append(Verdict(target, f"{ratio:.2f}", ratio <= MOST_PIECE_RATIO))
    for setting, seconds in held.items():
        target = f"{', '.join(setting)}: one post blocks the interpreter (<= {MOST_HOLD_SECONDS * 1e3:g} ms)"
        rows.append(Verdict(target, f"{seconds * 1e3:.2f} ms", seconds <= MOST_HOLD_SECONDS))
    return rows


def table_of(found: Sequence[Cell], title: str) -> Table:
    """Return a table with one row per cell."""
    from rich.table import Table

    table = Table(title=title)
    left = ("over", "", "layout", "arm")
    for column in (
        *("over", "", "layout", "arm", "GB/s", "ms", "descriptors", "posting", "polling", "token", "waiting"),
        *("transfers", "engine, mean", "p99"),
    ):
        table.add_column(column, justify="left" if column in left else "right")
    for one in found:
        parts = [""] * 5
        if one.transfers:
            spent = [one.parts[part] for part in PARTS]
            parts = [f"{seconds * 1e3:.1f}" for seconds in (*spent, max(0.0, one.seconds - sum(spent)))]
        parts[0] = parts[0] or f"({one.descriptors:,})"
        table.add_row(
            *one.setting,
            one.arm,
            f"{one.gigabytes_per_second:.2f}",
            f"{one.seconds * 1e3:.0f}",
            *parts,
            f"{one.transfers:,}" if one.transfers else "",
            *(["", ""] if one.piece_seconds is None else [f"{seconds * 1e3:.1f}" for seconds in one.piece_seconds]),
        )
    return table


def plot(found: Sequence[Cell], title: str, path: Path) -> None:
    """Plot rates: a panel per transport, a group of bars per direction and layout, a bar per arm."""
    transports = list(dict.fromkeys(one.transport for one in found))
    figure, panels = make_panels(len(transports), 6.4 * len(transports), 4)
    for panel, transport in zip(panels, transports, strict=True):
        settings = list(dict.fromkeys(one.setting for one in found if one.transport == transport))
        for place, arm in enumerate(ARMS):
            rates = {one.setting: one.gigabytes_per_second for one in found if one.arm == arm.name}
            places = [at + 0.16 * (place - 2) for at in range(len(settings))]
            panel.bar(places, [rates.get(setting, 0.0) for setting in settings], 0.15, label=arm.name)
        panel.set_xticks(range(len(settings)), [f"{direction}\n{layout}" for _, direction, layout in settings])
        panel.set_title(transport)
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("GB/s")
    panels[0].legend(fontsize=8)
    save(figure, title, path)
