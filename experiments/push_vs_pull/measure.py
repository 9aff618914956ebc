# SPDX-License-Identifier: Apache-2.0
"""Measures all arms over one transport: latency for clients, and the transfer time left after prefill's last step.

The machine's speed varies from minute to minute by more than the arms differ. So the servers of all arms run
throughout, and the arms take turns request by request, with a different arm first each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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
        token_seconds: average time of each further token.
        exposed_seconds: from the end of prefill's last step until decode's connector has all KV; only measured with one
            request at a time, else None.
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
    enter: Callable[[Transport, float], None],
) -> list[Sample]:
    """Start a pair for each server configuration, send the load to all arms in turn, stop the servers.

    Args:
        transports: transports with the same environment, so that the same servers can use all of them.
        enter: configures the network for a transport; called with the tokens that prefill computes per second.
    """
    with contextlib.ExitStack() as stack:
        pairs = {
            # Started one after another: on few cores, all together would start too slowly.
            arm.servers: stack.enter_context(running(specs(arm, transports[0], model), logs, say))
            for arm in {arm.servers: arm for arm in arms}.values()
        }
        return asyncio.run(_ask(arms, pairs, transports, load, say, enter))


async def _ask(
    arms: Sequence[Arm],
    pairs: Mapping[str, Sequence[Server]],
    transports: Sequence[Transport],
    load: Load,
    say: Callable[[str], None],
    enter: Callable[[Transport, float], None],
) -> list[Sample]:
    samples: list[Sample] = []
    turns = itertools.count()
    async with http_client(max(load.at_a_time)) as http:
        runs = [_Run(arm, *pairs[arm.servers], http) for arm in arms]
        for run in {run.arm.servers: run for run in runs}.values():
            # Not measured here: the handshake, both sides' first steps and the first touch of their memory.
            say(f"warming up, {run.arm.name}")
            await run.warm_up(load)
        for transport in transports:
            enter(transport, await runs[0].prefill_tokens_per_second(load))
            for length, at_a_time in itertools.product(load.lengths, load.at_a_time):
                say(f"over {transport.name}: {length} tokens, {at_a_time} at a time")
                for _ in range(load.rounds(length, at_a_time)):
                    first = next(turns) % len(runs)
                    for run in (*runs[first:], *runs[:first]):
                        samples += await run.together(transport, length, at_a_time)
    return samples


class _Run:
    """One arm's clients."""

    names = itertools.count()

    def __init__(self, arm: Arm, prefill: Server, decode: Server, http: httpx.AsyncClient) -> None:
        self.arm = arm
        self.coordinates = prefill.coordinates
        self.prefill, self.decode = Client(prefill.base_url, http), Client(decode.base_url, http)

    async def warm_up(self, load: Load) -> None:
        """Send as many of the longest prompts at once as the load has at most."""
        for side in (self.prefill, self.decode):
            await side.probe("time_transfers")
        await asyncio.gather(*(self._one(max(load.lengths)) for _ in range(max(load.at_a_time))))

    async def prefill_tokens_per_second(self, load: Load) -> float:
        """Return the rate for the longest prompt without other requests; the median of three."""
        prompt, seconds = [2] * max(load.lengths), []
        for _ in range(3):
            name = f"speed-{next(self.names)}"
            begun = time.perf_counter()
            await self.prefill.complete(prompt, max_tokens=1, salt=name, request_id=name)
            seconds.append(time.perf_counter() - begun)
        return len(prompt) / statistics.median(seconds)

    async def together(self, transport: Transport, length: int, at_a_time: int) -> list[Sample]:
        """Send ``at_a_time`` prompts of ``length`` tokens at once."""
        answers = await asyncio.gather(*(self._one(length) for _ in range(at_a_time)))
        exposed = await self._exposed() if at_a_time == 1 else None
        return [
            Sample(self.arm.name, transport.name, length, at_a_time, first, each, exposed) for first, each in answers
        ]

    async def _exposed(self) -> float:
        computed = (await self.prefill.probe("times"))["computed"]
        received = (await self.decode.probe("times"))["received"]
        return float(received - computed)

    async def _one(self, length: int) -> tuple[float, float]:
        """Return the seconds until decode's first token, and the average for each later one."""
        number = next(self.names)
        name = f"request-{number}"
        prompt = [2 + (number * 131 + place * 7 + place * place) % 500 for place in range(length)]
        begun = time.perf_counter()
        if self.arm.streamed:
            params = {**self.coordinates, "do_remote_prefill": True, "transfer_id": name}
            decoding = asyncio.create_task(self._decode(prompt, name, params))
            await self._prefill(prompt, name, {"do_remote_decode": True, "transfer_id": name})
            arrived = await decoding
        else:
            offered = await self._prefill(prompt, name, {"do_remote_decode": True, "do_remote_prefill": False})
            arrived = await self._decode(prompt, name, offered)
        return arrived[0] - begun, (arrived[-1] - arrived[0]) / (TOKENS - 1)

    async def _prefill(self, prompt: list[int], name: str, params: dict[str, Any]) -> dict[str, Any]:
        asked = await self.prefill.complete(prompt, max_tokens=1, salt=name, request_id=name, kv_transfer_params=params)
        offered = asked.get("kv_transfer_params")
        if not offered:
            raise AnswerError(f"{name}: found no kv_transfer_params in prefill's answer; nothing was handed over.")
        return dict(offered)

    async def _decode(self, prompt: list[int], name: str, params: dict[str, Any]) -> list[float]:
        return await self.decode.token_times(
            prompt, max_tokens=TOKENS, salt=name, request_id=name, kv_transfer_params=params
        )
