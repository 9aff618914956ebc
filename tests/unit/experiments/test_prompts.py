# SPDX-License-Identifier: Apache-2.0
"""The fixed prompts do not change, and contain the cases that they are made for."""

from __future__ import annotations

import pytest

from experiments.byte_equivalence.pair_run import CONCURRENCY
from experiments.byte_equivalence.prompts import DAMAGED_BLOCKS, Prompt, damage_prompts, fewest_received, fixed_prompts

BLOCK = 32


def test_a_round_is_32_at_a_time() -> None:
    assert len(fixed_prompts(block_size=BLOCK, max_batched=512, max_prompt=1900, vocabulary=512)) == CONCURRENCY


def test_the_damaged_prompts_share_no_block() -> None:
    """A block that an earlier request left behind is never right by luck."""
    blocks = [
        prompt.token_ids[start : start + BLOCK]
        for prompt in damage_prompts(6, block_size=BLOCK, vocabulary=512)
        for start in range(0, len(prompt.token_ids), BLOCK)
    ]
    assert len(blocks) == 6 * DAMAGED_BLOCKS == len(set(blocks))


@pytest.mark.parametrize(
    ("tokens", "common", "family", "fewest"),
    [
        (100, 70, "f", 2),  # two whole blocks are common, two more travel
        (100, 70, None, 4),  # nothing is shared outside a family
        (64, 64, "f", 1),  # the last token is always computed, so its block always travels
        (65, 64, "f", 1),
        (31, 31, "f", 1),
    ],
)
def test_the_fewest_blocks_that_must_travel(tokens: int, common: int, family: str | None, fewest: int) -> None:
    """Only whole common blocks of the same family stay at home."""
    earlier = Prompt("earlier", tuple(range(common)) + (9999,), family)
    later = Prompt("later", tuple(range(tokens)), family)
    assert fewest_received(later, [earlier], BLOCK) == fewest
