# SPDX-License-Identifier: Apache-2.0
"""All arms over one transport: what their clients see, and what is left of the transfer when prefill has computed.

Machines like these change their speed from minute to minute, by more than arms differ. So the servers of all arms run
from the start to the end, and the arms take turns: request by request, each time from another one on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from experiments.common.client import AnswerError, Client, http_client
from experiments.common.servers import Server, running
from experiments.push_vs_pull.arms import Arm, Load, Transport, specs

TOKENS = 16


@dataclass(frozen=True)
class Sample:
    """One request.

    Attributes:
        first_token_seconds: from the client's request until decode's first token.
        token_seconds: each further token.
        exposed_seconds: from the end of prefill's last step until decode's connector has everything; only measured one
            request at a time.
    """

    arm: str
    transport: str
    prompt_tokens: int
    at_a_time: int
    first_token_seconds: float
    token_seconds: float
    exposed_seconds: float | None


def measure(
    arms: Sequence[Arm],
    transports: Sequence[Transport],
    model: Path,
    load: Load,
    logs: Path,
    say: Callable[[str], None],
    enter: Callable[[Transport], None],
) -> Iterator[Sample]:
    """Start a pair for each kind of servers, send the load to all arms in turn, stop them.

    Args:
        transports: of one environment, so that the same servers serve them all.
        enter: makes the network into that transport's.
    """
    with contextlib.ExitStack() as stack:
        pairs = {
            # One after another: on few cores, together they would all be late.
            arm.servers: stack.enter_context(running(specs(arm, transports[0], model), logs, say))
            for arm in {arm.servers: arm for arm in arms}.values()
        }
        enter(transports[0])
        asyncio.run(_warm_up(_runs(arms, pairs, transports[0]), load, say))
        for transport in transports:
            enter(transport)
            yield from asyncio.run(_measure(_runs(arms, pairs, transport), transport, load, say))


def _runs(arms: Sequence[Arm], pairs: Mapping[str, Sequence[Server]], transport: Transport) -> list[_Run]:
    return [_Run(arm, transport, *pairs[arm.servers]) for arm in arms]


async def _warm_up(runs: Sequence[_Run], load: Load, say: Callable[[str], None]) -> None:
    """The handshake, both sides' first steps and the first touch of their memory are another experiment's."""
    async with http_client(max(load.at_a_time)) as http:
        for run in {run.arm.servers: run for run in runs}.values():
            say(f"warming up, {run.arm.name}")
            run.use(http)
            for side in (run.prefill, run.decode):
                await side.probe("time_transfers")
            await run.together(max(load.lengths), max(load.at_a_time))


async def _measure(runs: Sequence[_Run], transport: Transport, load: Load, say: Callable[[str], None]) -> list[Sample]:
    samples: list[Sample] = []
    async with http_client(max(load.at_a_time)) as http:
        for run in runs:
            run.use(http)
        turns = itertools.count()
        for length, at_a_time in itertools.product(load.lengths, load.at_a_time):
            say(f"over {transport.name}: {length} tokens, {at_a_time} at a time")
            for _ in range(load.rounds(length, at_a_time)):
                first = next(turns) % len(runs)
                for run in (*runs[first:], *runs[:first]):
                    samples += await run.together(length, at_a_time)
    return samples


class _Run:
    """One arm's clients."""

    names = itertools.count()

    def __init__(self, arm: Arm, transport: Transport, prefill: Server, decode: Server) -> None:
        self.arm = arm
        self.transport = transport
        self.coordinates = prefill.coordinates
        self.urls = prefill.base_url, decode.base_url

    def use(self, http: httpx.AsyncClient) -> None:
        """Ask through ``http`` from now on."""
        self.prefill, self.decode = (Client(url, http) for url in self.urls)

    async def together(self, length: int, at_a_time: int) -> list[Sample]:
        """Ask for ``at_a_time`` prompts of ``length`` tokens at once."""
        answers = await asyncio.gather(*(self._one(length) for _ in range(at_a_time)))
        exposed = await self._exposed() if at_a_time == 1 else None
        return [
            Sample(self.arm.name, self.transport.name, length, at_a_time, first, each, exposed)
            for first, each in answers
        ]

    async def _exposed(self) -> float:
        computed = (await self.prefill.probe("times"))["computed"]
        received = (await self.decode.probe("times"))["received"]
        return float(received - computed)

    async def _one(self, length: int) -> tuple[float, float]:
        """Returns the seconds until decode's first token, and for each one after it."""
        number = next(self.names)
        name = f"request-{number}"
        prompt = [2 + (number * 131 + place * 7 + place * place) % 500 for place in range(length)]
        begun = time.perf_counter()
        if self.arm.streamed:
            params = {**self.coordinates, "do_remote_prefill": True, "transfer_id": name}
            decoding = asyncio.create_task(self._stream(prompt, name, params))
            await self._prefill(prompt, name, {"do_remote_decode": True, "transfer_id": name})
            first, last = await decoding
        else:
            offered = await self._prefill(prompt, name, {"do_remote_decode": True, "do_remote_prefill": False})
            first, last = await self._stream(prompt, name, offered)
        return first - begun, (last - first) / (TOKENS - 1)

    async def _prefill(self, prompt: list[int], name: str, params: dict[str, Any]) -> dict[str, Any]:
        asked = await self.prefill.complete(prompt, max_tokens=1, salt=name, request_id=name, kv_transfer_params=params)
        offered = asked.get("kv_transfer_params")
        if not offered:
            raise AnswerError(f"{name}: found no kv_transfer_params in prefill's answer; nothing was handed over.")
        return dict(offered)

    async def _stream(self, prompt: list[int], name: str, params: dict[str, Any]) -> tuple[float, float]:
        """Ask decode; returns when the first and the last token came."""
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "cache_salt": name,
            "kv_transfer_params": params,
        }
        arrived: list[float] = []
        url = f"{self.decode.base_url}/v1/completions"
        async with self.decode.http.stream("POST", url, json=body, headers={"X-Request-Id": name}) as reply:
            if reply.status_code != httpx.codes.OK:
                raise AnswerError(f"{url} answered {reply.status_code} to {name}: {(await reply.aread())[:500]!r}")
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    if "error" in json.loads(line.removeprefix("data: ")):
                        raise AnswerError(f"{url} broke {name} off: {line[:500]}")
                    arrived.append(time.perf_counter())
        if not arrived:
            raise AnswerError(f"{url} sent nothing for {name}")
        return arrived[0], arrived[-1]
