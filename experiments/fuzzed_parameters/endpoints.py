# SPDX-License-Identifier: Apache-2.0
"""Every endpoint of a server that can carry ``kv_transfer_params``: what it is asked, and what its answer says.

`ENDPOINTS` is asked of a server by its paths (``/openapi.json``), so a series of vLLM is sent what it has. All of them
are asked for one prompt that has the same tokens whatever form it comes in: a chat's template adds nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ENDPOINTS", "TEMPLATE", "TOKENS", "Endpoint", "Failed", "Prompt", "read"]

TOKENS = 4
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
"""For ``--chat-template``."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what a server alone makes of it: ``TOKENS`` token ids and their text."""

    text: str
    token_ids: Sequence[int]
    expected_ids: Sequence[int] = ()
    expected_text: str = ""

    def is_answered_by(self, found: list[int] | str, *, as_far_as_it_goes: bool = False) -> bool:
        """Whether these are its tokens, or their text; all of them, unless fewer were asked for."""
        expected = self.expected_text if isinstance(found, str) else list(self.expected_ids)
        if as_far_as_it_goes:
            return len(found) > 0 and found == expected[: len(found)]
        return found == expected


class Failed(Exception):
    """The answer says that the request has failed, in a stream that had begun with HTTP 200."""


@dataclass(frozen=True)
class Endpoint:
    """One way to ask.

    Attributes:
        name: as in a table.
        ask: a body for a prompt, a cache salt (empty for none), parameters and ``n``.
        tokens: where the tokens of an answer as a whole are, by choice; in a stream they are where `read` looks.
        can_stream: whether ``stream`` is one of its fields.
        takes_n: whether it makes several choices.
    """

    name: str
    path: str
    ask: Callable[[Prompt, str, Any, int], dict[str, Any]]
    tokens: Callable[[Any], list[list[int] | str]]
    can_stream: bool = True
    takes_n: bool = False


def _common(salt: str, params: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "model", "kv_transfer_params": params}
    return {**body, "cache_salt": salt} if salt else body


# vLLM takes no n above 1 with a temperature of 0; the best token is the best one all the same.
_BEST = {"temperature": 1.0, "top_k": 1, "ignore_eos": True}


def _completion(prompt: Prompt, salt: str, params: Any, n: int) -> dict[str, Any]:
    asked = {"prompt": list(prompt.token_ids), "max_tokens": TOKENS, "n": n, "return_token_ids": True}
    return {**_common(salt, params), **_BEST, **asked}


def _text_completion(prompt: Prompt, salt: str, params: Any, n: int) -> dict[str, Any]:
    return {**_completion(prompt, salt, params, n), "prompt": prompt.text}


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt.text}]


def _chat(prompt: Prompt, salt: str, params: Any, n: int) -> dict[str, Any]:
    return {
        **_common(salt, params),
        **_BEST,
        "messages": _messages(prompt),
        "max_completion_tokens": TOKENS,
        "n": n,
    }


def _batch(prompt: Prompt, salt: str, params: Any, _: int) -> dict[str, Any]:
    return {**_chat(prompt, salt, params, 1), "messages": [_messages(prompt)] * 2}


def _responses(prompt: Prompt, salt: str, params: Any, _: int) -> dict[str, Any]:
    asked = {"input": prompt.text, "max_output_tokens": TOKENS, "temperature": 0, "store": False}
    return {**_common(salt, params), **asked}


def _anthropic(prompt: Prompt, salt: str, params: Any, _: int) -> dict[str, Any]:
    asked = {"messages": _messages(prompt), "max_tokens": TOKENS, "temperature": 0}
    return {**_common(salt, params), **asked}


def _generate(prompt: Prompt, salt: str, params: Any, n: int) -> dict[str, Any]:
    """It hands on what its sampling parameters have beside them, and looks at nothing of that."""
    sampling = {**_BEST, "max_tokens": TOKENS, "n": n, "extra_args": {"kv_transfer_params": params}}
    return {**_common(salt, params), "token_ids": list(prompt.token_ids), "sampling_params": sampling}


def _ids(answer: Any) -> list[list[int] | str]:
    return [choice["token_ids"] for choice in answer["choices"]]


def _contents(answer: Any) -> list[list[int] | str]:
    return [choice["message"]["content"] or "" for choice in answer["choices"]]


def _outputs(answer: Any) -> list[list[int] | str]:
    parts = [part for item in answer["output"] for part in item.get("content") or ()]
    return ["".join(part.get("text") or "" for part in parts)]


def _blocks(answer: Any) -> list[list[int] | str]:
    return ["".join(part.get("text") or "" for part in answer["content"])]


def _cohere_blocks(answer: Any) -> list[list[int] | str]:
    return _blocks(answer["message"])


ENDPOINTS = (
    Endpoint("completions, token ids", "/v1/completions", _completion, _ids, takes_n=True),
    Endpoint("completions, text", "/v1/completions", _text_completion, _ids, takes_n=True),
    Endpoint("chat", "/v1/chat/completions", _chat, _contents, takes_n=True),
    Endpoint("chat, batch", "/v1/chat/completions/batch", _batch, _contents, can_stream=False),
    Endpoint("responses", "/v1/responses", _responses, _outputs),
    Endpoint("messages", "/v1/messages", _anthropic, _blocks),
    Endpoint("chat of Cohere", "/cohere/v2/chat", _anthropic, _cohere_blocks),
    Endpoint("invocations", "/invocations", _completion, _ids, takes_n=True),
    # Of two choices that are streamed, vLLM 0.28 raises an IndexError, and as a whole it has the first.
    Endpoint("generate", "/inference/v1/generate", _generate, _ids),
)


def read(endpoint: Endpoint, content_type: str, text: str) -> list[list[int] | str]:
    """What an answer with HTTP 200 has for each choice: token ids, or their text.

    Raises:
        Failed: it says that the request has failed.
        ValueError: it ends without saying that it is whole.
    """
    if not content_type.startswith("text/event-stream"):
        return endpoint.tokens(json.loads(text))
    events = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    found: defaultdict[int, Any] = defaultdict(list if endpoint.path.endswith("generate") else str)
    is_whole = False
    for event in events:
        said = {} if event == "[DONE]" else json.loads(event)
        if _says_error(said):
            raise Failed(event)
        for index, piece in _pieces(said):
            found[index] += piece
        is_whole = is_whole or _says_why(said)
    if not is_whole or not found:
        raise ValueError(f"a stream that does not say why it ends: {text[-500:]}")
    return [found[index] for index in sorted(found)]


def _says_error(said: Mapping[str, Any]) -> bool:
    delta = said.get("delta")
    is_cohere_error = isinstance(delta, Mapping) and bool(delta.get("error"))
    return bool(said.get("error")) or said.get("type") in ("error", "response.failed") or is_cohere_error


def _says_why(said: Mapping[str, Any]) -> bool:
    """Whether an event says that an answer is whole: every choice would say it by itself."""
    reasons = [choice.get("finish_reason") for choice in said.get("choices") or ()]
    if any(reason not in (None, "stop", "length") for reason in reasons):
        raise Failed(str(reasons))
    return any(reasons) or said.get("type") in ("response.completed", "message_stop", "message-end")


def _pieces(said: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """(choice, what it has more) of an event of any endpoint."""
    found: list[tuple[int, Any]] = []
    for choice in said.get("choices") or ():
        piece = choice.get("text")
        if piece is None and "delta" in choice:
            piece = choice["delta"].get("content")
        found.append((choice["index"], choice["token_ids"] if piece is None and "token_ids" in choice else piece))
    kind, delta = said.get("type"), said.get("delta")
    if kind == "response.output_text.delta":
        found.append((0, delta))
    elif kind == "content_block_delta" and isinstance(delta, Mapping):
        found.append((0, delta.get("text")))
    elif kind == "content-delta" and isinstance(delta, Mapping):
        found.append((0, delta["message"]["content"].get("text")))
    return [(index, piece) for index, piece in found if piece]
