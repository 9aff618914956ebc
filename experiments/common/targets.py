# SPDX-License-Identifier: Apache-2.0
"""Targets of an experiment: the limit, the measured figure, and whether the target was reached."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table


class Verdict(NamedTuple):
    """One target. ``target`` is its text with the limit, ``found`` the measured figure with its unit."""

    target: str
    found: str
    reached: bool


def table_of_targets(verdicts: Iterable[Verdict]) -> Table:
    """Return a table with a row per verdict."""
    # Imported here, not at the top: --help has to work without an environment.
    from rich.table import Table

    table = Table(title="targets")
    for column in ("target", "found", ""):
        table.add_column(column)
    for target, found, reached in verdicts:
        table.add_row(target, found, "[green]reached[/green]" if reached else "[red]MISSED[/red]")
    return table


def as_json(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    """Return the verdicts as they are stored in a results file."""
    return [verdict._asdict() for verdict in verdicts]


def exit_status(verdicts: Iterable[Verdict]) -> int:
    """Return 0 if all targets were reached, else 1."""
    return 0 if all(verdict.reached for verdict in verdicts) else 1
