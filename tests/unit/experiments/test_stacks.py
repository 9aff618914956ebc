# SPDX-License-Identifier: Apache-2.0
"""How answers behind other routers are judged: what would be a wrong answer is one, and counts."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openai", reason="the official client is not installed")

import openai

from experiments.common.counted import moved
from experiments.stacks import traffic
from experiments.stacks.measure import Outcome, Overhead, spec
from experiments.stacks.ray_serve import as_keywords
from experiments.stacks.report import targets, targets_of_overhead
from experiments.stacks.stacks import STACKS
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
    ("pieces", "verdict"),
    [([], Verdict.ERROR), (["a", "b"], Verdict.BROKEN), (["a", "x"], Verdict.WRONG)],
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


def test_no_two_prompts_begin_alike() -> None:
    """Decode would find the beginning in its own prefix cache, and fetch less."""
    heads = [tuple(traffic._numbers(number, kind)[:8]) for number, kind in itertools.product(range(36), range(1, 6))]
    assert len(set(heads)) == len(heads)


def test_a_stack_that_asks_for_arguments_by_schema_is_held_to_those() -> None:
    answers = {("tool", 1): ANSWER, (traffic.BY_SCHEMA, 1): dataclasses.replace(ANSWER, text="x"), ("chat", 1): ANSWER}
    assert traffic.expected_behind(answers, constrains_tools_itself=False) == {("tool", 1): ANSWER, ("chat", 1): ANSWER}
    changed = traffic.expected_behind(answers, constrains_tools_itself=True)
    assert changed == {("tool", 1): answers[traffic.BY_SCHEMA, 1], ("chat", 1): ANSWER}


def test_hand_overs_are_counted_from_a_moment_on_and_over_restarts() -> None:
    assert moved({"a": 5, "gone": 7}, {"a": 8, "new": 2}) == 5
    assert moved({"a": 5}, {"a": 0}) == 0


@pytest.mark.parametrize("changed", [{"first_token_ms": 120.0}, {"batch_ms": 1200.0}], ids=str)
def test_overhead_can_miss_its_targets(changed: dict[str, float]) -> None:
    good = Overhead("a router", "pull", 100.0, 100.0, 1000.0, 1000.0)
    assert all(one.reached for one in targets_of_overhead(good))
    assert not all(one.reached for one in targets_of_overhead(dataclasses.replace(good, **changed)))


def test_arguments_become_keywords() -> None:
    keywords = as_keywords(spec("prefill", "pull").engine_arguments("an engine"))
    assert keywords["max_model_len"] == 2048 and keywords["dtype"] == "float32" and keywords["enforce_eager"] is True
    assert keywords["kv_transfer_config"]["kv_role"] == "kv_producer"


def test_a_stack_says_why_it_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = {one.name: one for one in STACKS}
    assert "0.28.0" in by_name["Dynamo"].reason_to_skip("0.31.0", 1) and not by_name["Dynamo"].reason_to_skip(
        "0.28.0", 2
    )
    assert "1 engine" in by_name["vLLM's push demo"].reason_to_skip("0.28.0", 2)
    monkeypatch.delenv("PRODUCTION_STACK", raising=False)
    assert "PRODUCTION_STACK" in by_name["production-stack"].reason_to_skip("0.28.0", 1)
    monkeypatch.setenv("PRODUCTION_STACK", "/a/checkout")
    assert not by_name["production-stack"].reason_to_skip("0.28.0", 1)
