# SPDX-License-Identifier: Apache-2.0
"""The phases of a run, and the sizes they share (tokens, bytes, counts)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.byte_equivalence.arms import AMPLE_POOL, small_pool
from experiments.common.model import ModelShape

BLOCK_SIZE = 32
MAX_BATCHED_TOKENS = 512
MAX_PROMPT_TOKENS = 1900
KVCACHED_PAGE_BYTES = 2 << 20
SMALL_POOL_PAGE_GROUPS = 5
SAMPLED_EVERY_NTH_BLOCK = 20
HELD_PAGES = 1.5
"""P keeps blocks of this many page groups before D begins: more than one, so that P's pool has to grow."""


@dataclass(frozen=True)
class Phase:
    """One start of every arm: its data type, kvcached's pool, and what is compared.

    ``exact_between_arms`` also compares the P/D arms with each other, bit for bit: possible only where every arm
    caches the same prefixes, so not with a small pool. In the first arm every ``every_nth_block``-th block is
    zeroed. The concurrent part has at least two ``rounds``: the second maps again what the first has unmapped.
    """

    name: str
    dtype: str
    pool: Mapping[str, str]
    sequential: bool
    concurrent: bool
    exact_between_arms: bool
    every_nth_block: int = 1
    rounds: int = 3


def phases(shape: ModelShape, *, quick: bool) -> list[Phase]:
    """Return the phases: bfloat16 one at a time then float32 32 at a time, or ``quick``: float32 for both at once."""
    small = small_pool(KVCACHED_PAGE_BYTES * shape.layers * 2, SMALL_POOL_PAGE_GROUPS)
    if quick:
        return [Phase("quick", "float32", small, True, True, False, every_nth_block=SAMPLED_EVERY_NTH_BLOCK, rounds=2)]
    return [
        Phase("one at a time", "bfloat16", AMPLE_POOL, True, False, True),
        Phase("32 at a time", "float32", small, False, True, False),
    ]
