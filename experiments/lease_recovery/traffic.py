# SPDX-License-Identifier: Apache-2.0
"""Clients of a pair of servers. Each request gets a verdict: right, wrong, an error, or no answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from experiments.common.client import AnswerError, Client, answers_of, http_client, read_answer
from experiments.common.servers import Server
from experiments.lease_recovery.arms import TOKENS

Verdict = Literal["right", "wrong", "error", "no connection", "went away", "hangs"]
OUT_OF_DATE = "parameters out of date"
"""Value of ``fault`` for a request whose decode comes after its lease; other requests may run at the same time."""
FIRST_WEIGHTS, OTHER_WEIGHTS = "0", "5"
"""Seeds of the KV probe: for the weights that a server starts with, and for different ones."""
HANG_SECONDS = 90.0
"""Longer than any request may take, including a handshake that is retried, on a busy machine."""
PAUSE_SECONDS = 0.1
"""Pause of a client after a request without a correct answer."""
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Ended:
    """One finished request. ``fault`` is the fault being inflicted when it began."""

    verdict: Verdict
    fault: str
    began_seconds: float
    ended_seconds: float
    detail: str = ""


@dataclass
class Traffic:
    """Requests through both servers, and their results.

    Attributes:
        expected: the right answer to each prompt.
        other: the right answer to each prompt with the weights of ``OTHER_WEIGHTS``.
        other_until_seconds: a request that began before this time may have either answer, but no mixture of both.
        asking: while it is set, clients send requests.
    """

    pair: Sequence[Server]
    mode: str
    prompts: Sequence[list[int]]
    expected: list[list[int]] = field(default_factory=list)
    other: list[list[int]] = field(default_factory=list)
    other_until_seconds: float = -math.inf
    ended: list[Ended] = field(default_factory=list)
    fault: str = "none"
    asking: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._under_way = 0

    @property
    def verdicts(self) -> Counter[str]:
        return Counter(one.verdict for one in self.ended)

    @contextlib.asynccontextmanager
    async def clients(self, count: int) -> AsyncIterator[None]:
        """Run clients during a ``with`` block; they send requests while `asking` is set."""

        async def client() -> None:
            while True:
                await self.asking.wait()
                self._under_way += 1
                try:
                    ended = await self.one()
                finally:
                    self._under_way -= 1
                if ended.verdict != "right":
                    await asyncio.sleep(PAUSE_SECONDS)

        tasks = [asyncio.create_task(client()) for _ in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def rest(self) -> None:
        """Clear `asking`, and wait until no client has a request under way."""
        self.asking.clear()
        while self._under_way:
            await asyncio.sleep(LOOK_SECONDS)

    async def learn(self) -> None:
        """Get the right answers: prefill answers every prompt alone."""
        self.expected = await self._alone("alone")

    async def learn_other(self) -> None:
        """Get the right answers with the other weights, which prefill has during this call."""
        async with http_client(1) as http:
            prefill = Client(self.pair[0].base_url, http)
            await prefill.probe("other_weights", OTHER_WEIGHTS)
            self.other = await self._alone("other")
            await prefill.probe("other_weights", FIRST_WEIGHTS)

    async def _alone(self, name: str) -> list[list[int]]:
        found = await answers_of(self.pair[0].base_url, self.prompts, TOKENS, name)
        return [one.token_ids for one in found]

    async def one(self, leaves_after_seconds: float | None = None) -> Ended:
        """Send one request to P, then to D. Its client disconnects after ``leaves_after_seconds``, if given."""
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
        """Send ``count`` requests, each to D only after its lease has ended and other requests have used its blocks."""
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
        more = {"transfer_id": name} if self.mode == "push" else {}
        return await prefill.offer(prompt, salt=name, request_id=name, **more)

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
