# SPDX-License-Identifier: Apache-2.0
"""Tables of results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_NUMBER = re.compile(r"[-+(]?\d|-?\Z")


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table. Columns whose every cell begins with a number, or is empty, are justified to the right."""
    # Imported here, not at the top: --help has to work without an environment.
    from rich.table import Table

    made = list(rows)
    table = Table(title=title)
    for place, column in enumerate(columns):
        is_number = all(_NUMBER.match(row[place]) for row in made)
        table.add_column(column, justify="right" if is_number else "left")
    for row in made:
        table.add_row(*row)
    return table


def milliseconds(seconds: float | None, digits: int = 0) -> str:
    """Return a cell; empty for None."""
    return "" if seconds is None else f"{seconds * 1e3:.{digits}f}"
