# SPDX-License-Identifier: Apache-2.0
"""Clients of a pair of servers: every answer is right, wrong, a clear error, or none at all."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from experiments.common.client import AnswerError, Client, http_client, read_answer
from experiments.common.servers import Server
from experiments.lease_recovery.arms import TOKENS

Verdict = Literal["right", "wrong", "error", "no connection", "went away", "hangs"]
OUT_OF_DATE = "parameters out of date"
"""What was going on for a request whose decode comes too late; others are asked meanwhile."""
FIRST_WEIGHTS, OTHER_WEIGHTS = "0", "5"
"""Of the KV probe: those that a server starts with, and some that differ."""
HANG_SECONDS = 90.0
"""Longer than anything here may take, a handshake that is tried again among it, on a busy machine."""


@dataclass(frozen=True)
class Ended:
    """One request. ``fault``: what was going on when it began."""

    verdict: Verdict
    fault: str
    began_seconds: float
    ended_seconds: float
    detail: str = ""


@dataclass
class Traffic:
    """Requests through both servers, and what became of them.

    Attributes:
        expected: what each prompt's answer is.
        other: what it is with the weights that ``OTHER_WEIGHTS`` stands for.
        other_until_seconds: a request that began before may have been computed with either weights, but not with both.
    """

    pair: Sequence[Server]
    mode: str
    prompts: Sequence[list[int]]
    expected: list[list[int]] = field(default_factory=list)
    other: list[list[int]] = field(default_factory=list)
    other_until_seconds: float = -math.inf
    ended: list[Ended] = field(default_factory=list)
    fault: str = "none"

    def __post_init__(self) -> None:
        self._numbers = itertools.count()

    @property
    def verdicts(self) -> Counter[str]:
        return Counter(one.verdict for one in self.ended)

    async def learn(self) -> None:
        """Let prefill answer every prompt by itself."""
        self.expected = await self._alone("alone")

    async def learn_other(self) -> None:
        """The same with the other weights, which prefill has for that time."""
        async with http_client(1) as http:
            prefill = Client(self.pair[0].base_url, http)
            await prefill.probe("other_weights", OTHER_WEIGHTS)
            self.other = await self._alone("other")
            await prefill.probe("other_weights", FIRST_WEIGHTS)

    async def _alone(self, name: str) -> list[list[int]]:
        async with http_client(1) as http:
            client = Client(self.pair[0].base_url, http)
            names = [f"{name}-{number}" for number in range(len(self.prompts))]
            return [
                (await client.answer(prompt, max_tokens=TOKENS, salt=one, request_id=one)).token_ids
                for one, prompt in zip(names, self.prompts, strict=True)
            ]

    async def one(self, leaves_after_seconds: float | None = None) -> Ended:
        """One request, P first, then D; its client goes away after that time."""
        number = next(self._numbers)
        fault, began = self.fault, time.monotonic()
        try:
            async with asyncio.timeout(leaves_after_seconds or HANG_SECONDS):
                verdict, detail = await self._ask(number, began)
        except TimeoutError:
            verdict, detail = ("went away", "") if leaves_after_seconds else ("hangs", f"request {number}")
        self.ended.append(Ended(verdict, fault, began, time.monotonic(), detail))
        return self.ended[-1]

    async def stale(self, count: int, wait_seconds: float) -> list[Ended]:
        """``count`` requests whose decode comes when the lease has ended and other requests have had the blocks."""
        first = len(self.ended)
        async with http_client(4) as http:
            prefill, decode = (Client(server.base_url, http) for server in self.pair)
            names = [f"stale-{next(self._numbers)}" for _ in range(count)]
            which = [number % len(self.prompts) for number in range(count)]
            held = [await self._prefill(prefill, name, self.prompts[n]) for name, n in zip(names, which, strict=True)]
            await asyncio.sleep(wait_seconds)
            for number, prompt in enumerate(self.prompts[::-1]):
                await prefill.answer(prompt, max_tokens=1, salt=f"after-{names[0]}-{number}", request_id="after")
            for name, n, params in zip(names, which, held, strict=True):
                began = time.monotonic()
                verdict, detail = await self._decode(decode, name, n, params, began)
                self.ended.append(Ended(verdict, OUT_OF_DATE, began, time.monotonic(), detail))
        return self.ended[first:]

    async def _ask(self, number: int, began: float) -> tuple[Verdict, str]:
        which, name = number % len(self.prompts), f"r-{number}"
        async with http_client(1) as http:
            prefill, decode = (Client(server.base_url, http) for server in self.pair)
            try:
                params = await self._prefill(prefill, name, self.prompts[which])
            except AnswerError as error:
                return "error", str(error)
            except httpx.HTTPError as error:
                return "no connection", repr(error)
            return await self._decode(decode, name, which, params, began)

    async def _prefill(self, prefill: Client, name: str, prompt: list[int]) -> dict[str, Any]:
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        if self.mode == "push":
            params |= {"transfer_id": name}
        answer = await prefill.complete(prompt, max_tokens=1, salt=name, request_id=name, kv_transfer_params=params)
        offered: dict[str, Any] | None = answer.get("kv_transfer_params")
        if not offered:
            raise AnswerError(f"prefill answered {name} without kv_transfer_params")
        return offered

    async def _decode(
        self, decode: Client, name: str, which: int, params: dict[str, Any], began: float
    ) -> tuple[Verdict, str]:
        try:
            answer = await decode.complete(
                self.prompts[which], max_tokens=TOKENS, salt=name, request_id=name, kv_transfer_params=params
            )
            found = read_answer(answer, TOKENS).token_ids
        except AnswerError as error:
            return "error", str(error)
        except httpx.HTTPError as error:
            return "no connection", repr(error)
        right = [self.expected[which], *([self.other[which]] if began < self.other_until_seconds else [])]
        if found in right:
            return "right", ""
        return "wrong", f"{name}: found {found}; expected {' or '.join(map(str, right))}"
