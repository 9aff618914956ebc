# SPDX-License-Identifier: Apache-2.0
"""Features that clients use, of a decode server that asks prefill, beside one stock instance.

Every answer is compared as a whole with what vLLM says alone, without kvcached and without a connector, and every
hand-over is counted.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support import feature_asks as asks
from support.feature_asks import Answer, Ask
from support.feature_models import CHAT_TEMPLATE, adapter, chat_model, spec
from vllm.utils import torch_utils

from experiments.common.counted import count, hand_overs
from experiments.common.servers import Asking, running

# An adapter's server pins host memory there, which torch refuses without a driver.
pytestmark = pytest.mark.skipif(
    vars(torch_utils).get("PIN_MEMORY", False) and not torch.cuda.is_available(),
    reason="this vLLM serves no adapters without a GPU",
)
ONE_BY_ONE = asks.numbered([*asks.SAMPLING, *asks.REASONING, *asks.SEVERAL])
"""With seeds, bad words, and the model beside its adapters, what a CPU computes together changes what vLLM says."""
TOGETHER = asks.numbered([*asks.STRUCTURED, *asks.TOOLS], 100)
AT_ONCE = 4
ADAPTED = [
    Ask(
        f"{name}, prompt {number}",
        {"model": name, "prompt": asks.prompt(number), "temperature": 0, "logprobs": 3, "return_token_ids": True},
    )
    for number in (200, 201)
    for name in ("model", "a", "b")
]
"""The same prompts of the model and of two adapters."""
_PLAIN = {"model": "model", "prompt": asks.prompt(210)}
_CHAT = {"model": "model", "messages": asks.messages(211)}
REFUSED = [
    Ask("an adapter that is not loaded", {**_PLAIN, "model": "c"}),
    Ask("no regular expression", {**_PLAIN, "structured_outputs": {"regex": "["}}),
    Ask("no JSON schema", {**_CHAT, "structured_outputs": {"json": {"type": "no such type"}}}),
    Ask(
        "a tool that is not listed",
        {**_CHAT, "tools": [asks.TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
    ),
    Ask("a token that is not in the vocabulary", {**_PLAIN, "logit_bias": {"100000": 1}}),
    Ask("a streamed prompt's log-probabilities", {**_PLAIN, "prompt_logprobs": 1, "stream": True}),
    Ask("too many log-probabilities", {**_PLAIN, "logprobs": 21}),
    Ask("a prompt that is too long", {**_PLAIN, "prompt": asks.prompt(212) * 40}),
]
"""With the same status."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("a", "b"), 1):
        adapter(folder / name, seed)
    return chat_model(folder / "chat")


def serving(model: Path) -> tuple[str, ...]:
    adapters = (f"{name}={model.parent / name}" for name in ("a", "b"))
    return (
        *("--chat-template", CHAT_TEMPLATE, "--reasoning-parser", "qwen3"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", *adapters),
    )


def asked(url: str) -> dict[str, Answer]:
    return asyncio.run(asks.answers(url, [*ONE_BY_ONE, *ADAPTED])) | asyncio.run(asks.answers(url, TOGETHER, AT_ONCE))


@dataclass
class Expected:
    """What one stock instance says, and the statuses of what it refuses."""

    answers: dict[str, Answer]
    statuses: dict[str, int]


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    with running([spec("alone", model, None, *serving(model))], tmp_path_factory.mktemp("alone")) as (alone,):
        answers = asked(alone.base_url)
        statuses = {one.name: asyncio.run(asks.refusal(alone.base_url, one)).status for one in REFUSED}
    return Expected(answers, statuses)


def test_what_is_compared_shows_each_feature(expected: Expected) -> None:
    """Otherwise equal answers would say nothing."""
    said = {name: asks.words(one) for name, one in expected.answers.items()}
    for number in (200, 201):
        assert len({said[f"{name}, prompt {number}"] for name in ("model", "a", "b")}) == 3
    for kind in ("", ", streamed"):
        assert json.loads(json.loads(said[f"JSON schema{kind}"])["content"])["word"] in asks.WORDS
        assert re.fullmatch("[a-f]{3}-[0-9]{4}", json.loads(said[f"regular expression{kind}"])["content"])
        # Of required calls there may be more than fit into the limit.
        for tool in ("tool, by name", "tool, auto"):
            (call,) = json.loads(said[f"{tool}{kind}"])["tool_calls"]
            assert call["function"]["name"] == "look_up" and json.loads(call["function"]["arguments"])["word"]
        thought = json.loads(said[f"reasoning{kind}"])
        assert thought["reasoning"] and thought["content"]
        assert json.loads(said[f"reasoning, then a choice{kind}"])["content"] in asks.WORDS
        for name in ("stopped", "ended"):
            found = expected.answers[f"{name} at the first token{kind}"]
            assert found["completion_tokens"] == 1 and found["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_answers_are_those_of_one_instance(mode: str, model: Path, expected: Expected, tmp_path: Path) -> None:
    """Sampling, structured output, tools, reasoning and adapters. What is refused has the same status."""
    specs = [spec(name, model, mode, *serving(model)) for name in ("prefill", "decode")]
    with Asking(specs, tmp_path) as launched:
        servers = launched.ready()
        url = servers[1].base_url
        asks.check(asked(url), expected.answers)
        handed_over = sum(one.hand_overs for one in (*ONE_BY_ONE, *ADAPTED, *TOGETHER))
        assert hand_overs(servers, handed_over) == handed_over
        # Both sides have the prompts of all adapters in their prefix caches now.
        asks.check(asyncio.run(asks.answers(url, ADAPTED)), expected.answers)
        statuses = {one.name: asyncio.run(asks.refusal(url, one)).status for one in REFUSED}
        assert statuses == expected.statuses
        assert not count(servers, "kvcached_nixl:handover_failures_total")
        for one in servers:
            one.check_alive()
