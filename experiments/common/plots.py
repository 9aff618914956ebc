# SPDX-License-Identifier: Apache-2.0
"""Plots of results, written as pictures without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_panels(count: int, width: float, height: float, *, a_row: int = 0, **more: Any) -> tuple[Figure, Any]:
    """Return a figure of ``width`` by ``height`` inches, and its ``count`` panels side by side.

    Args:
        a_row: how many are side by side, in as many rows as it takes; 0: all.
    """
    # Imported here, not at the top: tables need no matplotlib.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    columns = min(a_row or count, count)
    panels = figure.subplots(-(-count // columns), columns, squeeze=False, **more).flatten()
    for one in panels[count:]:
        one.remove()
    return figure, panels[:count]


def line(panel: Any, places: Sequence[float], values: Sequence[float], label: str, upper: Sequence[float] = ()) -> None:
    """Draw a line with a mark at each place; shaded up to ``upper``."""
    panel.plot(places, values, marker="o", markersize=3, label=label)
    if upper:
        panel.fill_between(places, values, upper, alpha=0.15)


def finish(panel: Any, **properties: Any) -> None:
    """Give a panel its axes' properties, a grid and a legend."""
    panel.set(**properties)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def save(figure: Figure, title: str, path: Path) -> None:
    """Write ``figure``, with a title above all panels, to ``path``."""
    if title:
        figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
