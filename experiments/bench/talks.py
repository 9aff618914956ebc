# SPDX-License-Identifier: Apache-2.0
"""Conversations: what clients say, the right answers, and a client that sends one turn.

What is sent in a turn has the right answers to the earlier ones, so a wrong answer does not spread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import httpx

from experiments.byte_equivalence.compare import LOGPROB_TOLERANCE, compare_answers
from experiments.common.client import Answer, AnswerError, Client, http_client

MESSAGE_TOKENS, ANSWER_TOKENS = (16, 128), 32


@dataclass(frozen=True)
class Load:
    """The conversations. A client thinks for half of ``think_seconds`` to one and a half of it before each turn: so
    long that on few cores turns mostly have the servers to themselves."""

    conversations: int = 8
    turns: int = 6
    history_tokens: int = 8192
    think_seconds: float = 6.0

    def messages(self) -> list[list[Message]]:
        """Return what clients say: the same in each run. The first message of each conversation stands for its history
        until then; that of the last turn is as long as asked for at most, unless that is too short for the turns."""
        draw = random.Random(17)
        grows = (self.turns - 1) * (MESSAGE_TOKENS[1] + ANSWER_TOKENS)
        first = (self.history_tokens // 2, max(self.history_tokens // 2, self.history_tokens - grows))
        sizes = (first, *[MESSAGE_TOKENS] * (self.turns - 1))

        def one(size: tuple[int, int]) -> Message:
            tokens = [draw.randrange(3, 500) for _ in range(draw.randint(*size))]
            return Message(tokens, self.think_seconds * draw.uniform(0.5, 1.5))

        return [[one(size) for size in sizes] for _ in range(self.conversations)]


class Message(NamedTuple):
    """What a client says in a turn, and for how long it thinks before."""

    tokens: list[int]
    think_seconds: float


class Turn(NamedTuple):
    """A turn: the whole prompt, and the stock instance's answer."""

    prompt: list[int]
    think_seconds: float
    right: Answer


async def learn(url: str, messages: Sequence[Sequence[Message]]) -> list[list[Turn]]:
    """Return the conversations with the answers of the server at ``url``."""
    async with http_client(1) as http:
        asked = Client(url, http)

        async def answered(prompt: list[int], salt: str) -> Answer:
            return await asked.answer(prompt, max_tokens=ANSWER_TOKENS, salt=salt, request_id=salt)

        talks: list[list[Turn]] = []
        for number, said in enumerate(messages):
            history: list[int] = []
            talks.append([])
            for tokens, think_seconds in said:
                prompt = [*history, *tokens]
                talks[-1].append(Turn(prompt, think_seconds, await answered(prompt, f"right-{number}")))
                history = [*prompt, *talks[-1][-1].right.token_ids]
        return talks


class Got(NamedTuple):
    """What a client got: the time to first token, or None with an error; and what was not right."""

    seconds: float | None
    problem: str = ""

    @property
    def verdict(self) -> str:
        return "error" if self.seconds is None else "wrong" if self.problem else "right"

    @property
    def figures(self) -> dict[str, float]:
        times = {} if self.seconds is None else {"first_token": self.seconds}
        return {**{one: float(one == self.verdict) for one in ("right", "wrong", "error")}, **times}


async def ask(to: Client, prompt: list[int], right: Answer, salt: str, name: str) -> Got:
    begun = time.perf_counter()
    try:
        first, found = await to.streamed(prompt, max_tokens=ANSWER_TOKENS, salt=salt, request_id=name)
    except (AnswerError, httpx.HTTPError) as error:
        return Got(None, f"{name}: {error!r}")
    differences = compare_answers(name, right, found, LOGPROB_TOLERANCE["float32"])
    return Got(first - begun, "; ".join(f"{name}: {one.aspect}, {one.text}" for one in differences))
