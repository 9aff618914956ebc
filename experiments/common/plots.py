# SPDX-License-Identifier: Apache-2.0
"""Plots of results, written as pictures without a display."""

from __future__ import annotations

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


def save(figure: Figure, title: str, path: Path) -> None:
    """Write ``figure``, with a title above all panels, to ``path``."""
    if title:
        figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
