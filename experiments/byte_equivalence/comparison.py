# SPDX-License-Identifier: Apache-2.0
"""What both kinds of run share: rows, servers that may fail, and corruptions that must be caught."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx

from experiments.byte_equivalence.arm_run import Corruption, PairRun, answers_alone, with_pairs
from experiments.byte_equivalence.arms import REFERENCE, Arm
from experiments.byte_equivalence.checks import Check, compared
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

Learned = list[list[Answer]] | None


class NotCaught(Exception):
    """A planted corruption was not detected, so no result of this harness can be trusted."""


class Comparison:
    """One run. Each server writes its log to ``logs``."""

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
        """As `_serve`, with clients of P and D."""

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
        """Add the row of the answers beside those expected."""
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
    """Return how many blocks D received in all."""
    return sum(len(group) for one in seen if one.record is not None for group in one.record["digests"])
