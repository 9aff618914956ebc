# SPDX-License-Identifier: Apache-2.0
"""Runs the arms with a subject's model, compares their answers, and adds a row per check."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from experiments.byte_equivalence.arms import REFERENCE, Arm
from experiments.byte_equivalence.compare import (
    LOGPROB_TOLERANCE,
    Check,
    Difference,
    catches,
    compare_answers,
    compare_groups,
    compare_senders,
    compared,
    largest_logprob_gap,
    until_tie,
)
from experiments.byte_equivalence.pair_run import CONCURRENCY, MAX_TOKENS, PairRun
from experiments.byte_equivalence.subjects import (
    BLOCK_SIZE,
    SAMPLED_EVERY_NTH_BLOCK,
    Group,
    Phase,
    Prompt,
    Subject,
    is_alone,
    may_be_cached,
)
from experiments.common.client import Answer, AnswerError, HandOver, answers_of, http_client
from experiments.common.counted import PageCount, PageWatch
from experiments.common.report import Run
from experiments.common.servers import Asking, Running, Server, ServerError

HELD_PAGES = 1.5
"""P keeps blocks of this many page groups before D begins: more than one, so that P's pool has to grow."""
SETTLE_SECONDS = 20.0
Work = Callable[[list[Server]], Coroutine[Any, Any, None]]


class NotCaught(Exception):
    """A planted corruption was not detected, so no result of this harness can be trusted."""


@dataclass
class Baseline:
    """What a phase compares with: the single instance's answers, by the prompts' names, and the stock P/D arm's
    hand-overs once it ran."""

    answers: dict[str, Answer]
    stock: list[HandOver] = field(default_factory=list)


class Harness:
    """The arms of one run; each server writes its log to the run's folder."""

    def __init__(self, subject: Subject, arms: Sequence[Arm], run: Run) -> None:
        self.subject = subject
        self.arms = arms
        self.output = run
        self.rows: list[Check] = []

    def run(self) -> None:
        """Run every phase, add `rows`; raises :class:`NotCaught` at the first corruption not detected."""
        for phase in self.subject.phases:
            baseline: Baseline | None = None
            # The reference starts together with the first pair. Two pairs at once would only slow each other down:
            # every NIXL agent keeps a core busy.
            first, *rest = self.arms
            for together in ([REFERENCE, first], *([arm] for arm in rest)):
                with contextlib.ExitStack() as stack:
                    launched = []
                    for arm in together:
                        start = Asking if arm.asks else Running
                        servers = start(self.subject.specs(arm, phase), self.output.logs, self.output.update)
                        launched.append((arm, stack.enter_context(servers)))
                    for arm, servers in launched:
                        if arm is REFERENCE:
                            baseline = self._reference(phase, servers)
                        elif baseline is not None:
                            self._pair(arm, phase, servers, baseline)
                if baseline is None:
                    return

    def add(self, row: Check) -> Check:
        self.rows.append(row)
        self.output.say(f"{'ok    ' if row.passed else 'FAILED'} {row.arm}: {row.what}: {row.outcome}")
        return row

    def _serve(self, arm: Arm, phase: Phase, launched: Running, work: Work) -> None:
        """Wait until the arm's servers answer, run ``work`` with them, and stop them.

        A failure becomes a row instead of ending the run: the other arms can still be compared.
        """
        started = False
        try:
            servers = launched.ready()
            started = True
            self.output.say(f"{arm.name}: serving ({phase.dtype})")
            asyncio.run(work(servers))
        except (ServerError, AnswerError, httpx.HTTPError) as error:
            outcome = f"{type(error).__name__}: {error}. Logs: {self.output.logs}"
            is_setup = isinstance(error, ServerError) and not started
            self.add(Check(arm.name, f"{phase.name}: serves", False, outcome, failed_setup=is_setup))
        finally:
            launched.stop()

    def _reference(self, phase: Phase, launched: Running) -> Baseline | None:
        """Return the single instance's answers; None if it did not answer."""
        prompts, found = self.subject.prompts, list[Answer]()

        async def work(servers: list[Server]) -> None:
            salts = [one.salt("reference") for one in prompts]
            asked = [list(one.token_ids) for one in prompts]
            found.extend(await answers_of(servers[0].base_url, asked, MAX_TOKENS, "reference", salts=salts))

        self._serve(REFERENCE, phase, launched, work)
        if not found:
            return None
        distinct = len({tuple(one.token_ids) for one in found})
        longest = max(len(one.token_ids) for one in prompts)
        outcome = f"{len(found)} prompts of 1 to {longest} tokens, {distinct} distinct answers"
        is_enough = distinct >= self.subject.fewest_distinct
        self.add(Check(REFERENCE.name, f"{phase.name}: answers ({phase.dtype})", is_enough, outcome))
        return Baseline(dict(zip((one.name for one in prompts), found, strict=True)))

    def _pair(self, arm: Arm, phase: Phase, launched: Running, baseline: Baseline) -> None:
        async def work(servers: list[Server]) -> None:
            async with http_client(CONCURRENCY) as http:
                run = PairRun(arm, servers, http, self.output.update)
                geometry = await run.arm()
                groups = [
                    Group(one["block_size"], one["window"], one["is_state"], len(one["layers"]))
                    for one in geometry["groups"]
                ]
                checks = _Checks(self, self.subject, arm, phase, run, baseline, geometry, groups)
                await checks.plant()
                if phase.sequential and phase.every_nth_block:
                    await checks.depend()
                for order in arm.orders:
                    run.order = order
                    if phase.sequential:
                        await checks.sequential()
                    if phase.concurrent:
                        await checks.concurrent(servers)

        self._serve(arm, phase, launched, work)


@dataclass(frozen=True)
class _Checks:
    """The checks of one arm in one phase. Each adds rows."""

    harness: Harness
    subject: Subject
    arm: Arm
    phase: Phase
    run: PairRun
    baseline: Baseline
    geometry: Mapping[str, Any]
    groups: Sequence[Group]

    @property
    def name(self) -> str:
        """The first part of a row's name: the phase, and the order if the arm has several."""
        return self.phase.name if len(self.arm.orders) == 1 else f"{self.phase.name}, {self.run.order}"

    @property
    def slug(self) -> str:
        """For request ids."""
        return f"{self.phase.name}-{self.run.order}".replace(" ", "-")

    def compared(self, what: str, differences: Iterable[Difference], outcome: str, **figures: Any) -> None:
        self.harness.add(compared(self.arm.name, what, differences, outcome, **figures))

    async def plant(self) -> None:
        """Compare damaged hand-overs with the same pair's undamaged ones, which have to be equal bit for bit. Raises
        NotCaught if a damage changed too little, or requests differ without one."""
        damages = self.subject.damages(self.groups)
        prompts = [prompt for _, prompt in damages]
        clean, again = [
            [one.answer for one in await self.run.sequential(prompts, f"{name}-{self.slug}")]
            for name in ("clean", "control")
        ]
        gap = max(map(largest_logprob_gap, clean, again))
        outcome = f"{len(prompts)} prompts, log-probabilities within {gap:.3g} nats"
        what = f"{self.phase.name}: repeating changes nothing"
        if not self.harness.add(Check(self.arm.name, what, gap == 0.0, outcome)).passed:
            raise NotCaught(f"{what}: repeated requests differ, so what damages change is not known")
        for place, ((corruption, prompt), answer) in enumerate(zip(damages, clean, strict=True)):
            self.run.progress(f"{self.arm.name}: planting: {corruption.words}")
            seen = await self.run.planted(corruption, prompt, f"planted-{self.slug}-{place}")
            expected = self.subject.expected(prompt, [], self.groups)
            by_bytes, by_output = catches(prompt.name, answer, seen, expected, tolerance=self.phase.damage_nats)
            caught = bool(by_bytes) and (bool(by_output) or not corruption.changes_output)
            what = f"{self.phase.name}: planted: {corruption.words}"
            by = ", ".join([*by_bytes, *by_output]) or "nothing"
            outcome = f"{'caught' if caught else 'seen only'} by {by}"
            if not self.harness.add(Check(self.arm.name, what, caught, outcome)).passed:
                raise NotCaught(what)

    async def depend(self) -> None:
        # Not simply the longest: the last block must hold more than the last token, which D computes itself.
        prompt = max(
            (one for one in self.subject.prompts if len(one.token_ids) % BLOCK_SIZE > BLOCK_SIZE // 4),
            key=lambda one: len(one.token_ids),
        )
        # All arms share the model, so only the first needs each block; for the others a sample shows that the probe
        # changes the blocks which attention reads.
        is_first = self.arm is self.harness.arms[0]
        every = self.phase.every_nth_block if is_first else SAMPLED_EVERY_NTH_BLOCK
        found = await self.run.dependence(prompt, BLOCK_SIZE, every, "dependence")
        changed = sum(gap > 0 for gap in found.gaps.values())
        what = f"{self.phase.name}: output depends on {'every block' if every == 1 else 'blocks'}"
        outcome = (
            f"{changed} of {len(found.gaps)} zeroed blocks (of {found.blocks}) change the log-probabilities, by "
            f"{min(found.gaps.values()):.3g} nats or more; repeating changes them by {found.control_gap:.3g}"
        )
        self.harness.add(Check(self.arm.name, what, found.proved, outcome))

    async def sequential(self) -> None:
        prompts = self.subject.prompts
        seen = list(zip(prompts, await self.run.sequential(prompts, f"one-{self.slug}"), strict=True))
        self._answers(self.name, seen)
        before = [prompts[:place] for place in range(len(prompts))]
        self._blocks(f"{self.name}: SHA-256 of KV blocks, sent and received", seen, before)
        if self.subject.is_family:
            # Where the single instance computes the last token in a step of its own, too, no bit may differ.
            alike = [one for one in seen if is_alone(one[0])]
            what = f"{self.name}: last token in a step of its own"
            self.compared(what, self._unlike(alike, 0.0), f"{len(alike)} prompts, to the last bit")
        elif self.phase.exact_between_arms and self.arm.computes_as_stock:
            self._exact_as_stock([observed for _, observed in seen])

    async def concurrent(self, servers: Sequence[Server]) -> None:
        page_group_bytes = self.subject.page_group_bytes
        watched = [server.identity for server in servers] if self.arm.kvcached and page_group_bytes else []
        held_bytes = self.arm.servers * int(HELD_PAGES * page_group_bytes)
        with PoolMemory(watched, page_group_bytes) as memory:
            seen = await self.run.concurrent(
                self.subject.prompts,
                f"many-{self.slug}",
                rounds=self.phase.rounds,
                hold_blocks=held_bytes // self.geometry["groups"][0]["block_bytes"],
                settle=memory.settle,
            )
        if self.subject.is_family:
            self._answers(f"{self.name}, 32 at a time", seen)
        else:
            what = f"{self.name}: tokens, 32 at a time ({self.phase.dtype})"
            self.compared(what, self._unlike(seen, None), f"{len(seen)} shuffled requests")
        before = [[prompt] if prompt.family else [] for prompt, _ in seen]
        self._blocks(f"{self.name}: SHA-256 of KV blocks, 32 at a time", seen, before)
        for server, watch, resting in zip(servers, memory.watches, memory.resting, strict=False):
            side = server.spec.name.rsplit("-", 1)[-1]
            # When D is asked, or P stages, P may keep a request only while computing it: its pool needs one page group,
            # so it never has to remap.
            if (self.run.order == "P first" and not self.arm.is_staged) or side.startswith("decode"):
                what = f"{self.name}: kvcached remapped during the run ({side})"
                self.harness.add(remapped(self.arm.name, what, watch.count()))
            what = f"{self.name}: memory came back after every round ({side})"
            self.harness.add(came_back(self.arm.name, what, resting, page_group_bytes))

    def _unlike(self, seen: Sequence[tuple[Prompt, HandOver]], tolerance: float | None) -> list[Difference]:
        """Return where answers differ from the single instance's."""
        pairs = ((prompt.name, self.baseline.answers[prompt.name], observed.answer) for prompt, observed in seen)
        return [one for pair in pairs for one in compare_answers(*pair, tolerance)]

    def _answers(self, name: str, seen: Sequence[tuple[Prompt, HandOver]]) -> None:
        """Add the row of the answers beside the single instance's."""
        tolerance, gap, ties = LOGPROB_TOLERANCE[self.phase.dtype], 0.0, 0
        for prompt, observed in seen:
            expected = self.baseline.answers[prompt.name]
            until = until_tie(expected, observed.answer, tolerance)
            gap, ties = max(gap, largest_logprob_gap(*until)), ties + (until[0] is not expected)
        what = f"{name}: tokens and log-probabilities ({self.phase.dtype})"
        outcome = f"{len(seen)} prompts, log-probabilities within {gap:.3g} nats of the single instance"
        outcome += f", {ties} of them up to a tie" if ties else ""
        self.compared(what, self._unlike(seen, tolerance), outcome, largest_gap_nats=gap, ties=ties)

    def _blocks(self, what: str, seen: Sequence[tuple[Prompt, HandOver]], before: Sequence[Sequence[Prompt]]) -> None:
        """Add the row of the transferred blocks. ``before``: of each prompt, those that D may still have cached."""
        differences: list[Difference] = []
        for (prompt, observed), earlier in zip(seen, before, strict=True):
            fewest = self.subject.fewest_received(prompt, earlier, self.groups)
            # D may compute what lacks one block at most without asking P.
            may_be_computed = self.run.order == "asked" and fewest <= 1
            has_all = self.subject.is_family and may_be_cached(prompt, self.groups)
            if observed.record is not None or not (may_be_computed or has_all):
                expected = self.subject.expected(prompt, earlier, self.groups)
                if self.run.order == "asked" and prompt.family:
                    # P may offer what it has cached of the common beginning, and D computes the rest.
                    expected = [replace(one, fewest_offered=1) for one in expected]
                differences += compare_groups(prompt.name, observed, expected)
        received = sum(len(group) for _, one in seen if one.record is not None for group in one.record["digests"])
        states = sum(group.is_state for group in self.groups) * len(seen)
        first = self.geometry["groups"][0]
        outcome = f"{received - states} blocks and {states} states travelled, KV tensor {first['shape'][0]}"
        shape = {"kv_shape": first["shape"][0], "kv_stride": first["stride"][0]}
        self.compared(what, differences, outcome, blocks=received - states, states=states, **shape)

    def _exact_as_stock(self, seen: list[HandOver]) -> None:
        """Where P computes the same chunks in the same way as stock P, no bit may differ."""
        if not self.baseline.stock:
            if not self.arm.kvcached:
                self.baseline.stock = seen
            return
        differences: list[Difference] = []
        for prompt, stock, observed in zip(self.subject.prompts, self.baseline.stock, seen, strict=True):
            if observed.record is not None:
                differences += compare_answers(prompt.name, stock.answer, observed.answer, 0.0)
                differences += compare_senders(prompt.name, stock, observed, len(prompt.token_ids) // BLOCK_SIZE)
        outcome = "log-probabilities and P's KV bytes equal to the stock P/D arm's, to the last bit"
        self.compared(f"{self.name}: exactly as stock P/D", differences, outcome)


class PoolMemory(contextlib.ExitStack):
    """Samples kvcached's memory counters during a ``with`` block. ``resting_bytes`` may stay mapped while a server is
    idle: the page group of vLLM's null block. ``resting``: the bytes that each pool had mapped after each round."""

    def __init__(self, ipc_names: Sequence[str], resting_bytes: int) -> None:
        super().__init__()
        self.resting_bytes = resting_bytes
        self.watches = [PageWatch(name) for name in ipc_names]
        self.resting: list[list[int]] = [[] for _ in ipc_names]

    def __enter__(self) -> PoolMemory:
        for watch in self.watches:
            self.enter_context(watch)
        return self

    async def settle(self) -> None:
        """Wait at most ``SETTLE_SECONDS`` until every pool is down to its idle size; record the size reached."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline and any(level > self.resting_bytes for level in self._levels()):
            await asyncio.sleep(0.05)
        for reached, level in zip(self.resting, self._levels(), strict=True):
            reached.append(level)

    def _levels(self) -> list[int]:
        return [watch.mapped_bytes() for watch in self.watches]


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
