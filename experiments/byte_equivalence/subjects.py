# SPDX-License-Identifier: Apache-2.0
"""What is compared: the models, phase by phase; the prompts; and the damages that are planted in what decode receives.

A model is the usual one, or one of a family whose layers keep KV in several ways.

What differs is what is known before. KV-cache groups of a family have blocks of their own, windows and states, so how
many blocks travel is computed per group from what the servers say. There is no stock P/D arm: stock vLLM wants another
layout of states. Log-probabilities may differ from the single instance's by the rounding of the last token, which
decode computes alone.
"""

from __future__ import annotations

import math
import os.path
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.byte_equivalence.arms import Arm, specs
from experiments.byte_equivalence.compare import LOGPROB_TOLERANCE, Expected
from experiments.common.device import EXTRA, extra_of
from experiments.common.families import FAMILIES, make_family
from experiments.common.model import GQA, make_model
from experiments.common.servers import GIVES_BACK, ServerSpec

BLOCK_SIZE = 32
"""Unit of the prompts' lengths, in tokens; groups of a family have blocks of 32 to 256."""
MAX_BATCHED_TOKENS = ServerSpec.max_num_batched_tokens
DAMAGED_BLOCKS = 6
"""How many blocks a prompt for planted corruptions fills."""
KVCACHED_PAGE_BYTES = 2 << 20
SMALL_POOL_PAGE_GROUPS = 5
SAMPLED_EVERY_NTH_BLOCK = 20
DAMAGED_TOKENS = 1190
"""Of a family: several blocks of every group, the last one filled in part."""
AMPLE_POOL: Mapping[str, str] = {
    "KVCACHED_HOSTVMM_GIB": "2",
    # Without it, kvcached evicts prefixes that stock vLLM still caches; P then computes a prompt in other chunks, and
    # on some processors other chunks are rounded differently.
    "KVCACHED_MAX_CACHED_TOKENS": "-1",
}
FAMILY_POOL: Mapping[str, str] = {"KVCACHED_HOSTVMM_GIB": "2", "KVCACHED_MAX_CACHED_TOKENS": "16000"}


@dataclass(frozen=True)
class Corruption:
    """Damage planted in the blocks that D received: its label, the probe's name for it, the first block it touches, and
    the KV-cache group; -1 for all.

    ``changes_output`` is whether tokens or log-probabilities can show it. They cannot show that two full blocks were
    swapped: keys carry their positions, and attention sums over a set. Only the digests of the bytes differ.
    ``kept_tokens``: first hand over so many tokens of the prompt, and keep the state that D received.
    """

    words: str
    kind: str
    block: int = 0
    changes_output: bool = True
    group: int = -1
    kept_tokens: int = 0


CORRUPTIONS = (
    Corruption("two full blocks swapped", "swap_two_blocks", 1, changes_output=False),
    Corruption("a full block and the tail swapped", "swap_two_blocks", DAMAGED_BLOCKS - 2),
    Corruption("V shifted by a head", "shift_v_by_a_head"),
    Corruption("tail block dropped", "drop_tail_block"),
    Corruption("K sent for V", "send_k_for_v"),
    # kvcached backs an unmapped address with its zero page, so a block read too early arrives as zeros.
    Corruption("a block read before it is backed", "zero_a_block", 2),
)


@dataclass(frozen=True)
class Phase:
    """One start of every arm: its data type, kvcached's pool, and what is compared.

    ``exact_between_arms`` also compares the P/D arms with each other, bit for bit: possible only where every arm
    caches the same prefixes, so not with a small pool. In the first arm every ``every_nth_block``-th block is
    zeroed; 0: none. The concurrent part has at least two ``rounds``: the second maps again what the first has unmapped.
    A planted damage has to change the output by more than ``damage_nats``.
    """

    name: str
    dtype: str
    pool: Mapping[str, str]
    sequential: bool
    concurrent: bool
    exact_between_arms: bool
    every_nth_block: int = 1
    rounds: int = 3
    damage_nats: float = 0.0
    arguments: tuple[str, ...] = ()


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


def expected_of(prompt: Prompt, shared_tokens: int, groups: Sequence[Group]) -> list[Expected]:
    has_states = any(group.is_state for group in groups)
    recomputes = has_states or any(group.window is not None for group in groups)
    return [
        group.expected(prompt, shared_tokens, has_states=has_states, recomputes_last=recomputes) for group in groups
    ]


class Subject:
    """The usual model: grouped-query attention in all layers, and one KV-cache group.

    Attributes:
        fewest_distinct: of the single instance's answers; one prompt is in the set twice.
        page_group_bytes: memory of one page of block ids over all layers, K and V; 0 if pools are not watched.
    """

    is_family = False

    def __init__(self, *, quick: bool) -> None:
        self.quick = quick
        self.model = make_model(GQA)
        self.prompts = fixed_prompts(GQA.vocabulary)
        self.fewest_distinct = len(self.prompts) - 1
        self.page_group_bytes = KVCACHED_PAGE_BYTES * GQA.layers * 2
        # A few kvcached pages, each unmapped as soon as it is empty. kvcached leaves 5 % of the device free.
        gib = SMALL_POOL_PAGE_GROUPS * self.page_group_bytes / 0.95 / 2**30
        small = {"KVCACHED_HOSTVMM_GIB": f"{gib:.5f}", **GIVES_BACK}
        bfloat16, float32 = ({"damage_nats": LOGPROB_TOLERANCE[one]} for one in ("bfloat16", "float32"))
        self.phases = [
            Phase("one at a time", "bfloat16", AMPLE_POOL, True, False, True, **bfloat16),
            Phase("32 at a time", "float32", small, False, True, False, **float32),
        ]
        if quick:
            self.phases = [Phase("quick", "float32", small, True, True, False, SAMPLED_EVERY_NTH_BLOCK, 2, **float32)]

    def specs(self, arm: Arm, phase: Phase) -> list[ServerSpec]:
        return specs(arm, self.model, phase.dtype, phase.pool, BLOCK_SIZE, forks=self.quick)

    def damages(self, groups: Sequence[Group]) -> list[tuple[Corruption, Prompt]]:
        """Return what is planted, and in which prompt."""
        prompts = damage_prompts(len(CORRUPTIONS), block_size=BLOCK_SIZE, vocabulary=GQA.vocabulary)
        return list(zip(CORRUPTIONS, prompts, strict=True))

    def fewest_received(self, prompt: Prompt, before: Sequence[Prompt], groups: Sequence[Group]) -> int:
        """Return of how many blocks D lacks at least, if it still caches all of ``before``."""
        return fewest_received(prompt, before, BLOCK_SIZE)

    def expected(self, prompt: Prompt, before: Sequence[Prompt], groups: Sequence[Group]) -> list[Expected]:
        cached = prompt.blocks(BLOCK_SIZE) - fewest_received(prompt, before, BLOCK_SIZE)
        return expected_of(prompt, cached * BLOCK_SIZE, groups)


class FamilySubject(Subject):
    """The model of a family, with prefix caching, and without where that changes how states are kept."""

    is_family = True

    def __init__(self, name: str) -> None:
        self.family = FAMILIES[name]
        self.model = make_family(name)
        self.vocabulary = self.family.values["vocab_size"]
        prompts = fixed_prompts(self.vocabulary)
        self.prompts = [one for one in prompts if len(one.token_ids) >= self.family.fewest_tokens]
        self.fewest_distinct = len(self.prompts) // 2 + 1
        self.page_group_bytes = 0
        has_states = "sliding_attention" not in self.family.values.get("layer_types", ())
        caching = (True, False) if has_states else (True,)
        # Without it only, where this vLLM's CPU build cannot compute Mamba2 with prefix caching.
        self.phases = []
        for caches in (one for one in caching if not one or self.family.caches_prefixes):
            name, flags = ("prefix caching", ()) if caches else ("no prefix caching", ("--no-enable-prefix-caching",))
            more = (FAMILY_POOL, True, self.family.dtype == "float32", False, 0, 2)
            arguments = ("--no-disable-hybrid-kv-cache-manager", *self.family.arguments, *flags)
            self.phases.append(Phase(name, self.family.dtype, *more, arguments=arguments))

    def specs(self, arm: Arm, phase: Phase) -> list[ServerSpec]:
        # Slots are as large as these models' blocks, so a slab of the size that is enough for others may be too small.
        extra = {key: value for key, value in extra_of(arm.connector).items() if key != "staging_gib"}
        connector = {**arm.connector, EXTRA: extra} if arm.connector else {}
        plain = replace(arm, connector=connector, environment={**arm.environment, **self.family.environment})
        more: dict[str, Any] = {"forks": True, "arguments": phase.arguments}
        return specs(plain, self.model, phase.dtype, phase.pool, self.family.block_size, **more)

    def damages(self, groups: Sequence[Group]) -> list[tuple[Corruption, Prompt]]:
        planted = list(corruptions_of(groups))
        made = damage_prompts(len(planted), block_size=BLOCK_SIZE * 8, vocabulary=self.vocabulary)
        prompts = (Prompt(one.name, one.token_ids[:DAMAGED_TOKENS]) for one in made)
        return list(zip(planted, prompts, strict=True))

    def fewest_received(self, prompt: Prompt, before: Sequence[Prompt], groups: Sequence[Group]) -> int:
        return fewest_received(prompt, self.prompts, min(group.block_size for group in groups))

    def expected(self, prompt: Prompt, before: Sequence[Prompt], groups: Sequence[Group]) -> list[Expected]:
        # Another prompt of its family may have been there before.
        return expected_of(prompt, len(prompt.token_ids) - 1 if prompt.family else 0, groups)


def may_be_cached(prompt: Prompt, groups: Sequence[Group]) -> bool:
    """Whether D may have all that it fetches of a prompt: an earlier one began alike, and blocks end where this one's
    last token begins."""
    step = math.lcm(*(group.block_size for group in groups if not group.is_state))
    return prompt.family is not None and (len(prompt.token_ids) - 1) % step == 0


def is_alone(prompt: Prompt) -> bool:
    """Whether a single instance computes the prompt's last token in a step of its own, as decode does."""
    return prompt.family is None and len(prompt.token_ids) % MAX_BATCHED_TOKENS == 1


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


# ------------------------------------------------------------------------------------------------------- prompts
# Token ids drawn from a fixed seed; lengths at the boundaries of blocks and steps.


PROMPTS_SEED = 7
FIRST_TEXT_TOKEN = 2
"""Lower ids are the tokenizer's special tokens."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, why it is in the set, and the family of prompts that share its cached prefixes (None: no other)."""

    name: str
    token_ids: tuple[int, ...]
    family: str | None = None

    def blocks(self, block_size: int) -> int:
        return -(-len(self.token_ids) // block_size)

    def salt(self, run: str) -> str:
        """Return the prefix-cache salt for a run: equal for equal families, else the prompt's own."""
        return f"{run}-{self.family or self.name}"


def _drawer(vocabulary: int, seed: int) -> Callable[[int], tuple[int, ...]]:
    """Return what draws token ids; every call continues the same stream."""
    stream = random.Random(seed)
    return lambda tokens: tuple(stream.randrange(FIRST_TEXT_TOKEN, vocabulary) for _ in range(tokens))


def fixed_prompts(vocabulary: int) -> list[Prompt]:
    """Return the prompts of the comparison."""
    draw, block_size, max_batched = _drawer(vocabulary, PROMPTS_SEED), BLOCK_SIZE, MAX_BATCHED_TOKENS
    lengths = {
        "one token": 1,
        "two tokens": 2,
        "half a block": block_size // 2,
        "one block less one": block_size - 1,
        "one block": block_size,
        "one block plus one": block_size + 1,
        "two blocks less one": 2 * block_size - 1,
        "two blocks": 2 * block_size,
        "two blocks plus one": 2 * block_size + 1,
        "three and a half blocks": 3 * block_size + block_size // 2,
        "five blocks": 5 * block_size,
        "five blocks plus one": 5 * block_size + 1,
        "eight blocks": 8 * block_size,
        "seven blocks less one": 7 * block_size - 1,
        "nine and a half blocks": 9 * block_size + block_size // 2,
        "eleven blocks and some": 11 * block_size + 7,
        "a step less one": max_batched - 1,
        "exactly a step": max_batched,
        "a step plus one": max_batched + 1,
        "a step plus a block": max_batched + block_size,
        "two steps": 2 * max_batched,
        "two steps plus one": 2 * max_batched + 1,
        "three steps and some": 3 * max_batched - 77,
        "longest": 1900,
    }
    prompts = [Prompt(name, draw(length)) for name, length in lengths.items()]
    short = draw(4 * block_size)
    prompts += [
        Prompt("prefix of four blocks", short, "short prefix"),
        Prompt("same prefix plus one", short + draw(1), "short prefix"),
        Prompt("same prefix plus a block", short + draw(block_size), "short prefix"),
        Prompt("same prefix plus some blocks", short + draw(6 * block_size + 5), "short prefix"),
        Prompt("same prefix once more", short, "short prefix"),
        Prompt("half of the same prefix", short[: 2 * block_size] + draw(70), "short prefix"),
    ]
    long = draw(max_batched + 3 * block_size)
    prompts += [
        Prompt("chunked prefix", long + draw(3), "long prefix"),
        Prompt("chunked prefix, other end", long + draw(2 * block_size + 9), "long prefix"),
    ]
    return prompts


def damage_prompts(count: int, *, block_size: int, vocabulary: int) -> list[Prompt]:
    """Return separate prompts for planted corruptions: six blocks, the last one two thirds full.

    All differ, so a block left over from an earlier request never holds the right bytes by luck. The tail block holds
    more than the last token, which D computes itself.
    """
    draw = _drawer(vocabulary, PROMPTS_SEED + 1)
    tokens = (DAMAGED_BLOCKS - 1) * block_size + 2 * block_size // 3
    return [Prompt(f"damaged {place}", draw(tokens)) for place in range(count)]


def fewest_received(prompt: Prompt, before: Sequence[Prompt], block_size: int) -> int:
    """Return the least number of blocks that D must receive for ``prompt`` if it still caches all of ``before``.

    vLLM reuses full blocks only and always computes at least the last token, so at least one block is transferred.
    """
    alike = [one.token_ids for one in before if prompt.family is not None and one.family == prompt.family]
    common = (len(os.path.commonprefix([prompt.token_ids, one])) for one in alike)
    longest = max(common, default=0) // block_size
    return prompt.blocks(block_size) - min(longest, (len(prompt.token_ids) - 1) // block_size)
