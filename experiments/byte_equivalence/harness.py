# SPDX-License-Identifier: Apache-2.0
"""Runs the arms, compares their answers, and adds a row per check."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.byte_equivalence.arm_run import CORRUPTIONS, PairRun
from experiments.byte_equivalence.arms import (
    BLOCK_SIZE,
    HELD_PAGES,
    KVCACHED_PAGE_BYTES,
    MAX_BATCHED_TOKENS,
    MAX_PROMPT_TOKENS,
    REFERENCE,
    SAMPLED_EVERY_NTH_BLOCK,
    Arm,
    Phase,
    phases,
    specs,
)
from experiments.byte_equivalence.compare import (
    LOGPROB_TOLERANCE,
    Difference,
    Expected,
    Observation,
    catches,
    compare_answers,
    compare_blocks,
    compare_senders,
)
from experiments.byte_equivalence.comparison import Check, Comparison, compared, count_received
from experiments.byte_equivalence.prompts import damage_prompts, fewest_received, fixed_prompts
from experiments.common.client import Answer
from experiments.common.model import GQA, make_model
from experiments.common.pages import PageCount, PageWatch
from experiments.common.report import Narrator
from experiments.common.servers import Asking, Running, Server


@dataclass
class Baseline:
    """What a phase compares with: the single instance's answers, and the stock P/D arm's observations once it ran."""

    answers: list[Answer]
    damaged: list[Answer]
    stock: list[Observation] = field(default_factory=list)


class Harness(Comparison):
    def __init__(self, arms: Sequence[Arm], logs: Path, narrator: Narrator, *, quick: bool) -> None:
        super().__init__(arms, logs, narrator)
        self.shape = GQA
        self.quick = quick
        self.prompts = fixed_prompts(
            block_size=BLOCK_SIZE,
            max_batched=MAX_BATCHED_TOKENS,
            max_prompt=MAX_PROMPT_TOKENS,
            vocabulary=self.shape.vocabulary,
        )
        self.damage = damage_prompts(len(CORRUPTIONS), block_size=BLOCK_SIZE, vocabulary=self.shape.vocabulary)

    def run(self) -> None:
        """Run every phase, add `rows`; raises :class:`NotCaught` at the first corruption not detected."""
        model = make_model(self.shape)
        for phase in phases(self.shape, quick=self.quick):
            baseline: Baseline | None = None
            # The reference starts together with the first pair. Two pairs at once would only slow each other down:
            # every NIXL agent keeps a core busy.
            first, *rest = self.arms
            for together in ([REFERENCE, first], *([arm] for arm in rest)):
                with contextlib.ExitStack() as stack:
                    launched = [(arm, stack.enter_context(self._launch(arm, phase, model))) for arm in together]
                    for arm, servers in launched:
                        if arm is REFERENCE:
                            baseline = self._reference(phase, servers)
                        elif baseline is not None:
                            self._pair(arm, phase, servers, baseline)
                if baseline is None:
                    return

    def _launch(self, arm: Arm, phase: Phase, model: Path) -> Running:
        made = specs(arm, model, phase.dtype, phase.pool, BLOCK_SIZE, MAX_BATCHED_TOKENS, forks=self.quick)
        return (Asking if arm.asks else Running)(made, self.logs, self.narrator.update)

    def _reference(self, phase: Phase, launched: Running) -> Baseline | None:
        # One prompt is in the set twice, so one answer may occur twice.
        fewest = len(self.prompts) - 1
        found = self._learn(phase.name, phase.dtype, launched, fewest, reference=self.prompts, damaged=self.damage)
        return None if found is None else Baseline(*found)

    def _pair(self, arm: Arm, phase: Phase, launched: Running, baseline: Baseline) -> None:
        async def work(run: PairRun, servers: list[Server]) -> None:
            geometry = await run.arm()
            await self._plant(arm, phase, run, baseline)
            if phase.sequential:
                await self._depend(arm, phase, run)
            for order in arm.orders:
                run.order = order
                if phase.sequential:
                    await self._sequential(arm, phase, run, baseline, geometry)
                if phase.concurrent:
                    await self._concurrent(arm, phase, run, baseline, geometry, servers)

        self._serve_pair(arm, phase.name, phase.dtype, launched, work)

    async def _plant(self, arm: Arm, phase: Phase, run: PairRun, baseline: Baseline) -> None:
        tolerance = LOGPROB_TOLERANCE[phase.dtype]
        for corruption, prompt, answer in zip(CORRUPTIONS, self.damage, baseline.damaged, strict=True):
            self.narrator.update(f"{arm.name}: planting: {corruption.words}")
            seen = await run.planted(corruption, prompt, "planted")
            blocks = prompt.blocks(BLOCK_SIZE)
            expected = [Expected(blocks, blocks, blocks)] * len(seen.hand_over.sent_digests)
            by_bytes, by_output = catches(prompt.name, answer, seen, expected, tolerance=tolerance)
            self._must_be_caught(arm, phase.name, corruption, by_bytes, by_output)

    async def _depend(self, arm: Arm, phase: Phase, run: PairRun) -> None:
        # Not simply the longest: the last block must hold more than the last token, which D computes itself.
        prompt = max(
            (one for one in self.prompts if len(one.token_ids) % BLOCK_SIZE > BLOCK_SIZE // 4),
            key=lambda one: len(one.token_ids),
        )
        # All arms share the model, so only the first needs each block; for the others a sample shows that the probe
        # changes the blocks which attention reads.
        every = phase.every_nth_block if arm is self.arms[0] else SAMPLED_EVERY_NTH_BLOCK
        found = await run.dependence(prompt, BLOCK_SIZE, every, "dependence", self.narrator.update)
        changed = sum(gap > 0 for gap in found.gaps.values())
        what = f"{phase.name}: output depends on {'every block' if every == 1 else 'blocks'}"
        outcome = (
            f"{changed} of {len(found.gaps)} zeroed blocks (of {found.blocks}) change the log-probabilities, by "
            f"{min(found.gaps.values()):.3g} nats or more; repeating changes them by {found.control_gap:.3g}"
        )
        self._row(Check(arm.name, what, found.proved, outcome))

    async def _sequential(
        self, arm: Arm, phase: Phase, run: PairRun, baseline: Baseline, geometry: Mapping[str, Any]
    ) -> None:
        name = named(phase, arm, run)
        seen = await run.sequential(self.prompts, f"sequential-{run.slug}", self.narrator.update)
        self._compare_answers(arm, name, phase.dtype, list(zip(self.prompts, baseline.answers, seen, strict=True)))
        blocks: list[Difference] = []
        exact: list[Difference] = []
        for place, (prompt, observed) in enumerate(zip(self.prompts, seen, strict=True)):
            fewest = fewest_received(prompt, self.prompts[:place], BLOCK_SIZE)
            if observed.record is not None or not run.may_be_computed(fewest):
                num_blocks = prompt.blocks(BLOCK_SIZE)
                blocks += compare_blocks(prompt.name, observed, blocks=num_blocks, fewest_received=fewest)
            if baseline.stock and phase.exact_between_arms and arm.computes_as_stock and observed.record is not None:
                stock = baseline.stock[place].hand_over
                exact += compare_answers(prompt.name, stock.answer, observed.hand_over.answer, 0.0)
                exact += compare_senders(prompt.name, stock, observed.hand_over, len(prompt.token_ids) // BLOCK_SIZE)
        shape = geometry["groups"][0]
        received = count_received(seen)
        what = f"{name}: SHA-256 of KV blocks, sent and received"
        outcome = f"{received} blocks of {shape['block_bytes']} bytes travelled, KV tensor {shape['shape'][0]}"
        figures = {"blocks": received, "kv_shape": shape["shape"][0], "kv_stride": shape["stride"][0]}
        self._row(compared(arm.name, what, blocks, outcome, **figures))
        if not phase.exact_between_arms or not arm.computes_as_stock:
            return
        if baseline.stock:
            outcome = "log-probabilities and P's KV bytes equal to the stock P/D arm's, to the last bit"
            self._row(compared(arm.name, f"{name}: exactly as stock P/D", exact, outcome))
        elif not arm.kvcached:
            baseline.stock = seen

    async def _concurrent(
        self,
        arm: Arm,
        phase: Phase,
        run: PairRun,
        baseline: Baseline,
        geometry: Mapping[str, Any],
        servers: Sequence[Server],
    ) -> None:
        page_group_bytes = KVCACHED_PAGE_BYTES * self.shape.layers * 2
        name = named(phase, arm, run)
        memory = PoolMemory([server.identity for server in servers] if arm.kvcached else [], page_group_bytes)
        with memory:
            seen = await run.concurrent(
                self.prompts,
                f"concurrent-{run.slug}",
                rounds=phase.rounds,
                hold_blocks=arm.servers * int(HELD_PAGES * page_group_bytes) // geometry["groups"][0]["block_bytes"],
                settle=memory.settle,
                progress=self.narrator.update,
            )
        expected = dict(zip((prompt.name for prompt in self.prompts), baseline.answers, strict=True))
        answers: list[Difference] = []
        blocks: list[Difference] = []
        for prompt, observed in seen:
            answers += compare_answers(prompt.name, expected[prompt.name], observed.hand_over.answer, None)
            least = fewest_received(prompt, [prompt] if prompt.family else [], BLOCK_SIZE)
            if observed.record is None and run.may_be_computed(least):
                continue
            blocks += compare_blocks(prompt.name, observed, blocks=prompt.blocks(BLOCK_SIZE), fewest_received=least)
        what = f"{name}: tokens, 32 at a time ({phase.dtype})"
        self._row(compared(arm.name, what, answers, f"{len(seen)} shuffled requests"))
        received = count_received([observed for _, observed in seen])
        what = f"{name}: SHA-256 of KV blocks, 32 at a time"
        self._row(compared(arm.name, what, blocks, f"{received} blocks travelled", blocks=received))
        for server, watch, resting in zip(servers, memory.watches, memory.resting, strict=False):
            side = server.spec.name.rsplit("-", 1)[-1]
            # When D is asked, or P stages, P may keep a request only while computing it: its pool needs one page group,
            # so it never has to remap.
            if (run.order == "P first" and not arm.is_staged) or side.startswith("decode"):
                self._row(remapped(arm.name, f"{name}: kvcached remapped during the run ({side})", watch.count()))
            what = f"{name}: memory came back after every round ({side})"
            self._row(came_back(arm.name, what, resting, page_group_bytes))


def named(phase: Phase, arm: Arm, run: PairRun) -> str:
    return phase.name if len(arm.orders) == 1 else f"{phase.name}, {run.order}"


# ------------------------------------------------------------------------------------------------------ pools of memory


SETTLE_SECONDS = 20.0


class PoolMemory(contextlib.ExitStack):
    """Samples kvcached's memory counters of ``ipc_names`` during a ``with`` block.

    Args:
        resting_bytes: what may stay mapped while the server is idle: the page group of vLLM's null block.

    Attributes:
        resting: the bytes each pool had mapped after each round.
    """

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
        return [watch.mapped_bytes() or 0 for watch in self.watches]


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
