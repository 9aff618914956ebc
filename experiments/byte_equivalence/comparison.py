# SPDX-License-Identifier: Apache-2.0
"""What both kinds of run share: rows of the result, servers that may fail, and corruptions that must be caught."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.markup import escape
from rich.table import Table

from experiments.byte_equivalence.arm_run import Corruption, PairRun, answers_alone, with_pairs
from experiments.byte_equivalence.arms import REFERENCE, Arm
from experiments.byte_equivalence.compare import (
    LOGPROB_TOLERANCE,
    Aspect,
    Difference,
    Observation,
    compare_answers,
    largest_logprob_gap,
    until_tie,
)
from experiments.byte_equivalence.prompts import Prompt
from experiments.common.client import Answer, AnswerError
from experiments.common.report import Narrator
from experiments.common.servers import Running, Server, ServerError

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


# -------------------------------------------------------------------------------------------------------- a run of arms


Learned = list[list[Answer]] | None


class NotCaught(Exception):
    """A planted corruption was not detected, so no result of this harness can be trusted."""


class Comparison:
    def __init__(self, arms: Sequence[Arm], logs: Path, narrator: Narrator) -> None:
        self.arms = arms
        self.logs = logs
        self.narrator = narrator
        self.rows: list[Check] = []

    def _row(self, row: Check) -> Check:
        self.rows.append(row)
        self.narrator.say(f"{'ok    ' if row.passed else 'FAILED'} {row.arm}: {row.what}: {row.outcome}")
        return row

    def _serve(self, arm: Arm, phase: str, dtype: str, launched: Running, work: Callable[[list[Server]], None]) -> None:
        """Wait until the arm's servers answer, run ``work`` with them, and stop them.

        A failure becomes a row instead of ending the run: the other arms can still be compared.
        """
        what, started = f"{phase}: serves", False
        try:
            servers = launched.ready()
            started = True
            self.narrator.say(f"{arm.name}: serving ({dtype})")
            work(servers)
        except (ServerError, AnswerError, httpx.HTTPError) as error:
            outcome = f"{type(error).__name__}: {error}. Logs: {self.logs}"
            is_setup = isinstance(error, ServerError) and not started
            self._row(Check(arm.name, what, False, outcome, failed_setup=is_setup))
        finally:
            launched.stop()

    def _serve_pair(
        self,
        arm: Arm,
        phase: str,
        dtype: str,
        launched: Running,
        work: Callable[[PairRun, list[Server]], Awaitable[None]],
    ) -> None:
        def with_servers(servers: list[Server]) -> None:
            asyncio.run(with_pairs(arm, servers, lambda run: work(run, servers)))

        self._serve(arm, phase, dtype, launched, with_servers)

    def _learn(self, phase: str, dtype: str, launched: Running, fewest: int, **prompts: Sequence[Prompt]) -> Learned:
        """Return the single instance's answers to each set of prompts; None if it did not answer.

        Adds a row: of the first set, at least ``fewest`` answers differ from each other.
        """
        found: list[list[Answer]] = []

        def work(servers: list[Server]) -> None:
            for name, some in prompts.items():
                found.append(asyncio.run(answers_alone(servers[0], some, name, self.narrator.update)))

        self._serve(REFERENCE, phase, dtype, launched, work)
        if len(found) < len(prompts):
            return None
        distinct, longest = (
            len({tuple(one.token_ids) for one in found[0]}),
            max(len(one.token_ids) for one in next(iter(prompts.values()))),
        )
        outcome = f"{len(found[0])} prompts of 1 to {longest} tokens, {distinct} distinct answers"
        self._row(Check(REFERENCE.name, f"{phase}: answers ({dtype})", distinct >= fewest, outcome))
        return found

    def _compare_answers(
        self, arm: Arm, name: str, dtype: str, seen: Sequence[tuple[Prompt, Answer, Observation]]
    ) -> None:
        tolerance = LOGPROB_TOLERANCE[dtype]
        differences: list[Difference] = []
        gap, ties = 0.0, 0
        for prompt, expected, observed in seen:
            found = observed.hand_over.answer
            differences += compare_answers(prompt.name, expected, found, tolerance)
            until = until_tie(expected, found, tolerance)
            gap, ties = max(gap, largest_logprob_gap(*until)), ties + (until[0] is not expected)
        what = f"{name}: tokens and log-probabilities ({dtype})"
        outcome = f"{len(seen)} prompts, log-probabilities within {gap:.3g} nats of the single instance"
        outcome += f", {ties} of them up to a tie" if ties else ""
        self._row(compared(arm.name, what, differences, outcome, largest_gap_nats=gap, ties=ties))

    def _must_be_caught(
        self, arm: Arm, phase: str, corruption: Corruption, by_bytes: Sequence[Aspect], by_output: Sequence[Aspect]
    ) -> None:
        """Add the row of a planted corruption; raises `NotCaught`."""
        caught = bool(by_bytes) and (bool(by_output) or not corruption.changes_output)
        by = ", ".join([*by_bytes, *by_output]) or "nothing"
        what = f"{phase}: planted: {corruption.words}"
        if not self._row(Check(arm.name, what, caught, f"{'caught' if caught else 'seen only'} by {by}")).passed:
            raise NotCaught(what)


def count_received(seen: Sequence[Observation]) -> int:
    return sum(len(group) for one in seen if one.record is not None for group in one.record["digests"])
