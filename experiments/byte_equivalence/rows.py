# SPDX-License-Identifier: Apache-2.0
"""Rows of the result: what was checked of an arm, as a table, as JSON, and as an exit status."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from experiments.byte_equivalence.arms import SINGLE, Arm
from experiments.byte_equivalence.compare import Difference
from experiments.byte_equivalence.subjects import Phase
from experiments.common.pages import PageCount

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


# ------------------------------------------------------------------------------------------------------- the last rows


def summary(
    rows: Sequence[dict[str, Any]], last: Path | None, arms: Sequence[Arm], phases: Sequence[Phase]
) -> dict[str, Any]:
    """Return the new content of the file: ``rows`` of this run, and the file's rows of arms that this run left out.

    Args:
        last: the file, if this run covered some arms only. Its rows of other arms are kept, each with the commit that
            it was measured at.
        arms: all arms of a complete run of this size.
        phases: all phases of such a run.

    Returns: "verdict" over all rows; "missing": arms that lack a required row; "checks": the rows.
    """
    before = json.loads(last.read_text()) if last is not None and last.is_file() else {"checks": []}
    run = {row["arm"] for row in rows}
    kept = [{"commit": before["commit"], **row} for row in before["checks"] if row["arm"] not in run]
    whole = [*kept, *rows]
    there = {(row["arm"], row["check"]) for row in whole}
    missing = [arm.name for arm in arms if not {(arm.name, check) for check in _needed(arm, phases)} <= there]
    return {"verdict": VERDICTS[exit_status(whole)], "missing": missing, "checks": whole}


def _needed(arm: Arm, phases: Sequence[Phase]) -> Iterator[str]:
    """Yield the names of the rows that an arm must have to count as compared."""
    for phase in phases:
        if arm.mode == SINGLE:
            yield f"{phase.name}: answers ({phase.dtype})"
            continue
        for order in arm.orders:
            name = phase.name if len(arm.orders) == 1 else f"{phase.name}, {order}"
            if phase.sequential:
                yield f"{name}: tokens and log-probabilities ({phase.dtype})"
                yield f"{name}: SHA-256 of KV blocks, sent and received"
            if phase.sequential and phase.exact_between_arms and arm.computes_as_stock and arm.kvcached:
                yield f"{name}: exactly as stock P/D"
            if phase.concurrent:
                yield f"{name}: tokens, 32 at a time ({phase.dtype})"
                yield f"{name}: SHA-256 of KV blocks, 32 at a time"


# --------------------------------------------------------------------------------------------------- rows of memory


def remapped(arm: str, what: str, pages: PageCount) -> Check:
    mib = {
        name: round(getattr(pages, f"{name}_bytes") / 2**20, 1)
        for name in ("limit", "lowest", "highest", "mapped", "unmapped", "remapped")
    }
    return Check(
        arm,
        what,
        pages.unmapped_bytes > 0 and pages.remapped_bytes > 0,
        f"at least {mib['unmapped']} MiB unmapped and {mib['remapped']} MiB mapped again, between "
        f"{mib['lowest']} and {mib['highest']} MiB mapped of {mib['limit']} MiB",
        {f"{name}_mib": value for name, value in mib.items()},
    )


def came_back(arm: str, what: str, resting: Sequence[int], page_group_bytes: int) -> Check:
    """Return the row that checks that at most one page group (bytes) was mapped after each round."""
    return Check(
        arm,
        what,
        bool(resting) and max(resting) <= page_group_bytes,
        f"{max(resting, default=0) / 2**20:.0f} MiB mapped at rest, a page group is {page_group_bytes / 2**20:.0f} MiB",
        {"resting_mib": [level / 2**20 for level in resting]},
    )
