# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding behind real prefill and decode servers, on either side or on both, beside one stock instance.

The stock instance does not speculate: drafts may change how fast an answer comes, and nothing else. Beside a model with
states, whose kernels round, it does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import feature_asks as asks
from support.feature_asks import Answer, Ask
from support.feature_models import CHAT_TEMPLATE, chat_model, dflash, drafting_hybrid, eagle, spec

from experiments.common.counted import count, hand_overs
from experiments.common.device import INTERPRETED, LAYOUT
from experiments.common.families import FAMILIES
from experiments.common.servers import Asking, Running, Server, ServerSpec, running
from experiments.common.servers import asks as asking
from kvcached_nixl.vllm.adapter.versions import HASHES_AHEAD, installed_has

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


@pytest.mark.parametrize(
    ("mode", "method"), [("pull", "eagle"), ("push", "eagle"), ("pull", "draft_model"), ("push", "draft_model")]
)
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


# -------------------------------------------------------------------------------------------------- models with states

DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
HYBRID = FAMILIES["qwen3.5"]
MTP = {"method": "mtp", "num_speculative_tokens": 2}
EAGLE = {"method": "eagle", "num_speculative_tokens": 2}
DFLASH = {"method": "dflash", "num_speculative_tokens": 3}
RARE = {**NGRAM, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
MOSTLY = 0.98
"""In bfloat16 a draft model may guess another token here and there."""
ROUNDED_NATS = 0.1
"""In bfloat16. With the state of another slot, log-probabilities differ by 0.4 and more."""


def side_with_states(name: str, mode: str | None, model: Path, *arguments: str) -> ServerSpec:
    """Without Triton's kernels, vLLM's CPU build cannot move the states of drafts; nor compute some alone."""
    one = spec(name, model, mode, "--no-disable-hybrid-kv-cache-manager", *HYBRID.arguments, *arguments)
    more = {**HYBRID.environment, **INTERPRETED, "EXPERIMENT_DRAFTS": "1", LAYOUT: "false"}
    return dataclasses.replace(
        one,
        dtype=HYBRID.dtype,
        block_size=HYBRID.block_size,
        max_num_batched_tokens=256,
        environment={**one.environment, **more},
    )


def turns() -> list[Ask]:
    """Prompts of less than a block and of several, and the same again with more than a block behind them."""
    found = []
    for number, length in enumerate((60, 160, 257, 600)):
        ids = [3 + number, *(3 + (7 * place + 31 * number) % 480 for place in range(length - 1))]
        for name, prompt in ((f"{length} tokens", ids), (f"{length} tokens, and more", [*ids, *(ids[-20:] * 15)])):
            found.append(greedy(name, prompt))
    return found


def greedy(name: str, prompt: list[int]) -> Ask:
    body = {"model": "model", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    more = {"logprobs": 5, "return_token_ids": True, "return_tokens_as_token_ids": True}
    return Ask(name, {**body, **more})


def mostly_one_token() -> list[Ask]:
    """The model repeats the last token. `dflash` says the most frequent one: for some prompts that is right."""
    found = []
    for number, length in enumerate((60, 160, 257, 600)):
        most, other = 10 + 7 * number, 200 + number
        ids = [3 + number, *(most if place % 3 else 3 + 31 * place % 400 for place in range(length))]
        found += [greedy(f"{length} tokens", [*ids, most]), greedy(f"{length} tokens, another last", [*ids, other])]
    return found


def check_rounded(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    for name, answer in found.items():
        (one,), (other,) = answer["choices"], expected[name]["choices"]
        assert one["token_ids"] == other["token_ids"], name
        pairs = zip(one["logprobs"]["top_logprobs"], other["logprobs"]["top_logprobs"], strict=True)
        gaps = [abs(here[token] - there[token]) for here, there in pairs for token in here.keys() & there]
        assert max(gaps) < ROUNDED_NATS, (name, max(gaps))


@pytest.mark.skipif(not installed_has(HASHES_AHEAD), reason="this vLLM goes on from wrong states (vllm#56531)")
@pytest.mark.parametrize(
    ("mode", "config", "of_prefill"),
    [
        ("pull", MTP, ()),
        ("push", MTP, ("--no-enable-prefix-caching",)),
        ("push", RARE, ()),
        ("pull", EAGLE, ()),
        ("pull", DFLASH, ()),
        ("push", DFLASH, ()),
    ],
)
def test_drafts_of_a_model_with_states(
    mode: str, config: dict[str, object], of_prefill: tuple[str, ...], tmp_path: Path
) -> None:
    """Answers are those of a stock instance that drafts, too, and as many drafts are right."""
    model = drafting_hybrid(tmp_path / "model", circle=1 if config is DFLASH else 6)
    if make := {"eagle": eagle, "dflash": dflash}.get(str(config["method"])):
        config = {**config, "model": str(make(tmp_path / "draft", model))}
    drafts = ("--speculative-config", json.dumps(config))
    specs = [
        side_with_states("alone", None, model, *drafts),
        side_with_states("prefill", mode, model, *drafts, *of_prefill),
        side_with_states("decode", mode, model, *drafts),
    ]
    asked = mostly_one_token() if config["method"] == "dflash" else turns()
    with Asking(specs, tmp_path) as launched:
        alone, prefill, decode = launched.ready()
        expected = asyncio.run(asks.answers(alone.base_url, asked))
        check_rounded(asyncio.run(asks.answers(decode.base_url, asked)), expected)
        assert hand_overs([prefill, decode], len(asked)) == len(asked)
        right, drafted = (count([alone], name) for name in (ACCEPTED, DRAFTED))
        # More would be wrong, too: without the prompt's values, DFlash repeats the last token.
        assert MOSTLY * right <= count([decode], ACCEPTED) <= right / MOSTLY
        assert MOSTLY * drafted <= count([decode], DRAFTED) <= drafted / MOSTLY
        assert 0 < right < drafted
        # Beside others, with everything in the prefix caches.
        check_rounded(asyncio.run(asks.answers(decode.base_url, asked, at_once=4)), expected)
