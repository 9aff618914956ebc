# SPDX-License-Identifier: Apache-2.0
"""How answers behind other routers are judged: what would be a wrong answer is one, and counts."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

pytest.importorskip("openai", reason="the official client is not installed")

from experiments.stacks import traffic
from experiments.stacks.measure import Outcome, targets
from experiments.stacks.traffic import Answer, Verdict, judged

ANSWER = Answer("abc", (-1.0, -2.0, -3.0), "length")
GOOD = Outcome(
    stack="a router",
    version="1",
    mode="pull",
    asked=10,
    calm={"right": 10},
    hand_overs=10,
    cached_tokens=0,
    troubled={"right": 3, "error": 5},
    recovered_seconds=1.5,
    after={"right": 10},
    hand_overs_after=10,
    first_token_ms=70.0,
)


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, Verdict.RIGHT),
        ({"logprobs": (-1.0, -2.0, -3.0009)}, Verdict.RIGHT),
        ({"cached_tokens": 7}, Verdict.RIGHT),
        ({"logprobs": (-1.0, -2.0, -3.01)}, Verdict.WRONG),
        ({"logprobs": (-1.0, -2.0)}, Verdict.WRONG),
        ({"text": "abd"}, Verdict.WRONG),
        ({"text": "ab"}, Verdict.WRONG),
        ({"finish_reason": "stop"}, Verdict.WRONG),
        ({"text": "ab", "finish_reason": None}, Verdict.CUT_SHORT),
        ({"text": "", "finish_reason": None}, Verdict.CUT_SHORT),
        ({"text": "ax", "finish_reason": None}, Verdict.WRONG),
    ],
    ids=str,
)
def test_an_answer_is_right_only_if_it_is_that_of_one_instance(changed: dict[str, Any], verdict: Verdict) -> None:
    assert judged(dataclasses.replace(ANSWER, **changed), ANSWER) is verdict


@pytest.mark.parametrize(
    "changed",
    [
        {"calm": {"right": 9, "wrong": 1}},
        {"calm": {"right": 9, "error": 1}},
        {"hand_overs": 9},
        {"hand_overs": 20},
        {"cached_tokens": 1},
        {"troubled": {"right": 3, "wrong": 1}},
        {"troubled": {"right": 3, "no end": 1}},
        {"recovered_seconds": None},
        {"after": {"right": 9, "error": 1}},
        {"hand_overs_after": 0},
    ],
    ids=str,
)
def test_each_target_can_be_missed(changed: dict[str, Any]) -> None:
    assert all(one.reached for one in targets(GOOD))
    assert not all(one.reached for one in targets(dataclasses.replace(GOOD, **changed)))


def test_no_two_prompts_begin_alike() -> None:
    """Decode would find the beginning in its own prefix cache, and fetch less."""
    heads = [tuple(traffic._numbers(number, kind)[:8]) for number, kind in itertools.product(range(36), range(1, 6))]
    assert len(set(heads)) == len(heads)
