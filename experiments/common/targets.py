# SPDX-License-Identifier: Apache-2.0
"""What an experiment promises, what was found, and whether that is enough."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table


class Verdict(NamedTuple):
    """``target`` says what is promised and its limit, ``found`` the figure with its unit."""

    target: str
    found: str
    reached: bool


def table_of_targets(verdicts: Iterable[Verdict]) -> Table:
    """A row for each."""
    # Only here: --help has to work without the environment that this needs.
    from rich.table import Table

    table = Table(title="targets")
    for column in ("target", "found", ""):
        table.add_column(column)
    for target, found, reached in verdicts:
        table.add_row(target, found, "[green]reached[/green]" if reached else "[red]MISSED[/red]")
    return table


def as_json(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    """For a file of results."""
    return [verdict._asdict() for verdict in verdicts]


def exit_status(verdicts: Iterable[Verdict]) -> int:
    """0 if all are reached, else 1."""
    return 0 if all(verdict.reached for verdict in verdicts) else 1
