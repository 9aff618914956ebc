# SPDX-License-Identifier: Apache-2.0
"""What a process holds, how it grows with hand-overs and with a peer's restarts, and whether that is flat."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Table

from experiments.common.report import make_table

WARM_UP = 0.4
"""Fraction of the readings that is left out: caches and pools of allocators fill first."""
FEWEST_READINGS = 10


class Slope(NamedTuple):
    """A rise, and the standard error of its estimate."""

    rise: float
    error: float

    @property
    def most(self) -> float:
        """What the rise is below, with a confidence of 97.5 %."""
        return self.rise + 2 * self.error

    def __str__(self) -> str:
        return f"{self.rise:+.3f} ± {self.error:.3f}"


@dataclass(frozen=True)
class Reading:
    """What a process held after so many hand-overs, and so many restarts of its peer."""

    hand_overs: int
    restarts: int
    held: Mapping[str, float]


def held_by(process: int) -> dict[str, float]:
    """Return what a process holds; memory is its anonymous memory, without files and memory shared by name."""
    folder = Path("/proc", str(process))
    found = re.search(r"RssAnon:\s+(\d+) kB", (folder / "status").read_text())
    assert found is not None
    return {
        "memory (MiB)": int(found[1]) / 1024,
        "open files": len(os.listdir(folder / "fd")),
        "threads": len(os.listdir(folder / "task")),
        "mappings": len((folder / "maps").read_text().splitlines()),
    }


def rise(readings: Sequence[Reading], name: str) -> Slope:
    """Return the rise of ``name`` with 1,000 hand-overs and the restarts among them, by a linear regression.

    Successive readings resemble each other, so they tell less than independent ones: the error is larger by the factor
    that a correlation between neighbouring residuals stands for.
    """
    warm = readings[int(WARM_UP * len(readings)) :]
    values = np.array([one.held[name] for one in warm], dtype=float)
    columns = np.column_stack([np.ones(len(warm)), [one.hand_overs / 1000 for one in warm]])
    inverse = np.linalg.pinv(columns.T @ columns)
    found = inverse @ columns.T @ values
    left = values - columns @ found
    spread, variance = float(left @ left), 0.0
    if spread > 1e-12 * float(values @ values):
        alike = min(0.95, max(0.0, float(left[1:] @ left[:-1]) / spread))
        variance = spread / (len(values) - len(columns.T)) * (1 + alike) / (1 - alike)
    return Slope(float(found[1]), float(np.sqrt(variance * inverse[1, 1])))


def grown(readings: Sequence[Reading], control: Sequence[Reading], bounds: Mapping[str, float]) -> list[str]:
    """Return what is not shown to be flat: it may rise by more than its bound with 1,000 hand-overs and the restarts
    among them, beyond what it rises by in ``control``, a stock server without hand-overs."""
    if min(len(readings), len(control)) < FEWEST_READINGS:
        return [f"only {len(readings)} readings, and {len(control)} of the stock server"]
    found = []
    for name, bound in bounds.items():
        ours = rise(readings, name)
        stock = rise(control, name) if name in control[0].held else Slope(0.0, 0.0)
        beyond = Slope(ours.rise - max(0.0, stock.rise), math.hypot(ours.error, stock.error))
        if beyond.most > bound:
            found.append(f"{name} {ours} per 1,000, stock {stock}")
    return found


def table_of(series: Mapping[str, Sequence[Reading]], title: str) -> Table:
    """Return a table with a row for each series of readings and what they hold."""
    rows = []
    for process, readings in series.items():
        for name in readings[0].held:
            ends = (f"{readings[place].held[name]:.1f}" for place in (0, -1))
            found = str(rise(readings, name)) if len(readings) >= FEWEST_READINGS else ""
            rows.append([process, name, *ends, found])
    return make_table(title, ("process", "holds", "first", "last", "per 1,000 hand-overs and restarts"), rows)
