# SPDX-License-Identifier: Apache-2.0
"""``n`` > 1 and lists of prompts: each sequence is a request of its own, with its own hand-over; one answer for all.

vLLM gives child number i of a request the seed + i (vllm/v1/engine/parallel_sampling.py), and numbers the choices by
prompt, then by child; so does this module. Of the children of one prompt the first is asked alone until its first
token: the others find its prompt in prefill's prefix cache. A child that fails fails the whole request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from kvcached_nixl.proxy.asked import Asked
from kvcached_nixl.proxy.client import Response
from kvcached_nixl.proxy.failure import LegFailed, RouterFailure

__all__ = ["FanOut"]

END = b"data: [DONE]\n\n"
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_number = msgspec.json.Decoder(int)
_SAME_FOR_ALL = ("id", "request_id", "created")
Run = Callable[[Asked, "Child"], Awaitable[None]]


class Child:
    """The response of one child.

    Attributes:
        place: index of its choice.
        first: set when the child has its first token, or its whole answer.
    """

    def __init__(self, place: int, out: Response, merged: FanOut) -> None:
        self.place = place
        self._out = out
        self._merged = merged
        self.first = asyncio.Event()
        self.has_begun = False

    @property
    def is_client_there(self) -> bool:
        return self._out.is_client_there

    async def whole(self, status: int, content_type: str, body: bytes) -> None:
        self.has_begun = True
        self.first.set()
        with _odd_is_failure():
            self._merged.answers[self.place] = _object.decode(body)

    async def begin(self, content_type: str) -> None:
        self.has_begun = True
        self.first.set()
        if not self._out.has_begun:
            await self._out.begin(content_type)

    async def piece(self, events: bytes) -> None:
        rewritten = b"".join(self._merged.rewritten(self.place, event) for event in events.split(b"\n\n") if event)
        if rewritten:
            await self._out.piece(rewritten)

    async def end(self) -> None:
        """Nothing: the stream ends when all children have ended."""


class FanOut:
    """One request with several sequences. Once per request.

    Args:
        asked: with more than one sequence.

    Attributes:
        answers: of the children that have ended, not streamed.
    """

    def __init__(self, asked: Asked, out: Response) -> None:
        self._asked = asked
        self._prompts: tuple[msgspec.Raw | None, ...] = asked.prompts or (None,)
        self._n = asked.n
        self._out = out
        self._usages: dict[int, dict[str, msgspec.Raw]] = {}
        self._common: dict[str, msgspec.Raw] = {}
        self.answers: dict[int, dict[str, msgspec.Raw]] = {}

    async def run(self, run: Run) -> None:
        """Serve all children, and end the response.

        Args:
            run: serves one child.

        Raises:
            Exception: the first one of a child; the others are ended.
        """
        tasks = [asyncio.ensure_future(self._group(number, run)) for number in range(len(self._prompts))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._out.has_begun:
            if self.answers:
                reason = "a server answered in one piece what another one streamed"
                raise LegFailed(RouterFailure.ANSWER, "decode", reason, is_retriable=False)
            usage = self._usage(self._usages)
            last = {**self._common, "choices": [], "usage": usage} if usage else None
            await self._out.piece((_event(last) if last else b"") + END)
            await self._out.end()
        else:
            await self._out.whole(200, "application/json", self._merged_answer())

    async def _group(self, number: int, run: Run) -> None:
        """Serve the children of one prompt."""
        children = [Child(number * self._n + place, self._out, self) for place in range(self._n)]
        tasks = [asyncio.ensure_future(run(self._of_child(number, 0), children[0]))]
        first = asyncio.ensure_future(children[0].first.wait())
        try:
            await asyncio.wait({first, tasks[0]}, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
            tasks += [
                asyncio.ensure_future(run(self._of_child(number, place), children[place]))
                for place in range(1, self._n)
            ]
            await asyncio.gather(*tasks)
        finally:
            for task in (first, *tasks):
                task.cancel()
            await asyncio.gather(first, *tasks, return_exceptions=True)

    def _of_child(self, number: int, place: int) -> Asked:
        fields: dict[str, Any] = {
            key: value for key, value in self._asked.fields.items() if key not in ("n", "best_of")
        }
        if (prompt := self._prompts[number]) is not None:
            fields["prompt"] = prompt
        seed = bytes(fields.get("seed", b"null"))
        if place and seed != b"null":
            fields["seed"] = msgspec.Raw(b"%d" % (_number.decode(seed) + place))
        return replace(
            self._asked,
            fields=fields,
            prompts=(),
            n=1,
            prompt_tokens=1 + self._asked.prompt_tokens // len(self._prompts),
        )

    # --------------------------------------------------------------------------------------------------------- merging

    def rewritten(self, place: int, event: bytes) -> bytes:
        """Returns an event of a child as one of the whole response; b"" if it is kept for the end."""
        data = _data_of(event)
        if data in (b"", b"[DONE]"):
            return b""
        with _odd_is_failure():
            said = _object.decode(data)
            choices = _choices.decode(said.get("choices", b"[]"))
        if "error" in said:
            raise LegFailed(RouterFailure.SERVER, "decode", "the server ended its response with an error")
        if not self._common:
            self._common = {key: said[key] for key in (*_SAME_FOR_ALL, "object", "model") if key in said}
        if not choices and "usage" in said:
            self._usages[place] = said
            return b""
        return _event({**said, **self._shared(said), "choices": self._numbered(place, choices)})

    def _shared(self, said: Mapping[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
        return {key: self._common[key] for key in _SAME_FOR_ALL if key in said and key in self._common}

    def _numbered(self, place: int, choices: list[dict[str, msgspec.Raw]]) -> list[dict[str, msgspec.Raw]]:
        return [{**one, "index": msgspec.Raw(b"%d" % place)} for one in choices]

    def _merged_answer(self) -> bytes:
        with _odd_is_failure():
            choices = [
                choice
                for place, answer in sorted(self.answers.items())
                for choice in self._numbered(place, _choices.decode(answer["choices"]))
            ]
        merged: dict[str, Any] = {**self.answers[0], "choices": choices, "kv_transfer_params": None}
        if usage := self._usage(self.answers):
            merged["usage"] = usage
        return msgspec.json.encode(merged)

    def _usage(self, said: Mapping[int, Mapping[str, msgspec.Raw]]) -> dict[str, Any]:
        """Returns the usage of the whole: each prompt once, each completion; {} if a child did not say its own."""
        if any(bytes(one.get("usage", b"null")) == b"null" for one in said.values()):
            return {}
        with _odd_is_failure():
            found = {place: _object.decode(one["usage"]) for place, one in said.items()}
            if len(found) < len(self._prompts) * self._n:
                return {}
            prompt = sum(_number.decode(found[place]["prompt_tokens"]) for place in range(0, len(found), self._n))
            completion = sum(_number.decode(one["completion_tokens"]) for one in found.values())
        return {
            **found[0],
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


@contextmanager
def _odd_is_failure() -> Iterator[None]:
    try:
        yield
    except (KeyError, msgspec.MsgspecError, RecursionError) as error:
        reason = f"a server's answer cannot be merged with the others: {type(error).__name__} {str(error)[:100]}"
        raise LegFailed(RouterFailure.ANSWER, "decode", reason, is_retriable=False) from error


def _data_of(event: bytes) -> bytes:
    """Returns an event's data, whatever other lines are beside it, such as a comment."""
    lines = [line.removeprefix(b"data:") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b" ") for line in lines)


def _event(said: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(said) + b"\n\n"
