# SPDX-License-Identifier: Apache-2.0
"""The fixed prompts: token ids drawn from a fixed seed, lengths chosen at the boundaries of blocks and steps."""

from __future__ import annotations

import os.path
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SEED = 7
FIRST_TEXT_TOKEN = 2
"""Lower ids are the tokenizer's special tokens."""
DAMAGED_BLOCKS = 6
"""How many blocks a prompt for planted corruptions fills."""


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


def _drawer(vocabulary: int, seed: int = SEED) -> Callable[[int], tuple[int, ...]]:
    """Return what draws token ids; every call continues the same stream."""
    stream = random.Random(seed)
    return lambda tokens: tuple(stream.randrange(FIRST_TEXT_TOKEN, vocabulary) for _ in range(tokens))


def fixed_prompts(*, block_size: int, max_batched: int, max_prompt: int, vocabulary: int) -> list[Prompt]:
    """Return the prompts of the comparison; sizes in tokens, ``max_batched`` is vLLM's per-step budget."""
    draw = _drawer(vocabulary)
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
        "longest": max_prompt,
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
    draw = _drawer(vocabulary, SEED + 1)
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
