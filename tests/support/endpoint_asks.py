# SPDX-License-Identifier: Apache-2.0
"""What clients ask of each endpoint of vLLM."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from support import feature_asks as asks
from support.feature_models import SHAPE

__all__ = ["LEAVING", "NUMBERED", "Body", "Row", "completion"]

TOKENS = 12
Body = dict[str, Any]


def text(number: int) -> str:
    return " ".join(map(str, asks.prompt(number)[:40]))


def ids(number: int) -> list[int]:
    return [3 + number % 250, 3 + number // 250, *asks.prompt(number % 250)[1:]]


def embeddings(number: int) -> str:
    file = io.BytesIO()
    torch.save(torch.randn(50, SHAPE.hidden, generator=torch.Generator().manual_seed(number)), file)
    return base64.b64encode(file.getvalue()).decode()


def completion(number: int, **more: Any) -> Body:
    return {"prompt": text(number), "max_tokens": TOKENS, "temperature": 0, **more}


def chat(number: int, **more: Any) -> Body:
    return {"messages": asks.messages(number), "max_tokens": TOKENS, "temperature": 0, **more}


def response(number: int, **more: Any) -> Body:
    return {"input": text(number), "max_output_tokens": TOKENS, "temperature": 0, "store": False, **more}


def generation(number: int, **more: Any) -> Body:
    sampling = {"max_tokens": TOKENS, "temperature": 0, "logprobs": 1, **more}
    return {"token_ids": ids(number), "sampling_params": sampling}


SEEDED = {"temperature": 1.0, "seed": 7}
RESPONSES_TOOL = {"type": "function", "name": "look_up", "parameters": asks.TOOL["function"]["parameters"]}
MESSAGES_TOOL = {"name": "look_up", "input_schema": asks.TOOL["function"]["parameters"]}
SCHEMA = {"type": "json_schema", "name": "x", "schema": asks.TOOL["function"]["parameters"]}


class Row(NamedTuple):
    """``body`` is a function of a number: no two numbers have prompts with a common block.

    Attributes:
        streams: it is asked for streamed, too.
        is_served: by every vLLM. Otherwise it may be refused, in the same words.
        is_asked: prefill computes it, if it is served.
    """

    path: str
    body: Callable[[int], Body]
    streams: bool = True
    is_served: bool = True
    is_asked: bool = True


ROWS: Mapping[str, Row] = {
    "three sequences": Row("v1/completions", lambda n: completion(n, n=3, **SEEDED)),
    "texts, two sequences each": Row(
        "v1/completions", lambda n: completion(n, prompt=[text(n), text(n + 1), text(n)], n=2, **SEEDED)
    ),
    "best of": Row("v1/completions", lambda n: completion(n, best_of=3, **SEEDED), is_served=False),
    "beam search": Row("v1/completions", lambda n: completion(n, use_beam_search=True, n=3), is_served=False),
    "echo of several": Row("v1/completions", lambda n: completion(n, prompt=[text(n), text(n + 1)], echo=True)),
    "prompt log-probabilities of several": Row(
        "v1/completions",
        lambda n: completion(n, prompt=[text(n), text(n + 1)], prompt_logprobs=1),
        streams=False,
        is_asked=False,
    ),
    "no prompt": Row("v1/completions", lambda n: completion(n, prompt=[]), is_served=False),
    "embeddings": Row("v1/completions", lambda n: completion(n, prompt=None, prompt_embeds=embeddings(n))),
    "chat, three sequences": Row("v1/chat/completions", lambda n: chat(n, n=3, logprobs=True, **SEEDED)),
    "chat, prompt log-probabilities": Row(
        "v1/chat/completions", lambda n: chat(n, prompt_logprobs=1), streams=False, is_asked=False
    ),
    # vLLM takes it for a wish for log-probabilities.
    "chat, echo": Row("v1/chat/completions", lambda n: chat(n, echo=True), is_asked=False),
    "chat, tools": Row("v1/chat/completions", lambda n: chat(n, tools=[asks.TOOL], tool_choice="required")),
    "chats": Row(
        "v1/chat/completions/batch",
        lambda n: chat(n, messages=[asks.messages(n), asks.messages(n + 1)]),
        streams=False,
        is_served=False,
    ),
    "response": Row("v1/responses", lambda n: response(n, instructions="be brief", max_output_tokens=40, **SEEDED)),
    "response, tools": Row(
        "v1/responses", lambda n: response(n, tools=[RESPONSES_TOOL], tool_choice="required"), is_served=False
    ),
    "response, JSON": Row("v1/responses", lambda n: response(n, text={"format": SCHEMA})),
    "messages": Row("v1/messages", lambda n: chat(n, system="be brief")),
    "tokens of messages": Row("v1/messages/count_tokens", chat, streams=False, is_asked=False),
    "tokens in and out": Row("inference/v1/generate", generation),
    "scores": Row(
        "generative_scoring",
        lambda n: {"query": text(n), "items": [" a", " b", text(n + 1)], "label_token_ids": [5, 6, 7]},
        streams=False,
        is_served=False,
    ),
    "tokenize": Row("tokenize", lambda n: {"prompt": text(n)}, streams=False, is_asked=False),
    "detokenize": Row("detokenize", lambda n: {"tokens": ids(n)}, streams=False, is_asked=False),
    **{
        path: Row(path, lambda n: {"input": text(n)}, streams=False, is_served=False)
        for path in ("v1/embeddings", "v1/score")
    },
}
NUMBERED = [
    (f"{name}{', streamed' * streamed}", row, 10 * place + 3 * streamed, streamed)
    for place, (name, row) in enumerate(ROWS.items(), 30)
    for streamed in (False, True)[: 1 + row.streams]
]

LONG = {"max_tokens": 1500, "ignore_eos": True}
LEAVING: Mapping[str, Callable[[int], Body]] = {
    "v1/completions": lambda n: completion(n, prompt=[text(n), text(n + 1)], n=2, **{**LONG, **SEEDED}),
    "v1/chat/completions": lambda n: chat(n, **LONG),
    "v1/responses": lambda n: response(n, max_output_tokens=1500, logit_bias={"1": -100}),
    "v1/messages": lambda n: chat(n, max_tokens=1500),
    "inference/v1/generate": lambda n: generation(n, **LONG),
}
"""Long answers of every endpoint."""
