# SPDX-License-Identifier: Apache-2.0
"""Clients of a pair of servers: every answer is right, wrong, a clear error, or none at all."""

from __future__ import annotations

import asyncio
import itertools
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

    ``expected``: what each prompt's answer is.
    """

    pair: Sequence[Server]
    mode: str
    prompts: Sequence[list[int]]
    expected: list[list[int]] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    fault: str = "none"

    def __post_init__(self) -> None:
        self._numbers = itertools.count()

    @property
    def verdicts(self) -> Counter[str]:
        return Counter(one.verdict for one in self.ended)

    async def learn(self) -> None:
        """Let prefill answer every prompt by itself."""
        async with http_client(1) as http:
            client = Client(self.pair[0].base_url, http)
            for number, prompt in enumerate(self.prompts):
                names = {"salt": f"alone-{number}", "request_id": f"alone-{number}"}
                self.expected.append((await client.answer(prompt, max_tokens=TOKENS, **names)).token_ids)

    async def one(self, leaves_after_seconds: float | None = None) -> Ended:
        """One request, P first, then D; its client goes away after that time."""
        number = next(self._numbers)
        fault, began = self.fault, time.monotonic()
        try:
            async with asyncio.timeout(leaves_after_seconds or HANG_SECONDS):
                verdict, detail = await self._ask(number)
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
                verdict, detail = await self._decode(decode, name, n, params)
                self.ended.append(Ended(verdict, OUT_OF_DATE, began, time.monotonic(), detail))
        return self.ended[first:]

    async def _ask(self, number: int) -> tuple[Verdict, str]:
        which, name = number % len(self.prompts), f"r-{number}"
        async with http_client(1) as http:
            prefill, decode = (Client(server.base_url, http) for server in self.pair)
            try:
                params = await self._prefill(prefill, name, self.prompts[which])
            except AnswerError as error:
                return "error", str(error)
            except httpx.HTTPError as error:
                return "no connection", repr(error)
            return await self._decode(decode, name, which, params)

    async def _prefill(self, prefill: Client, name: str, prompt: list[int]) -> dict[str, Any]:
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        if self.mode == "push":
            params |= {"transfer_id": name}
        answer = await prefill.complete(prompt, max_tokens=1, salt=name, request_id=name, kv_transfer_params=params)
        offered: dict[str, Any] | None = answer.get("kv_transfer_params")
        if not offered:
            raise AnswerError(f"prefill answered {name} without kv_transfer_params")
        return offered

    async def _decode(self, decode: Client, name: str, which: int, params: dict[str, Any]) -> tuple[Verdict, str]:
        try:
            answer = await decode.complete(
                self.prompts[which], max_tokens=TOKENS, salt=name, request_id=name, kv_transfer_params=params
            )
            found = read_answer(answer, TOKENS).token_ids
        except AnswerError as error:
            return "error", str(error)
        except httpx.HTTPError as error:
            return "no connection", repr(error)
        if found == self.expected[which]:
            return "right", ""
        return "wrong", f"{name}: found {found}; expected {self.expected[which]}"
