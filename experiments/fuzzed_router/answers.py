# SPDX-License-Identifier: Apache-2.0
"""Parses the bytes received over a connection, and compares answers. Pure functions."""

from __future__ import annotations

import http.client
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

__all__ = [
    "Reply",
    "Said",
    "Unreadable",
    "agrees",
    "is_determined",
    "is_same_failure",
    "read",
    "replies",
    "says_error",
    "without_waits",
]


class Unreadable(ValueError):
    """The bytes are not a complete answer of an OpenAI-compatible server."""


@dataclass(frozen=True)
class Reply:
    """An HTTP response; names of headers in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_last(self) -> bool:
        """Whether it says that the server closes the connection after it."""
        return self.headers.get("connection", "").lower() == "close"


@dataclass(frozen=True)
class Choice:
    text: str
    finish_reason: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Said:
    """A model's answer. ``tokens``: number of tokens of the prompt and of the answer, None without ``usage``."""

    choices: tuple[Choice, ...]
    tokens: tuple[Any, Any] | None = None


class _Heard(io.BytesIO):
    """Stands in for a socket of `http.client`; reading continues where the previous answer has ended."""

    def makefile(self, mode: str) -> _Heard:
        return self

    def close(self) -> None:
        pass


def replies(heard: bytes, methods: Sequence[str]) -> list[Reply]:
    """Return the answers that were received over one connection.

    Args:
        methods: methods of the requests, since an answer to HEAD has no body.

    Raises:
        Unreadable: the bytes are not HTTP, or end too early.
    """
    found: list[Reply] = []
    stream = _Heard(heard)
    while stream.tell() < len(heard):
        if heard.find(b"\r\n\r\n", stream.tell()) < 0:
            raise Unreadable("incomplete headers")
        answer = http.client.HTTPResponse(cast(Any, stream), method=dict(enumerate(methods)).get(len(found)))
        try:
            answer.begin()
            body = answer.read()
        except (http.client.HTTPException, ValueError) as cause:
            raise Unreadable(f"{type(cause).__name__}: {cause}"[:200]) from cause
        found.append(Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, body))
    return found


def without_waits(reply: Reply) -> Reply:
    """Return a stream without the empty lines that kept it alive; of an error behind them, the error's response."""
    if not reply.body.startswith(b"\n"):
        return reply
    rest = b"".join(one + b"\n\n" for one in reply.body.split(b"\n\n") if one)
    bare = Reply(reply.status, reply.headers, rest)
    if rest.count(b"\n\n") != 1:
        return bare
    failed = Reply(reply.status, reply.headers, rest.strip().removeprefix(b"data: "))
    return Reply(_object(failed.body)["error"]["code"], reply.headers, failed.body) if says_error(failed) else bare


def says_error(reply: Reply) -> bool:
    """Whether it is an error in OpenAI's format."""
    try:
        error = _object(reply.body).get("error")
    except Unreadable:
        return False
    return isinstance(error, dict) and isinstance(error.get("message"), str) and isinstance(error.get("type"), str)


def read(reply: Reply) -> Said:
    """Return the model's answer in a response with status 200, streamed or not.

    Raises:
        Unreadable: the body is not an answer, or is a stream with an error or without its end.
    """
    if not reply.headers.get("content-type", "").startswith("text/event-stream"):
        answer = _object(reply.body)
        return _said([answer], answer.get("usage"))
    events = [one.removeprefix(b"data: ") for one in reply.body.split(b"\n\n") if one]
    if not events or events.pop() != b"[DONE]":
        raise Unreadable("the stream has no end event")
    parts = [_object(one) for one in events]
    if any("error" in one for one in parts):
        raise Unreadable("the stream has an error")
    return _said(parts, next((one["usage"] for one in reversed(parts) if one.get("usage")), None))


def agrees(found: Said, expected: Said) -> bool:
    """Whether both answers are equal; numbers of tokens are compared only where both have them."""
    return found.choices == expected.choices and (
        found.tokens == expected.tokens or None in (found.tokens, expected.tokens)
    )


def is_determined(body: bytes) -> bool:
    """Whether a request has exactly one right answer, because its sampling is greedy."""
    try:
        fields = json.loads(body)
        is_greedy = float(fields["temperature"]) == 0
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return False
    return is_greedy and not fields.get("use_beam_search")


def is_same_failure(reply: Reply, direct: Reply) -> bool:
    """Whether the router's answer is the server's failure for the same body, or the router's form of it.

    For a server's 5xx, and for a stream that begins with an error, the router answers 502 and names the failure.
    """
    if reply.status == direct.status:
        return True
    if reply.status != http.client.BAD_GATEWAY:
        return False
    if direct.status >= http.client.INTERNAL_SERVER_ERROR:
        return f"answered {direct.status}" in reply.body.decode(errors="replace")
    return b"begins with an error" in reply.body and direct.status == http.client.OK and b'"error"' in direct.body


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise Unreadable(f"not JSON: {text[:100]!r}") from cause
    if not isinstance(found, dict):
        raise Unreadable(f"not a JSON object: {text[:100]!r}")
    return found


def _said(parts: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None) -> Said:
    """Return the model's answer, from a complete answer or from the events of a stream."""
    texts: dict[int, str] = {}
    ids: dict[int, tuple[int, ...]] = {}
    ends: dict[int, str | None] = {}
    try:
        for choice in (choice for part in parts for choice in part["choices"]):
            place = choice["index"]
            said = choice.get("delta") or choice.get("message") or choice
            texts[place] = texts.get(place, "") + (said.get("text") or said.get("content") or "")
            ids[place] = (*ids.get(place, ()), *(choice.get("token_ids") or ()))
            ends[place] = choice.get("finish_reason") or ends.get(place)
    except (KeyError, TypeError, AttributeError) as cause:
        raise Unreadable(f"no choices: {type(cause).__name__} {cause}"[:200]) from cause
    if not texts:
        raise Unreadable("no choices")
    choices = tuple(Choice(texts[place], ends[place], ids[place]) for place in sorted(texts))
    return Said(choices, None if usage is None else (usage.get("prompt_tokens"), usage.get("completion_tokens")))
