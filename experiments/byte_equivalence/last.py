# SPDX-License-Identifier: Apache-2.0
"""Content of last-VERSION.json: the last result of each arm, also when a run covered only some arms."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.byte_equivalence.arms import SINGLE, Arm
from experiments.byte_equivalence.checks import VERDICTS, exit_status
from experiments.byte_equivalence.phases import Phase


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
    whole = with_kept(rows, last)
    there = {(row["arm"], row["check"]) for row in whole}
    missing = [arm.name for arm in arms if not {(arm.name, check) for check in _needed(arm, phases)} <= there]
    return {"verdict": VERDICTS[exit_status(whole)], "missing": missing, "checks": whole}


def with_kept(rows: Sequence[dict[str, Any]], last: Path | None) -> list[dict[str, Any]]:
    """Return ``rows`` of this run behind the rows of other arms in the file ``last``; arguments as in `summary`."""
    if last is None or not last.is_file():
        return list(rows)
    before = json.loads(last.read_text())
    run = {row["arm"] for row in rows}
    return [*({"commit": before["commit"], **row} for row in before["checks"] if row["arm"] not in run), *rows]


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
