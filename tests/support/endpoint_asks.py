# SPDX-License-Identifier: Apache-2.0
"""What clients ask of each endpoint of vLLM, and what it says as a whole, without what differs between two servers."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from support import feature_asks as asks
from support.feature_models import SHAPE

__all__ = ["Body", "LEAVING", "NUMBERED", "Row", "chat", "completion", "ids", "joined", "plain", "response"]
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
    "a suffix": Row("v1/completions", lambda n: completion(n, suffix="x"), is_served=False),
    "no prompt": Row("v1/completions", lambda n: completion(n, prompt=[]), is_served=False),
    "embeddings": Row("v1/completions", lambda n: completion(n, prompt=None, prompt_embeds=embeddings(n))),
    "no embeddings": Row("v1/completions", lambda n: completion(n, prompt_embeds="none"), is_served=False),
    "chat, three sequences": Row("v1/chat/completions", lambda n: chat(n, n=3, logprobs=True, **SEEDED)),
    "chat, beam search": Row("v1/chat/completions", lambda n: chat(n, use_beam_search=True, n=2), is_served=False),
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
    "messages, tools": Row(
        "v1/messages", lambda n: chat(n, tools=[MESSAGES_TOOL], tool_choice={"type": "any"}), is_served=False
    ),
    "tokens of messages": Row("v1/messages/count_tokens", chat, streams=False, is_asked=False),
    "tokens in and out": Row("inference/v1/generate", generation),
    "scores": Row(
        "generative_scoring",
        lambda n: {"query": text(n), "items": [" a", " b", text(n + 1)], "label_token_ids": [5, 6, 7]},
        streams=False,
        is_served=False,
    ),
    "decisions": Row(
        "v1/decisions",
        lambda n: {"input": text(n), "questions": [{"type": "predicate", "instructions": "is it so?"}]},
        streams=False,
        is_served=False,
    ),
    "one decision": Row(
        "v1/systemone",
        lambda n: {"state": text(n), "questions": {"a": {"type": "boolean", "question": "is it so?"}}},
        streams=False,
        is_served=False,
    ),
    "tokenize": Row("tokenize", lambda n: {"prompt": text(n)}, streams=False, is_asked=False),
    "detokenize": Row("detokenize", lambda n: {"tokens": ids(n)}, streams=False, is_asked=False),
    "rendered": Row("v1/chat/completions/render", chat, streams=False, is_served=False),
    **{
        path: Row(path, lambda n: {"input": text(n)}, streams=False, is_served=False)
        for path in ("v1/embeddings", "pooling", "classify", "v1/score", "v1/rerank", "v1/audio/transcriptions")
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
VOLATILE = frozenset(
    {
        *("id", "created", "created_at", "completed_at", "item_id", "call_id", "request_id", "sequence_number"),
        # A configuration's; what of a prompt was in a cache, decode's or prefill's.
        *("signature", "system_fingerprint", "cached_tokens", "cache_read_input_tokens", "cache_write_tokens"),
        "previous_response_id",
    }
)
PIECES = frozenset({"text", "content", "reasoning", "delta", "arguments", "partial_json", "thinking", "token_ids"})
"""What a stream may cut anywhere."""


def plain(found: Any) -> Any:
    """Leaves out what differs between two servers."""
    if isinstance(found, dict):
        return {name: plain(one) for name, one in found.items() if name not in VOLATILE}
    return [plain(one) for one in found] if isinstance(found, list | tuple) else found


def joined(stream: str) -> dict[str, Any]:
    """Of each field in the events of a stream the pieces together, or its different values."""
    whole: dict[str, list[Any]] = {}
    for line in stream.splitlines():
        data = line.removeprefix("data: ")
        for where, one in _leaves(plain(json.loads(data))) if data.startswith("{") else ():
            values = whole.setdefault(".".join(map(str, where)), [])
            # vLLM counts reasoning by its pieces.
            if one is None or "logprobs" in where or "reasoning_tokens" in where:
                continue
            if where[-1] in PIECES or one not in values:
                values.append(one)
    assert whole or "[DONE]" in stream, f"no event in {stream[:300]}"
    return {
        where: "".join(map(str, values)) if where.rpartition(".")[2] in PIECES else values
        for where, values in whole.items()
    }


def _leaves(found: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(found, dict):
        for name, one in found.items():
            yield from _leaves(one, (*where, name))
    elif isinstance(found, list):
        for one in found:
            yield from _leaves(one, (*where, one["index"]) if isinstance(one, dict) and "index" in one else where)
    else:
        yield where, found
