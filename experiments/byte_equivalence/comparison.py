# SPDX-License-Identifier: Apache-2.0
"""What both kinds of run share: rows, servers that may fail, and corruptions that must be caught."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx

from experiments.byte_equivalence.arm_run import Corruption, PairRun, SingleRun, with_clients
from experiments.byte_equivalence.arms import Arm
from experiments.byte_equivalence.checks import Check, Checks
from experiments.byte_equivalence.compare import Aspect, Observation
from experiments.common.client import AnswerError
from experiments.common.report import Narrator
from experiments.common.servers import Running, Server, ServerError


class NotCaught(Exception):
    """A planted corruption was not detected, so no result of this harness can be trusted."""


class Comparison:
    """One run. Each server writes its log to ``logs``."""

    def __init__(self, arms: Sequence[Arm], logs: Path, narrator: Narrator, checks: Checks) -> None:
        self.arms = arms
        self.logs = logs
        self.narrator = narrator
        self.checks = checks

    def _row(self, row: Check) -> Check:
        self.checks.add(row)
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
            async def with_run(run: SingleRun | PairRun) -> None:
                assert isinstance(run, PairRun)
                await work(run, servers)

            with_clients(
                servers[: arm.servers],
                servers[arm.servers :],
                with_run,
                writes=arm.writes,
                keeps_blocks=not arm.is_staged,
                order=arm.orders[0],
            )

        self._serve(arm, phase, dtype, launched, with_servers)

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
