# SPDX-License-Identifier: Apache-2.0
"""Computes a table and targets from phases. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.common.tables import make_table
from experiments.common.targets import Verdict
from experiments.fleet_change.measure import Outcome, Phase

if TYPE_CHECKING:
    from rich.table import Table

KILL_DECODE = "kill a decode"


def table_of(phases: Sequence[Phase]) -> Table:
    """Return a row per phase."""
    kinds = [kind.value for kind in Outcome]
    rows = []
    for one in phases:
        counts = (*(one.outcomes.get(kind, 0) for kind in kinds), one.failed_hand_overs)
        rows.append([one.mode, one.change, *map(str, counts)])
    return make_table("what clients got while the fleet changed", ("mode", "change", *kinds, "without KV"), rows)


def judge(phases: Sequence[Phase]) -> list[Verdict]:
    """Return the targets."""

    def total(some: Sequence[Phase], *kinds: Outcome) -> int:
        return sum(one.outcomes.get(kind.value, 0) for one in some for kind in kinds)

    right, bad = total(phases, Outcome.RIGHT), total(phases, Outcome.WRONG, Outcome.NO_END)
    # Those of a decode server that is killed break off.
    others = [one for one in phases if one.change != KILL_DECODE]
    errors = total(others, Outcome.BEFORE, Outcome.AFTER)
    return [
        Verdict("wrong answers, and answers without an end (0)", f"{bad}, beside {right} right", bad == 0 < right),
        Verdict("errors, unless a decode server is killed (0)", f"{errors}", errors == 0),
    ]
