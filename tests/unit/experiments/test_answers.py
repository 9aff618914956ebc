# SPDX-License-Identifier: Apache-2.0
"""What clients of experiments/lease_recovery and experiments/stacks take an answer for: a wrong one counts as one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("openai", reason="needs an environment: bash experiments/env.sh")

import openai

from experiments.common import client
from experiments.common.client import AnswerError, HandOver
from experiments.lease_recovery.arms import TOKENS, Traffic
from experiments.stacks import traffic
from experiments.stacks.traffic import Answer, Verdict

PADDING = [9] * (TOKENS - 1)
ANSWER = Answer("abc", (-1.0, -2.0, -3.0), "length")


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ([1, *PADDING], "right"),
        ([2, *PADDING], "wrong"),
        (AnswerError("500"), "error"),
        (httpx.ConnectError("refused"), "no connection"),
    ],
)
def test_what_an_answer_counts_as(answer: Any, verdict: str) -> None:
    async def hand_over() -> HandOver:
        if isinstance(answer, Exception):
            raise answer
        return HandOver(client.Answer(answer, []), "r-0")

    told = Traffic((), [[3]], [[1, *PADDING]])

    def asked(began: float) -> tuple[str, str]:
        return asyncio.run(told.judged("r-0", 0, began, hand_over()))

    found, detail = asked(5.0)
    assert found == verdict and bool(detail) is (verdict != "right")
    # While weights change, what one of both makes is right; it is not for who asks later.
    told.other, told.other_until_seconds = [[2, *PADDING]], 4.0
    assert asked(5.0)[0] == verdict
    if answer == [2, *PADDING]:
        assert asked(3.0)[0] == "right"


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
    assert traffic.judged(dataclasses.replace(ANSWER, **changed), ANSWER) is verdict


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
        return await traffic._streamed(stream(), lambda one: one.text)

    monkeypatch.setattr(traffic, "ask", ask)
    assert asyncio.run(traffic.judge(None, ("completion, streamed", 1), ANSWER)).verdict is verdict


def test_a_stack_that_asks_for_arguments_by_schema_is_held_to_those() -> None:
    answers = {("tool", 1): ANSWER, (traffic.BY_SCHEMA, 1): dataclasses.replace(ANSWER, text="x"), ("chat", 1): ANSWER}
    assert traffic.expected_behind(answers, constrains_tools_itself=False) == {("tool", 1): ANSWER, ("chat", 1): ANSWER}
    changed = traffic.expected_behind(answers, constrains_tools_itself=True)
    assert changed == {("tool", 1): answers[traffic.BY_SCHEMA, 1], ("chat", 1): ANSWER}
