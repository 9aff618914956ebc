# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding behind real prefill and decode servers, on either side or on both, beside one stock instance.

The stock instance does not speculate: drafts may change how fast an answer comes, and nothing else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import feature_asks as asks
from support.feature_asks import Answer, Ask
from support.feature_models import CHAT_TEMPLATE, chat_model, eagle
from support.feature_servers import spec

from experiments.common.counted import count, hand_overs
from experiments.common.servers import Asking, Running, Server, running
from experiments.common.servers import asks as asking

ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
SERVING = ("--chat-template", CHAT_TEMPLATE, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def repeating(ids: list[int]) -> list[int]:
    """Of n-grams, every next one is known."""
    return [*ids, *(ids[-20:] * 3)]


SPECULATED = [
    Ask("long", {"max_tokens": 64, "logprobs": 3, "ignore_eos": True}),
    Ask("repeating", {"prompt": repeating, "max_tokens": 64, "logprobs": 3, "ignore_eos": True}),
    *(
        one
        for one in asks.SAMPLING
        if one.name in {"text", "one token", "allowed tokens", "stopped at the first token", "echo", "chat"}
    ),
    *(one for one in (*asks.STRUCTURED, *asks.TOOLS) if "logit_bias" not in one.body),
    Ask("a choice", {**asks.OFF, "structured_outputs": {"choice": list(asks.WORDS)}, "logprobs": True}),
    Ask("an expression", {**asks.OFF, "structured_outputs": {"regex": "(ab|cd){4}-[0-9]{3}"}, "logprobs": True}),
]
"""vLLM does not speculate with logit_bias or min_tokens, and counts tokens of one step behind a stop string."""
REFUSED = Ask("logit bias", {"model": "model", "prompt": asks.prompt(300), "logit_bias": {"300": 4}})


def turn(number: int) -> list[Ask]:
    """The same kinds of requests, of prompts that no earlier turn had."""
    return asks.numbered(SPECULATED, 60 * number)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Answer]]:
    with running([spec("alone", model, None, *SERVING)], tmp_path_factory.mktemp("alone")) as (alone,):
        return [asyncio.run(asks.answers(alone.base_url, turn(number))) for number in range(3)]


def drafting(config: dict[str, object]) -> tuple[str, ...]:
    return (*SERVING, "--speculative-config", json.dumps(config))


def check(servers: Sequence[Server], number: int, expected: list[dict[str, Answer]]) -> None:
    """Of the last one, which asks the others, every answer is right, and every prompt is handed over."""
    before = hand_overs(servers, 0)
    asks.check(asyncio.run(asks.answers(servers[-1].base_url, turn(number))), expected[number])
    asked = len(turn(number))
    assert hand_overs(servers, before + asked) == before + asked


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_ngrams_on_either_side(mode: str, model: Path, expected: list[dict[str, Answer]], tmp_path: Path) -> None:
    sides = {"plain": SERVING, "ngram": drafting(NGRAM)}
    plain, ngram = (spec(f"prefill-{name}", model, mode, *arguments) for name, arguments in sides.items())
    with Running([plain, ngram], tmp_path) as prefills:
        pairs = [("plain", prefills.servers[1:]), ("ngram", prefills.servers)]
        decodes = [asking(spec(f"decode-{name}", model, mode, *sides[name]), asked) for name, asked in pairs]
        with running(decodes, tmp_path) as (plain_decode, ngram_decode):
            check([*prefills.ready()[1:], plain_decode], 0, expected)
            for number in (1, 2):
                check([*prefills.servers, ngram_decode], number, expected)
            assert count([ngram_decode], ACCEPTED) > 0
            refused = asyncio.run(asks.refusal(ngram_decode.base_url, REFUSED))
            assert refused.status == 400 and "logit_bias" in str(refused)


@pytest.mark.parametrize(("mode", "method"), [("push", "eagle"), ("pull", "draft_model")])
def test_draft_models_on_both_sides(
    mode: str, method: str, model: Path, expected: list[dict[str, Answer]], tmp_path: Path
) -> None:
    """Their KV is handed over with the model's: as many drafts are right as on one instance that drafts.

    What a prefill server without the draft model offers is refused, and the other one is asked.
    """
    draft = eagle(tmp_path / "eagle", model) if method == "eagle" else model
    drafts = drafting({"method": method, "model": str(draft), "num_speculative_tokens": 3})
    specs = [
        spec("alone", model, None, *drafts),
        spec("prefill-plain", model, mode, *SERVING),
        spec("prefill", model, mode, *drafts),
        spec("decode", model, mode, *drafts),
    ]
    with Asking(specs, tmp_path) as launched:
        alone, _, prefill, decode = launched.ready()
        asks.check(asyncio.run(asks.answers(alone.base_url, turn(0))), expected[0])
        check((prefill, decode), 0, expected)
        assert count([decode], ACCEPTED) == count([alone], ACCEPTED) > 0
        said = decode.log.read_text(errors="replace")
        assert f"expected drafts {method} " in said and "Run the same vLLM, kvcached, kvcached_nixl and model" in said
