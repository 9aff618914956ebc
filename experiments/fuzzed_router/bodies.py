# SPDX-License-Identifier: Apache-2.0
"""Draws bodies of requests from a seed: valid ones whose answer is known, and malformed ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.fuzzed_parameters.sets import HOSTILE

__all__ = ["CHAT", "COMPLETIONS", "TOKENS", "Body", "encode", "mutated", "odd", "salted", "valid"]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENS = 4
_TEXT = "The quick brown fox jumps over the lazy dog; "
_TEXTS = tuple((_TEXT * 5)[:length] for length in (1, 33, 64, 100, 200)) + (
    "Gr\u00fc\u00dfe \U0001f600 \u65e5\u672c",
    "a\x00b",
)
_IDS = tuple([3 + (7 * place + length) % 500 for place in range(length)] for length in (1, 33, 64, 100, 200))


@dataclass(frozen=True)
class Body:
    """The body of one request. ``known`` is its index in `valid` if its answer is known, else None."""

    change: str
    path: str
    content: bytes
    known: int | None = None


def encode(fields: Mapping[str, Any]) -> bytes:
    """Return JSON with lone surrogates as escapes."""
    return json.dumps(fields, ensure_ascii=True).encode()


def salted(fields: Mapping[str, Any], salt: str) -> dict[str, Any]:
    """Return the same request with a cache salt, so that it shares cached blocks with no other salt."""
    return {**fields, "cache_salt": salt}


def valid() -> list[tuple[str, dict[str, Any]]]:
    """Return paths and fields of requests that have one right answer. Malformed ones are made from the first of each
    path."""
    common: dict[str, Any] = {"model": "model", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    prompts: list[Any] = [*_TEXTS[1:], _TEXTS[0], *_IDS, [_TEXTS[1]], [_IDS[2]]]
    found = [(COMPLETIONS, {**common, "prompt": prompt}) for prompt in prompts]
    more: tuple[dict[str, Any], ...] = (
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "max_tokens": 9},
        {"stream": False, "n": 1, "seed": 7, "logprobs": 3, "return_token_ids": True},
        {"echo": True},
        {"echo": True, "logprobs": 1},
        {"prompt_logprobs": 1},
        {"max_tokens": 1},
        {"max_tokens": 40, "min_tokens": 40, "stop_token_ids": [5]},
        {"logit_bias": {"5": 2.0}, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"kv_transfer_params": None, "something_new": {"a": [1, 2.50]}},
        {"kv_transfer_params": {"prefix_prompt_ids": [1, 2, 3]}},
        {"prefix_prompt_ids": [1, 2, 3], "user": "somebody", "request_id": "mine"},
    )
    found += [(COMPLETIONS, {**common, "prompt": _TEXTS[3], **one}) for one in more]
    chats: tuple[dict[str, Any], ...] = (
        {},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"max_completion_tokens": 6, "logprobs": True, "top_logprobs": 2},
        {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": _TEXTS[2]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": _TEXTS[1]}]}]},
    )
    asked = {**common, "messages": [{"role": "user", "content": _TEXTS[2]}]}
    return [*found, *((CHAT, {**asked, **one}) for one in chats)]


# -------------------------------------------------------------------------------------------------------------- fields

# Values of a wrong type are in `HOSTILE`. No value here is known to end the engine of stock vLLM: no grammars, and no
# token ids beyond the vocabulary where the sampler does not check them. Nor to change the answers of other requests:
# below 0.31 vLLM applies ``allowed_token_ids`` to the wrong request when it reorders a batch (``swap_states``).
_ODD: Mapping[str, tuple[Any, ...]] = {
    "prompt": (
        *(
            "",
            " ",
            "\x00",
            "x" * 600,
            "\ud83d",
            [],
            [""],
            ["a", "b"],
            [[1, 2], [3]],
            [[]],
            [1, "a"],
            [-1],
            [511],
            [512],
        ),
        *([2**31], [2**63], [True], [1.0], [1.5], [[[1]]], {"prompt": "x"}, [None], [1, [2]], ["a", [1]], ["a"] * 300),
    ),
    "messages": (
        *([], [{}], [[]], "x", {}, [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": None}]),
        *([{"role": "nobody", "content": "x"}], [{"role": "user", "content": ""}], [{"role": "user", "content": []}]),
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "nothing", "text": "x"}]}],
        [{"role": "user", "content": "x", "odd": 1}] * 3,
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": 1}]}],
        [{"role": ["user"], "content": "x"}],
    ),
    "model": ("other", "", "MODEL", "a/b", ["model"]),
    "stream": ("yes", "true", 1, 0, None, True, False, [True]),
    "stream_options": (
        *({}, [], "x", {"include_usage": True}, {"include_usage": "x"}, {"include_usage": None}),
        {"continuous_usage_stats": True},
        {"include_usage": True, "odd": {"a": []}},
    ),
    "n": (0, -1, 1, 2, 3, 10**6, 2**31, "2", 1.0, True, None),
    "best_of": (0, 1, 2, "x"),
    "use_beam_search": (True, False, 1, "x"),
    "logprobs": (0, 1, 5, 20, 21, -1, -2, 10**6, True, False, "3", 2.5),
    "top_logprobs": (0, 1, 20, 21, -1, "3", 2.5),
    "prompt_logprobs": (0, 1, 20, 21, -1, -2, 10**6, True, "3"),
    "logprob_token_ids": ([], [1], ["x"]),
    "echo": (True, False, 1, "yes", None),
    "max_tokens": (0, -1, 1, 2, 511, 512, 10**9, 2**31, 2**63 - 1, "4", 4.0, 4.5, None, True),
    "max_completion_tokens": (0, -1, 1, 2, 511, 512, 10**9, 2**31, 2**63 - 1, "4", 4.0, 4.5, None, True),
    "min_tokens": (0, 1, 4, 5, -1, 10**9, "x"),
    "temperature": (-1, 0, 1e-9, 2, 1e308, "0", None, True),
    "top_p": (0, 1, 1.5, -1, 1e-9, "x"),
    "top_k": (0, -1, -2, 1, 10**9, "x"),
    "min_p": (0, 1, -0.5, 1.5, "x"),
    "presence_penalty": (-2, 2, 2.1, "x"),
    "frequency_penalty": (-2, 2, 2.1, "x"),
    "repetition_penalty": (0, -1, 0.5, 2, "x"),
    "length_penalty": (0, -1, "x"),
    "seed": (0, -1, 2**63 - 1, -(2**63), "x", 1.5),
    "stop": ("", "o", [""], ["o", "e"], [1], ["x"] * 100, "x" * 5000, {}),
    "stop_token_ids": ([], [5], ["x"], [1.5], 5),
    "logit_bias": ({}, {"5": 1}, {"x": 1}, {"5": "x"}, {"5": 1000}, [1]),
    "allowed_token_ids": (["x"], 5),
    "bad_words": ([], ["o"], [1], "x"),
    "ignore_eos": (True, False, "x"),
    "truncate_prompt_tokens": (-1, -2, 0, 1, 10, 10**9, "x"),
    "truncation_side": ("left", "right", "middle"),
    "add_special_tokens": (True, False, "x"),
    "skip_special_tokens": (True, False, "x"),
    "include_stop_str_in_output": (True, False, "x"),
    "return_token_ids": (True, False, "x"),
    "return_tokens_as_token_ids": (True, False, "x"),
    "stream_interval": (0, 1, 2, "x"),
    "suffix": ("x", "", 1),
    "user": ("x", 1),
    "priority": (0, 1, -1, 2**62, "x"),
    "request_id": ("mine", "", "a,b", 1, "x" * 5000),
    "cache_salt": ("", "other", 1, []),
    "response_format": ({"type": "text"}, {"type": "nothing"}, {}, "x"),
    "tools": ([], [{}], "x", [{"type": "function"}]),
    "tool_choice": ("none", "nothing", {}, 1),
    "chat_template_kwargs": ({}, [], "x"),
    "add_generation_prompt": (True, False, "x"),
    "continue_final_message": (True, False, "x"),
    "prompt_embeds": ("", "AA==", ["AA==", "AA=="], 1, []),
    "vllm_xargs": ({}, {"a": 1}, {"a": {"b": 1}}, {"kv_transfer_params": "x"}, [], "x"),
    "kv_transfer_params": ({}, None, [], {"do_remote_decode": True}, {"transfer_id": "t"}, {"odd": 1}, "x"),
    "ec_transfer_params": ({}, None, {"a": 1}, "x"),
    "prefix_prompt_ids": ([], [1, 2], [-1], [2**31], "x", [1.5]),
    "something_new": ({"a": [1, 2.5]},),
}
_DEEP = (20, 200, 900, 1100, 20_000)


def odd(random_: random.Random, requests: Sequence[tuple[str, dict[str, Any]]], salt: str) -> Body:
    """Return a valid request with one to three fields, present or missing, set to invalid or unusual values."""
    path, fields = random_.choice(requests)
    fields = salted(fields, salt)
    changed = []
    for _ in range(random_.choice((1, 1, 2, 3))):
        name = random_.choice(list(_ODD))
        changed.append(name)
        fields[name] = random_.choice(_ODD[name] if random_.random() < 0.75 else HOSTILE)
    content = encode(fields)
    if random_.random() < 0.05:
        changed.append("nested")
        content = _nested(random_, content)
    if random_.random() < 0.05:
        changed.append("twice")
        content = _twice(random_, fields)
    return Body("field " + "+".join(sorted(set(changed))), path, content)


def _nested(random_: random.Random, content: bytes) -> bytes:
    """Add a field, or replace the prompt, with a value nested so deeply that a parser may fail."""
    deep = random_.choice(_DEEP)
    opening, closing = random_.choice(((b"[", b"]"), (b'{"a":', b"}")))
    name = random_.choice((b"more", b"prompt", b"logit_bias", b"kv_transfer_params", b"stop"))
    return content[:-1] + b', "%s": ' % name + opening * deep + b"1" + closing * deep + b"}"


def _twice(random_: random.Random, fields: Mapping[str, Any]) -> bytes:
    """Repeat a key; router and server must both use the last value."""
    name = random_.choice(list(fields))
    first = {name: random_.choice(_ODD.get(name, HOSTILE))}
    return encode(first)[:-1] + b", " + encode(fields)[1:]


# --------------------------------------------------------------------------------------------------------------- bytes

_PIECES = (
    *(
        b"",
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b"\\",
        b":",
        b",",
        b"\xff",
        b"\xc3",
        b"\x00",
        b"\\u0000",
        b"\\ud800",
        b"\\udc00",
    ),
    *(b"1e999", b"-1e999", b"1e-999", b"NaN", b"Infinity", b"null", b"true", b"-", b"9" * 30, b"0x10", b"01", b"+1"),
    *(b"/* */", b"//\n", b"'", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b" " * 3000, b"\n", b"\t", b"\r"),
)


def _spliced(random_: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(random_.choice((1, 1, 2, 4))):
        place = random_.randrange(len(changed) + 1)
        changed[place : place + random_.randrange(3)] = random_.choice(_PIECES)
    return bytes(changed)


def _cut(random_: random.Random, content: bytes) -> bytes:
    return content[: random_.randrange(len(content))]


def _other_text(random_: random.Random, content: bytes) -> bytes:
    encoding = random_.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "cp500"))
    return content.decode().encode(encoding)


def _more(random_: random.Random, content: bytes) -> bytes:
    tail = random_.choice((b" x", b"\x00", content, b"\n\n", b",", b"}", b"\xff"))
    return random_.choice((content + tail, tail + content))


def _no_object(random_: random.Random, content: bytes) -> bytes:
    return random_.choice(
        (b"", b"[]", b"null", b"1", b'"x"', b"{}", b"[%s]" % content, b"%PDF-1.4", bytes(random_.randbytes(80)))
    )


_MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(_spliced, _spliced, _spliced, _spliced, _cut, _cut, _other_text, _more, _no_object),
)


def mutated(random_: random.Random, requests: Sequence[tuple[str, dict[str, Any]]], salt: str) -> Body:
    """Return a valid request with changed bytes."""
    path, fields = random_.choice(requests)
    mutation = random_.choice(_MUTATIONS)
    return Body(f"bytes {mutation.__name__.strip('_')}", path, mutation(random_, encode(salted(fields, salt))))
