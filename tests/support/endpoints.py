# SPDX-License-Identifier: Apache-2.0
"""Every endpoint of a server that can carry ``kv_transfer_params``: how to make a request, and how to read an answer.

Of `ENDPOINTS`, those are used that a server lists in ``/openapi.json``, so each vLLM series gets the requests that it
supports. A prompt has the same tokens at every endpoint: the chat template adds nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOKENS = 4
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
"""The value of ``--chat-template``."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the answer of one server alone: ``TOKENS`` token ids and their text."""

    text: str
    token_ids: Sequence[int]
    expected_ids: Sequence[int] = ()
    expected_text: str = ""

    def is_answered_by(self, found: list[int] | str) -> bool:
        """Whether ``found`` is the expected tokens or their text."""
        return found == (self.expected_text if isinstance(found, str) else list(self.expected_ids))


class Failed(Exception):
    """A stream that began with HTTP 200 says that the request has failed."""


@dataclass(frozen=True)
class Endpoint:
    """One endpoint and format of request.

    Attributes:
        name: its name in tables.
        ask: returns a body for a prompt, a cache salt (empty for none), parameters and ``n``.
        tokens: returns the tokens or the text of each choice of an answer that is not streamed; `read` reads streams.
        can_stream: whether it accepts ``stream``.
        takes_n: whether it can return several choices.
    """

    name: str
    path: str
    ask: Callable[[Prompt, str, Any, int], dict[str, Any]]
    tokens: Callable[[Any], list[list[int] | str]]
    can_stream: bool = True
    takes_n: bool = False


# vLLM rejects n above 1 with a temperature of 0; with top_k 1 the best token is chosen, too.
_BEST = {"temperature": 1.0, "top_k": 1, "ignore_eos": True}


def _common(salt: str, params: Any, **more: Any) -> dict[str, Any]:
    body = {"model": "model", "kv_transfer_params": params, **more}
    return {**body, "cache_salt": salt} if salt else body


def _completion(prompt: Prompt, salt: str, params: Any, n: int) -> dict[str, Any]:
    asked = {"prompt": list(prompt.token_ids), "max_tokens": TOKENS, "n": n, "return_token_ids": True}
    return _common(salt, params, **_BEST, **asked)


def _text_completion(prompt: Prompt, salt: str, params: Any, n: int) -> dict[str, Any]:
    return {**_completion(prompt, salt, params, n), "prompt": prompt.text}


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt.text}]


def _chat(prompt: Prompt, salt: str, params: Any, n: int) -> dict[str, Any]:
    return _common(salt, params, **_BEST, messages=_messages(prompt), max_completion_tokens=TOKENS, n=n)


def _batch(prompt: Prompt, salt: str, params: Any, _: int) -> dict[str, Any]:
    return {**_chat(prompt, salt, params, 1), "messages": [_messages(prompt)] * 2}


def _responses(prompt: Prompt, salt: str, params: Any, _: int) -> dict[str, Any]:
    return _common(salt, params, input=prompt.text, max_output_tokens=TOKENS, temperature=0, store=False)


def _anthropic(prompt: Prompt, salt: str, params: Any, _: int) -> dict[str, Any]:
    return _common(salt, params, messages=_messages(prompt), max_tokens=TOKENS, temperature=0)


def _generate(prompt: Prompt, salt: str, params: Any, n: int) -> dict[str, Any]:
    """The endpoint passes ``extra_args`` of the sampling parameters to the engine without checking them."""
    sampling = {**_BEST, "max_tokens": TOKENS, "n": n, "extra_args": {"kv_transfer_params": params}}
    return _common(salt, params, token_ids=list(prompt.token_ids), sampling_params=sampling)


def _ids(answer: Any) -> list[list[int] | str]:
    return [choice["token_ids"] for choice in answer["choices"]]


def _contents(answer: Any) -> list[list[int] | str]:
    return [choice["message"]["content"] or "" for choice in answer["choices"]]


def _text(parts: Iterable[Any]) -> list[list[int] | str]:
    return ["".join(part.get("text") or "" for part in parts)]


def _outputs(answer: Any) -> list[list[int] | str]:
    return _text(part for item in answer["output"] for part in item.get("content") or ())


ENDPOINTS = (
    Endpoint("completions, token ids", "/v1/completions", _completion, _ids, takes_n=True),
    Endpoint("completions, text", "/v1/completions", _text_completion, _ids, takes_n=True),
    Endpoint("chat", "/v1/chat/completions", _chat, _contents, takes_n=True),
    Endpoint("chat, batch", "/v1/chat/completions/batch", _batch, _contents, can_stream=False),
    Endpoint("responses", "/v1/responses", _responses, _outputs),
    Endpoint("messages", "/v1/messages", _anthropic, lambda answer: _text(answer["content"])),
    Endpoint("chat of Cohere", "/cohere/v2/chat", _anthropic, lambda answer: _text(answer["message"]["content"])),
    Endpoint("invocations", "/invocations", _completion, _ids, takes_n=True),
    # No takes_n: with two choices vLLM 0.28 raises an IndexError in a stream, and otherwise returns the first only.
    Endpoint("generate", "/inference/v1/generate", _generate, _ids),
)


def read(endpoint: Endpoint, content_type: str, text: str) -> list[list[int] | str]:
    """Return the token ids, or their text, of each choice in an answer with HTTP 200.

    Raises:
        Failed: the answer says that the request has failed.
        ValueError: the stream ends without a reason for its end.
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
        raise ValueError(f"the stream ends without a finish reason: {text[-500:]}")
    return [found[index] for index in sorted(found)]


def _says_error(said: Mapping[str, Any]) -> bool:
    delta = said.get("delta")
    is_cohere_error = isinstance(delta, Mapping) and bool(delta.get("error"))
    return bool(said.get("error")) or said.get("type") in ("error", "response.failed") or is_cohere_error


def _says_why(said: Mapping[str, Any]) -> bool:
    """Whether an event has a finish reason or says that the answer is complete. Raises `Failed` for other reasons."""
    reasons = [choice.get("finish_reason") for choice in said.get("choices") or ()]
    if any(reason not in (None, "stop", "length") for reason in reasons):
        raise Failed(str(reasons))
    return any(reasons) or said.get("type") in ("response.completed", "message_stop", "message-end")


def _pieces(said: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """Return (choice, its new tokens or text) for each choice in an event of any endpoint."""
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
