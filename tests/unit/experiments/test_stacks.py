# SPDX-License-Identifier: Apache-2.0
"""How answers behind other routers are judged: what would be a wrong answer is one, and counts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openai", reason="the official client is not installed")

import openai

from experiments.stacks import traffic
from experiments.stacks.measure import Outcome
from experiments.stacks.report import targets
from experiments.stacks.traffic import Answer, Verdict, judged

ANSWER = Answer("abc", (-1.0, -2.0, -3.0), "length")
GOOD = Outcome(
    stack="a router",
    version="1",
    mode="pull",
    engines_per_role=1,
    asked=10,
    calm={"right": 10},
    hand_overs=10,
    cached_tokens=0,
    troubled={"right": 3, "error before the first token": 5},
    recovered_seconds=1.5,
    rolling={},
    after={"right": 10},
    hand_overs_after=10,
    wrong=[],
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
    ("pieces", "verdict"), [([], Verdict.ERROR), (["a", "b"], Verdict.BROKEN), (["a", "x"], Verdict.WRONG)]
)
def test_what_came_before_an_error_must_be_right(
    monkeypatch: pytest.MonkeyPatch, pieces: list[str], verdict: Verdict
) -> None:
    async def stream() -> AsyncIterator[SimpleNamespace]:
        for piece in pieces:
            yield SimpleNamespace(choices=[SimpleNamespace(text=piece)])
        raise openai.OpenAIError("broken off")

    async def ask(client: Any, request: traffic.Request) -> Answer:
        choices, text = await traffic._streamed(stream(), lambda one: one.text)
        return Answer(text, (), str(choices))

    monkeypatch.setattr(traffic, "ask", ask)
    assert asyncio.run(traffic.judge(None, ("completion, streamed", 1), ANSWER)).verdict is verdict


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
        {"troubled": {"right": 3, "error before the first token": 5, "cut short": 1}},
        {"rolling": {"right": 3, "wrong": 1}},
        {"rolling": {"right": 3, "no end": 1}},
        {"recovered_seconds": None},
        {"after": {"right": 9, "error": 1}},
        {"hand_overs_after": 0},
    ],
    ids=str,
)
def test_each_target_can_be_missed(changed: dict[str, Any]) -> None:
    assert all(one.reached for one in targets(GOOD))
    assert not all(one.reached for one in targets(dataclasses.replace(GOOD, **changed)))


def test_a_stack_that_asks_for_arguments_by_schema_is_held_to_those() -> None:
    answers = {("tool", 1): ANSWER, (traffic.BY_SCHEMA, 1): dataclasses.replace(ANSWER, text="x"), ("chat", 1): ANSWER}
    assert traffic.expected_behind(answers, constrains_tools_itself=False) == {("tool", 1): ANSWER, ("chat", 1): ANSWER}
    changed = traffic.expected_behind(answers, constrains_tools_itself=True)
    assert changed == {("tool", 1): answers[traffic.BY_SCHEMA, 1], ("chat", 1): ANSWER}
