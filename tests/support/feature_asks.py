# SPDX-License-Identifier: Apache-2.0
"""What clients ask of a server's features, and how an answer is compared with another server's.

Whole answers are compared: text, token ids, log-probabilities, reasons, calls of tools, reasoning and counts of tokens.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from support.feature_models import SPACES, THINK_END

STEP_SECONDS = 150.0
TOKENS = 16
TOLERANCE_NATS = 0.001
"""The log-probabilities of one server differ by less, in other batches."""
EOS = 1
COMPARED = ("choices", "prompt_logprobs", "prompt_token_ids")
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
REPLACED = frozenset({"finish_reason", "stop_reason", "role", "type", "id", "index"})
"""Fields of a stream's events that are not a piece of something longer."""

Answer = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        number: no two numbers have prompts with a common block.
        body: in an `Ask` without a number, ``prompt`` is a function of token ids, and ``messages`` are empty.
        hand_overs: how often decode asks prefill for its prompts' KV.
    """

    name: str
    body: Mapping[str, Any]
    number: int = 0
    hand_overs: int = 1

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"


class Refused(Exception):
    """An answer that is an error. ``status`` is that of HTTP, or 200 where a stream ended with it."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said}")
        self.status = status


def prompt(number: int) -> list[int]:
    """Token ids of more than two blocks."""
    return [3 + number, *(3 + (7 * place + 31 * number) % 250 for place in range(90 + 17 * (number % 5)))]


def messages(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": " ".join(map(str, prompt(number)[:40]))}]


def numbered(asks: Sequence[Ask], first: int = 0) -> list[Ask]:
    """Give each its own prompt, from number ``first`` on, and a copy that is streamed."""
    found: list[Ask] = []
    for ask in asks:
        # vLLM streams no log-probabilities of a prompt.
        for stream in (False, True)[: 1 + ("prompt_logprobs" not in ask.body)]:
            number = first + len(found)
            body = {"model": "model", "temperature": 0, **ask.body}
            if "messages" not in body:
                body = {"max_tokens": TOKENS, "return_token_ids": True, **body}
                body["prompt"] = body.get("prompt", list)(prompt(number))
            elif not body["messages"]:
                body["messages"] = messages(number)
            if stream:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
                # vLLM leaves out those of tokens that end inside a character, as it happens.
                if "messages" in body:
                    body.pop("logprobs", None)
                    body.pop("top_logprobs", None)
            found.append(replace(ask, name=f"{ask.name}{', streamed' * stream}", body=body, number=number))
    return found


async def answer(http: httpx.AsyncClient, url: str, ask: Ask) -> Answer:
    """Raises `Refused` if the answer is an error, or a stream that ends with one or without its end."""
    reply = await http.post(url + ask.path, json=dict(ask.body))
    if reply.status_code != httpx.codes.OK:
        raise Refused(reply.status_code, reply.text)
    found = joined(reply.text) if ask.body.get("stream") else reply.json()
    usage = found.get("usage") or {}
    return {name: found.get(name) for name in COMPARED} | {name: usage.get(name) for name in COUNTS}


async def answers(url: str, asks: Sequence[Ask], at_once: int = 1) -> dict[str, Answer]:
    """Ask everything, ``at_once`` at a time.

    Raises:
        AssertionError: some were refused; the message names all of them.
    """
    free = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(timeout=STEP_SECONDS, trust_env=False) as http:

        async def one(ask: Ask) -> Answer:
            async with free:
                return await answer(http, url, ask)

        found = await asyncio.gather(*(one(ask) for ask in asks), return_exceptions=True)
    errors = {ask.name: repr(one)[:600] for ask, one in zip(asks, found, strict=True) if isinstance(one, Exception)}
    assert not errors, json.dumps(errors, indent=1)
    return {ask.name: one for ask, one in zip(asks, found, strict=True) if isinstance(one, dict)}


async def refusal(url: str, ask: Ask) -> Refused:
    """Return the error that a request is answered with; raises AssertionError if the answer is no error."""
    async with httpx.AsyncClient(timeout=STEP_SECONDS, trust_env=False) as http:
        try:
            found = await answer(http, url, ask)
        except Refused as error:
            return error
    raise AssertionError(f"{ask.name}: found an answer, {json.dumps(found)[:600]}; expected an error")


def joined(text: str) -> Answer:
    """Return what a stream says as a whole. How it is cut into events does not count."""
    events = [one.removeprefix("data: ") for one in text.split("\n\n") if one.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise Refused(200, f"a stream without its end: {text[-600:]}")
    whole: Answer = {}
    choices: dict[int, Any] = {}
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            raise Refused(200, json.dumps(event))
        for choice in event.pop("choices", ()):
            # It follows from how the stream is cut, within a character.
            (choice.get("logprobs") or {}).pop("text_offset", None)
            choices[choice["index"]] = _added(choices.get(choice["index"]), choice)
        whole |= {name: value for name, value in event.items() if value is not None}
    return {**whole, "choices": [choices[index] for index in sorted(choices)]}


def _added(known: Any, more: Any, name: str = "") -> Any:
    if isinstance(more, list) and more and isinstance(more[0], dict) and "index" in more[0]:
        # An event may have several pieces of one call.
        calls = {one["index"]: one for one in known or ()}
        for one in more:
            calls[one["index"]] = _added(calls.get(one["index"]), one)
        return [calls[index] for index in sorted(calls)]
    if isinstance(more, dict):
        known = known or {}
        return {key: _added(known.get(key), more.get(key), key) for key in {**known, **more}}
    if known is None or more is None or name in REPLACED:
        return known if more is None else more
    return known + more if isinstance(more, (str, list)) else more


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """What of ``found`` is not as expected. Calls of tools have random ids."""
    if isinstance(expected, dict) and isinstance(found, dict):
        names = {*found, *expected} - ({"id"} if "tool_calls" in where else set())
        return [
            one for name in sorted(names) for one in differences(found.get(name), expected.get(name), f"{where}.{name}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [one for place, pair in pairs for one in differences(*pair, f"{where}[{place}]")]
    if isinstance(expected, float) and isinstance(found, float):
        return (
            [] if math.isclose(found, expected, rel_tol=0, abs_tol=TOLERANCE_NATS) else [_said(where, found, expected)]
        )
    return [] if found == expected else [_said(where, found, expected)]


def _said(where: str, found: Any, expected: Any) -> str:
    return f"{where}: found {found!r:.300}, expected {expected!r:.300}"


def check(found: Mapping[str, Answer], expected: Mapping[str, Answer]) -> None:
    """Raises AssertionError, with every difference, unless all answers are as expected."""
    wrong = {name: differences(one, expected[name])[:6] for name, one in found.items()}
    wrong = {name: several for name, several in wrong.items() if several}
    assert not wrong, json.dumps(wrong, indent=1)


def words(found: Answer) -> str:
    """The text of the first choice, or what it says of its message, as JSON."""
    choice = found["choices"][0]
    return str(choice["text"]) if "text" in choice else json.dumps(choice.get("message") or choice["delta"])


WORDS = ("red", "green", "blue")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"enum": list(WORDS)}},
            "required": ["word"],
            "additionalProperties": False,
        },
    },
}
_SCHEMA = TOOL["function"]["parameters"]
_CALL = '<tool_call>\\{"name": "look_up", "arguments": \\{"word": "[a-z]{1,6}"\\}\\}</tool_call>'
OFF = {"messages": [], "chat_template_kwargs": {"enable_thinking": False}, "max_completion_tokens": TOKENS}
# Otherwise this model fills a grammar's optional spaces.
_LONG = {**OFF, "max_completion_tokens": 100, "logit_bias": {str(one): -50 for one in SPACES}}
_SEEDED = {"temperature": 1.0, "seed": 7}

SAMPLING = [
    Ask("greedy", {"logprobs": 3, "ignore_eos": True}),
    Ask("text", {"prompt": lambda ids: " ".join(map(str, ids)), "logprobs": 3}),
    Ask("a list of one prompt", {"prompt": lambda ids: [ids], "logprobs": 3}),
    Ask("truncated", {"truncate_prompt_tokens": 70, "logprobs": 3}),
    Ask("one token", {"max_tokens": 1, "logprobs": 3}),
    Ask("seeded", {**_SEEDED, "logprobs": 3, "ignore_eos": True}),
    Ask("seeded, top-p, top-k, min-p", {**_SEEDED, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "logprobs": 3}),
    Ask("penalties", {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logprobs": 3}),
    Ask("logit bias", {"logit_bias": {"300": 4, "301": 4.5, "302": -50}, "logprobs": 3}),
    Ask("allowed tokens", {"allowed_token_ids": list(range(260, 300)), "logprobs": 3}),
    Ask("bad words", {"bad_words": [f"<spare-{number}>" for number in range(258, 380)], "logprobs": 3}),
    Ask("a stop string", {"stop": ["<spare-3", "<spare-4"], "max_tokens": 64, "include_stop_str_in_output": True}),
    # Prefill's own token ends its request too, by another reason than its length.
    Ask("stopped at the first token", {"stop_token_ids": list(range(2, 512)), "logprobs": 3}),
    Ask("ended at the first token", {"logit_bias": {str(EOS): 100}, "logprobs": 3}),
    Ask("no end before 5 tokens", {"min_tokens": 5, "logit_bias": {str(EOS): 100}, "logprobs": 3}),
    Ask("echo", {"echo": True}),
    Ask("tokens as ids", {"return_tokens_as_token_ids": True, "logprobs": 3}),
    Ask("chat", {**OFF, "logprobs": True, "top_logprobs": 3, "return_token_ids": True}),
    Ask("seeded chat", {**OFF, **_SEEDED, "logprobs": True, "top_logprobs": 3}),
    # Decode computes these prompts itself.
    Ask("log-probabilities of the prompt", {"prompt_logprobs": 2}, hand_overs=0),
    Ask("echo with log-probabilities", {"echo": True, "logprobs": 2}, hand_overs=0),
]
STRUCTURED = [
    Ask(
        "JSON schema",
        {**_LONG, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}},
    ),
    Ask("JSON object", {**OFF, "response_format": {"type": "json_object"}}),
    Ask("regular expression", {**_LONG, "structured_outputs": {"regex": "[a-f]{3}-[0-9]{4}"}, "logprobs": True}),
    Ask("choice", {**_LONG, "structured_outputs": {"choice": list(WORDS)}, "logprobs": True}),
    Ask("grammar", {**_LONG, "structured_outputs": {"grammar": 'root ::= "a" [b-d]+ "e"'}}),
    Ask(
        "completion in JSON",
        {"prompt": lambda ids: [*ids, THINK_END], "structured_outputs": {"json": _SCHEMA}, "max_tokens": 100},
    ),
]
TOOLS = [
    Ask(
        "tool, by name",
        {**_LONG, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
    ),
    Ask("tool, required", {**_LONG, "tools": [TOOL], "tool_choice": "required"}),
    Ask("tool, auto", {**_LONG, "tools": [TOOL], "tool_choice": "auto", "structured_outputs": {"regex": _CALL}}),
    Ask("tool, auto, none called", {**OFF, "tools": [TOOL], "tool_choice": "auto"}),
]
_THINKING = {"messages": [], "max_completion_tokens": 48, **_SEEDED, "logit_bias": {str(THINK_END): 5}}
REASONING = [
    Ask("reasoning", {**_THINKING, "logprobs": True}),
    Ask("reasoning, left out", {**_THINKING, "include_reasoning": False}),
    Ask(
        "reasoning, then a choice",
        {**_THINKING, "logit_bias": {str(THINK_END): 6}, "structured_outputs": {"choice": list(WORDS)}},
    ),
    Ask(
        "reasoning without an end", {**_THINKING, "logit_bias": {str(THINK_END): -100}, "max_completion_tokens": TOKENS}
    ),
]
# Of equal prompts one is asked for.
SEVERAL = [
    Ask("two sequences", {**_SEEDED, "n": 2, "logprobs": 3}),
    Ask("two prompts", {"prompt": lambda ids: [ids, ids[::-1]], "logprobs": 3}, hand_overs=2),
]
