# SPDX-License-Identifier: Apache-2.0
"""Computes a table and targets from phases. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from experiments.common.targets import Verdict
from experiments.fleet_change.measure import Outcome, Phase

KILL = "kill"
ZERO = "scale to zero"


def table_of(phases: Sequence[Phase]) -> Table:
    """Return a row per phase."""
    table = Table(title="what clients got while the fleet changed")
    kinds = [kind.value for kind in Outcome]
    for column in ("mode", "change", *kinds, "bench: done", "failed", "hand-overs failed", "retries"):
        table.add_column(column, justify="left" if column in ("mode", "change") else "right")
    for one in phases:
        counts = (*(one.outcomes.get(kind, 0) for kind in kinds), one.bench_completed, one.bench_failed)
        table.add_row(one.mode, one.change, *map(str, (*counts, one.failed_hand_overs, one.retries)))
    return table


def judge(phases: Sequence[Phase]) -> list[Verdict]:
    """Return the targets."""

    def total(*kinds: Outcome, planned: bool = False) -> int:
        some = [one for one in phases if not planned or one.change != KILL]
        return sum(one.outcomes.get(kind.value, 0) for one in some for kind in kinds)

    planned = [one for one in phases if one.change not in (KILL, ZERO)]
    # Where nothing runs, requests are refused, and told when to come back.
    refused = sum(one.outcomes.get(Outcome.REFUSED.value, 0) for one in phases if one.change != ZERO)
    back = [one for one in phases if one.change == ZERO and not one.outcomes.get(Outcome.RIGHT.value)]
    right, bad = total(Outcome.RIGHT), total(Outcome.WRONG, Outcome.NO_END)
    errors, early = total(Outcome.BEFORE, Outcome.AFTER, planned=True), total(Outcome.BEFORE)
    benched = sum(one.bench_failed for one in planned)
    handed = sum(one.failed_hand_overs for one in planned)
    completed = sum(one.bench_completed for one in phases)
    return [
        Verdict("wrong answers, and answers without an end (0)", f"{bad}, beside {right} right", bad == 0 < right),
        Verdict("errors before the first token (0)", f"{early}", early == 0),
        Verdict("refused while servers run (0)", f"{refused}", refused == 0),
        Verdict("no right answer while scaled to zero and back (0 phases)", f"{len(back)}", not back),
        Verdict("errors during restarts and updates, and on a busy machine (0)", f"{errors}", errors == 0),
        Verdict(
            "vllm bench serve: failed during these (0)",
            f"{benched}, and {completed} completed in all",
            benched == 0 < completed,
        ),
        Verdict("hand-overs that failed during these (0)", f"{handed}", handed == 0),
    ]
