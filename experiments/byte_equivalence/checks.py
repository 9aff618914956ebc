# SPDX-License-Identifier: Apache-2.0
"""Rows of the result: what was checked, on which arm, and the outcome."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table

from experiments.byte_equivalence.compare import Difference

DIFFERENCES_SHOWN = 3
VERDICTS = {0: "equal", 1: "NOT EQUAL", 2: "could not be compared"}
"""Exit status -> verdict."""


@dataclass(frozen=True)
class Check:
    """One row. ``outcome`` is text for people; ``failed_setup``: a server did not start, so nothing was compared."""

    arm: str
    what: str
    passed: bool
    outcome: str
    figures: dict[str, Any] = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()
    failed_setup: bool = False


def table_of(rows: Sequence[Check], title: str) -> Table:
    """Return the rows as a table for a terminal."""
    table = Table(title=title, title_justify="left")
    for heading in ("arm", "check", "", "outcome"):
        table.add_column(heading)
    arm = None
    for row in rows:
        if arm is not None and row.arm != arm:
            table.add_section()
        shown = [row.outcome, *(f"{one.prompt}: {one.aspect}: {one.text}" for one in row.differences)]
        if len(row.differences) > DIFFERENCES_SHOWN:
            more = len(row.differences) - DIFFERENCES_SHOWN
            shown = [*shown[: DIFFERENCES_SHOWN + 1], f"... and {more} more, see the JSON"]
        passed = "[green]ok[/green]" if row.passed else "[red]FAILED[/red]"
        table.add_row(row.arm if row.arm != arm else "", row.what, passed, escape("\n".join(shown)))
        arm = row.arm
    return table


def summary_of(rows: Sequence[Check]) -> list[dict[str, Any]]:
    """Return the rows for JSON, with the number of differences only."""
    return [
        {
            "arm": row.arm,
            "check": row.what,
            "passed": row.passed,
            "outcome": row.outcome,
            **({"differences": len(row.differences)} if row.differences else {}),
            **({"failed_setup": True} if row.failed_setup else {}),
            **row.figures,
        }
        for row in rows
    ]


def exit_status(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return 0 if all rows of a summary passed (and there are any), 1 for a difference, 2 if only the set-up failed."""
    failed = [row for row in rows if not row["passed"]]
    if any(not row.get("failed_setup") for row in failed):
        return 1
    return 2 if failed or not rows else 0


def compared(arm: str, what: str, differences: Iterable[Difference], outcome: str, **figures: Any) -> Check:
    """Return a row that passes if there are no differences; ``outcome`` describes what was compared."""
    found = tuple(differences)
    prompts = len({difference.prompt for difference in found})
    text = f"{prompts} prompts differ ({outcome})" if found else outcome
    return Check(arm, what, not found, text, dict(figures), found)
