# SPDX-License-Identifier: Apache-2.0
"""Runs the arms with a model whose layers keep KV in several ways (``--model``), and adds a row per check.

Differs from `harness` in what is known before: KV-cache groups have blocks of their own, windows and states, so how
many blocks travel is computed per group from what the servers say. There is no stock P/D arm: stock vLLM wants another
layout of states. Log-probabilities may differ from the single instance's by the rounding of the last token, which
decode computes alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.byte_equivalence.arm_run import Corruption, PairRun
from experiments.byte_equivalence.arms import REFERENCE, Arm, specs
from experiments.byte_equivalence.compare import (
    Difference,
    Expected,
    Observation,
    catches,
    compare_answers,
    compare_groups,
    largest_logprob_gap,
)
from experiments.byte_equivalence.comparison import Check, Comparison, NotCaught, compared, count_received
from experiments.byte_equivalence.prompts import Prompt, damage_prompts, fewest_received, fixed_prompts
from experiments.common.client import Answer
from experiments.common.device import with_extra
from experiments.common.families import FAMILIES, make_family
from experiments.common.report import Narrator
from experiments.common.servers import Asking, Running, Server

BLOCK_SIZE = 32
"""Unit of the prompts' lengths, in tokens; groups have blocks of 32 to 256."""
MAX_BATCHED_TOKENS = 512
MAX_PROMPT_TOKENS = 1900
DAMAGED_TOKENS = 1190
"""Several blocks of every group, the last one filled in part."""
POOL: Mapping[str, str] = {"KVCACHED_HOSTVMM_GIB": "2", "KVCACHED_MAX_CACHED_TOKENS": "16000"}
HYBRID = "--no-disable-hybrid-kv-cache-manager"


@dataclass(frozen=True)
class Group:
    """A KV-cache group, as decode's probe describes it."""

    block_size: int
    window: int | None
    is_state: bool
    layers: int

    def expected(self, prompt: Prompt, shared_tokens: int, *, has_states: bool, recomputes_last: bool) -> Expected:
        """How many of its blocks travel for a prompt, of which D may have the first ``shared_tokens`` already."""
        if self.is_state:
            return Expected(1, 1, 1)
        num_tokens = len(prompt.token_ids)
        offered_tokens, wanted_tokens = num_tokens - has_states, num_tokens - recomputes_last
        offered, wanted = (-(-tokens // self.block_size) for tokens in (offered_tokens, wanted_tokens))
        unneeded = offered - wanted
        if self.window is None:
            return Expected(offered, offered, wanted - shared_tokens // self.block_size, unneeded)
        in_window = -(-min(self.window, offered_tokens) // self.block_size)
        return Expected(in_window, offered, 0, unneeded)


class FamilyRun(Comparison):
    def __init__(self, family: str, arms: Sequence[Arm], logs: Path, narrator: Narrator) -> None:
        super().__init__(arms, logs, narrator)
        self.family = FAMILIES[family]
        self.name = family
        vocabulary = self.family.values["vocab_size"]
        prompts = fixed_prompts(
            block_size=BLOCK_SIZE, max_batched=MAX_BATCHED_TOKENS, max_prompt=MAX_PROMPT_TOKENS, vocabulary=vocabulary
        )
        self.prompts = [one for one in prompts if len(one.token_ids) >= self.family.fewest_tokens]
        self.vocabulary = vocabulary

    @property
    def has_states(self) -> bool:
        """Whether vLLM's own name for the family's cache modes applies: it may keep no prefixes."""
        return "layer_types" not in self.family.values or "sliding_attention" not in self.family.values["layer_types"]

    def run(self) -> None:
        """Run with prefix caching, and without where that changes how states are kept; raises `NotCaught`."""
        model = make_family(self.name)
        for caching in self._caching():
            phase = "prefix caching" if caching else "no prefix caching"
            flags = (HYBRID, *self.family.arguments, *(() if caching else ("--no-enable-prefix-caching",)))
            fewest = len(self.prompts) // 2 + 1
            with self._launch(REFERENCE, model, flags) as launched:
                found = self._learn(phase, self.family.dtype, launched, fewest, reference=self.prompts)
            if found is None:
                return
            for arm in self.arms:
                self._pair(phase, arm, model, flags, found[0])

    def _caching(self) -> tuple[bool, ...]:
        if not self.has_states:
            return (True,)
        if not self.family.caches_prefixes:
            self.narrator.say("without prefix caching only: with it, this vLLM's CPU build cannot compute Mamba2")
            return (False,)
        return (True, False)

    def _launch(self, arm: Arm, model: Path, flags: tuple[str, ...]) -> Running:
        # Slots are as large as these models' blocks, so a slab of the size that is enough for others may be too small.
        connector = with_extra(arm.connector, {"staging_gib": None}) if arm.connector else {}
        extra = {key: value for key, value in (connector.get("kv_connector_extra_config") or {}).items() if value}
        config = {**connector, "kv_connector_extra_config": extra} if connector else {}
        plain = replace(arm, connector=config, environment={**arm.environment, **self.family.environment})
        made = specs(
            plain,
            model,
            self.family.dtype,
            POOL,
            self.family.block_size,
            MAX_BATCHED_TOKENS,
            forks=True,
            arguments=flags,
        )
        return (Asking if plain.asks else Running)(made, self.logs, self.narrator.update)

    def _damaged(self, count: int) -> list[Prompt]:
        made = damage_prompts(count, block_size=BLOCK_SIZE * 8, vocabulary=self.vocabulary)
        return [Prompt(one.name, one.token_ids[:DAMAGED_TOKENS]) for one in made]

    def _pair(self, phase: str, arm: Arm, model: Path, flags: tuple[str, ...], baseline: list[Answer]) -> None:
        async def work(run: PairRun, _: list[Server]) -> None:
            geometry = await run.arm()
            groups = [
                Group(one["block_size"], one["window"], one["is_state"], len(one["layers"]))
                for one in geometry["groups"]
            ]
            await self._plant(phase, arm, run, groups)
            for order in arm.orders:
                run.order = order
                name = phase if len(arm.orders) == 1 else f"{phase}, {order}"
                slug = f"{phase}-{run.slug}".replace(" ", "-")
                seen = await run.sequential(self.prompts, f"one-{slug}", self.narrator.update)
                pairs = list(zip(self.prompts, seen, strict=True))
                self._compare(f"{name}, one at a time", arm, run, groups, pairs, baseline)
                self._compare_exactly(name, arm, list(zip(self.prompts, seen, baseline, strict=True)))
                if self.family.dtype == "float32":
                    found = await run.concurrent(
                        self.prompts,
                        f"many-{slug}",
                        rounds=2,
                        hold_blocks=0,
                        settle=_nothing,
                        progress=self.narrator.update,
                    )
                    self._compare(f"{name}, 32 at a time", arm, run, groups, found, baseline)

        with self._launch(arm, model, flags) as launched:
            self._serve_pair(arm, phase, self.family.dtype, launched, work)

    async def _plant(self, phase: str, arm: Arm, run: PairRun, groups: Sequence[Group]) -> None:
        """Compare damaged hand-overs with the same pair's undamaged ones, bit for bit.

        Not with the single instance: its answers differ by the rounding of the last token, and zeros in one of many
        blocks may change a model's output by less.
        """
        corruptions = list(corruptions_of(groups))
        prompts = self._damaged(len(corruptions))
        clean, again = [
            [one.hand_over.answer for one in await run.sequential(prompts, f"{name}-{phase}", self.narrator.update)]
            for name in ("clean", "control")
        ]
        gap = max(map(largest_logprob_gap, clean, again))
        outcome = f"{len(prompts)} prompts, log-probabilities within {gap:.3g} nats"
        if not self._row(Check(arm.name, f"{phase}: repeating changes nothing", gap == 0.0, outcome)).passed:
            raise NotCaught(f"{phase}: repeated requests differ, so what damages change is not known")
        for place, (corruption, prompt, answer) in enumerate(zip(corruptions, prompts, clean, strict=True)):
            self.narrator.update(f"{arm.name}: planting: {corruption.words}")
            seen = await run.planted(corruption, prompt, f"planted-{phase}-{place}")
            by_bytes, by_output = catches(prompt.name, answer, seen, self._expected(prompt, 0, groups), tolerance=0.0)
            self._must_be_caught(arm, phase, corruption, by_bytes, by_output)

    def _compare_exactly(self, name: str, arm: Arm, seen: Sequence[tuple[Prompt, Observation, Answer]]) -> None:
        """Where the single instance computes a prompt's last token in a step of its own, too, no bit may differ."""
        alike = [one for one in seen if is_alone(one[0])]
        differences = [
            difference
            for prompt, observed, answer in alike
            for difference in compare_answers(prompt.name, answer, observed.hand_over.answer, 0.0)
        ]
        outcome = f"{len(alike)} prompts, to the last bit"
        self._row(compared(arm.name, f"{name}: last token in a step of its own", differences, outcome))

    def _expected(self, prompt: Prompt, shared_tokens: int, groups: Sequence[Group]) -> list[Expected]:
        has_states = any(group.is_state for group in groups)
        recomputes = has_states or any(group.window is not None for group in groups)
        return [
            group.expected(prompt, shared_tokens, has_states=has_states, recomputes_last=recomputes) for group in groups
        ]

    def _compare(
        self,
        name: str,
        arm: Arm,
        run: PairRun,
        groups: Sequence[Group],
        seen: Sequence[tuple[Prompt, Observation]],
        baseline: list[Answer],
    ) -> None:
        expected = dict(zip((prompt.name for prompt in self.prompts), baseline, strict=True))
        answered = [(prompt, expected[prompt.name], observed) for prompt, observed in seen]
        self._compare_answers(arm, name, self.family.dtype, answered)
        blocks: list[Difference] = []
        for prompt, observed in seen:
            # Another prompt of its family may have been there before.
            shared = len(prompt.token_ids) - 1 if prompt.family else 0
            fewest = fewest_received(prompt, self.prompts, min(group.block_size for group in groups))
            if observed.record is None and (may_be_cached(prompt, groups) or run.may_be_computed(fewest)):
                continue
            blocks += compare_groups(prompt.name, observed, self._expected(prompt, shared, groups))
        states = sum(group.is_state for group in groups) * len(seen)
        received = count_received([one for _, one in seen])
        what = f"{name}: SHA-256 of blocks and states, sent and received"
        outcome = f"{received - states} blocks and {states} states travelled"
        self._row(compared(arm.name, what, blocks, outcome, blocks=received - states, states=states))


def may_be_cached(prompt: Prompt, groups: Sequence[Group]) -> bool:
    """Whether D may have all that it fetches of a prompt: an earlier one began alike, and blocks end where this one's
    last token begins."""
    step = math.lcm(*(group.block_size for group in groups if not group.is_state))
    return prompt.family is not None and (len(prompt.token_ids) - 1) % step == 0


def is_alone(prompt: Prompt) -> bool:
    """Whether a single instance computes the prompt's last token in a step of its own, as decode does."""
    return prompt.family is None and len(prompt.token_ids) % MAX_BATCHED_TOKENS == 1


async def _nothing() -> None:
    """Nothing is waited for between rounds."""


def corruptions_of(groups: Sequence[Group]) -> Iterator[Corruption]:
    """Yield damages that fit the first group of each kind, and one that mixes two groups up."""
    kinds: dict[str, int] = {}
    for place, group in enumerate(groups):
        kinds.setdefault("state" if group.is_state else "all" if group.window is None else "window", place)
    if "all" in kinds:
        place = kinds["all"]
        yield Corruption("two full blocks swapped", "swap_two_blocks", 1, changes_output=False, group=place)
        yield Corruption("a block read before it is backed", "zero_a_block", 2, group=place)
        yield Corruption("tail block dropped", "drop_tail_block", group=place)
    if "window" in kinds:
        yield Corruption("a window's blocks one too old", "older_blocks", group=kinds["window"])
    if "state" in kinds:
        place = kinds["state"]
        yield Corruption("a state dropped: what was there before", "drop_tail_block", group=place)
        yield Corruption("a state read before it is backed", "zero_a_block", group=place)
        # Prefill hands over the state behind its last token but one.
        another = {"kind": "state_of_another_token", "group": place}
        yield Corruption("the state of the token before", kept_tokens=DAMAGED_TOKENS - 1, **another)
        superseded = (DAMAGED_TOKENS - 2) // groups[place].block_size * groups[place].block_size
        if superseded:
            yield Corruption("the superseded slot of align mode", kept_tokens=superseded + 1, **another)
        if groups[place].layers > 1:
            yield Corruption("two layers' states swapped", "swap_two_layers", group=place)
    if len(groups) > 1:
        yield Corruption("a block of one group for another's", "swap_two_groups", group=0)
