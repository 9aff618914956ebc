# SPDX-License-Identifier: Apache-2.0
"""What the byte-equivalence harness expects of each KV-cache group of a model, and which damages it plants."""

from __future__ import annotations

import pytest

from experiments.byte_equivalence.compare import Expected
from experiments.byte_equivalence.prompts import Prompt
from experiments.byte_equivalence.subjects import DAMAGED_TOKENS, Group, corruptions_of, may_be_cached

FULL, WINDOW, STATE = Group(32, None, False, 2), Group(64, 128, False, 2), Group(160, None, True, 2)


def prompt(num_tokens: int, family: str | None = None) -> Prompt:
    return Prompt("p", tuple(range(num_tokens)), family)


@pytest.mark.parametrize(
    ("group", "num_tokens", "shared", "has_states", "recomputes", "expected"),
    [
        (FULL, 33, 0, False, False, Expected(2, 2, 2, 0)),
        (FULL, 33, 0, False, True, Expected(2, 2, 1, 1)),
        (FULL, 33, 0, True, True, Expected(1, 1, 1, 0)),
        (FULL, 100, 64, False, False, Expected(4, 4, 2, 0)),
        (WINDOW, 400, 0, False, True, Expected(2, 7, 0, 0)),
        (WINDOW, 65, 0, False, True, Expected(2, 2, 0, 1)),
        (STATE, 700, 0, True, True, Expected(1, 1, 1, 0)),
    ],
)
def test_what_travels_of_a_group_follows_from_what_it_keeps(
    group: Group, num_tokens: int, shared: int, has_states: bool, recomputes: bool, expected: Expected
) -> None:
    """With states, prefill has one token less; with windows, decode takes one less."""
    found = group.expected(prompt(num_tokens), shared, has_states=has_states, recomputes_last=recomputes)
    assert found == expected


def test_decode_may_have_all_but_the_last_token_of_a_prompt_that_began_like_another() -> None:
    assert may_be_cached(prompt(65, "f"), [FULL, WINDOW, STATE])
    assert not may_be_cached(prompt(65), [FULL, WINDOW])
    assert not may_be_cached(prompt(33, "f"), [FULL, WINDOW])


def test_each_kind_of_group_is_damaged_in_its_own_ways() -> None:
    found = [(one.kind, one.group) for one in corruptions_of([STATE, STATE, FULL, WINDOW])]
    assert found == [
        ("swap_two_blocks", 2),
        ("zero_a_block", 2),
        ("drop_tail_block", 2),
        ("older_blocks", 3),
        ("drop_tail_block", 0),
        ("zero_a_block", 0),
        ("state_of_another_token", 0),
        ("state_of_another_token", 0),
        ("swap_two_layers", 0),
        ("swap_two_groups", 0),
    ]
    kept = [one.kept_tokens for one in corruptions_of([STATE]) if one.kept_tokens]
    assert kept == [DAMAGED_TOKENS - 1, 1120 + 1], (
        "states are kept behind every 160 tokens, and behind the last but one"
    )
    assert [one.kind for one in corruptions_of([FULL])] == ["swap_two_blocks", "zero_a_block", "drop_tail_block"]
    assert not any(one.changes_output for one in corruptions_of([FULL]) if one.kind == "swap_two_blocks")
