# SPDX-License-Identifier: Apache-2.0
"""The fixed prompts do not change, and contain the cases that they are made for."""

from __future__ import annotations

import pytest

from experiments.byte_equivalence.prompts import (
    DAMAGED_BLOCKS,
    Prompt,
    damage_prompts,
    fewest_received,
    fixed_prompts,
)

BLOCK = 32


def prompts() -> list[Prompt]:
    """Return the prompts as the harness makes them."""
    return fixed_prompts(block_size=BLOCK, max_batched=512, max_prompt=1900, vocabulary=512)


def test_the_prompts_are_the_same_every_time() -> None:
    """Results of two runs can be compared."""
    assert prompts() == prompts()


def test_every_length_that_matters_is_there() -> None:
    """One token, a block, a block and one, many blocks, and more than one prefill step; 24 prompts or more."""
    lengths = {len(prompt.token_ids) for prompt in prompts()}
    assert {1, BLOCK, BLOCK + 1, 513, 1900} <= lengths
    assert len(prompts()) >= 24
    assert len({prompt.name for prompt in prompts()}) == len(prompts())


def test_the_damaged_prompts_share_no_block() -> None:
    """A block that an earlier request left behind is never right by luck."""
    blocks = [
        prompt.token_ids[start : start + BLOCK]
        for prompt in damage_prompts(6, block_size=BLOCK, vocabulary=512)
        for start in range(0, len(prompt.token_ids), BLOCK)
    ]
    assert len(blocks) == 6 * DAMAGED_BLOCKS == len(set(blocks))


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (32, 1), (33, 2), (64, 2)])
def test_a_prompt_knows_how_many_blocks_it_fills(tokens: int, blocks: int) -> None:
    """A begun block is a block."""
    assert Prompt("p", tuple(range(tokens))).blocks(BLOCK) == blocks


def test_families_share_a_salt_and_others_do_not() -> None:
    """Only prompts of one family may find each other's blocks."""
    alone, one, other = Prompt("a", (1,)), Prompt("b", (1,), "family"), Prompt("c", (2,), "family")
    assert one.salt("run") == other.salt("run") != alone.salt("run")
    assert one.salt("run") != one.salt("another run")


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
