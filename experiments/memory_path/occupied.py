# SPDX-License-Identifier: Apache-2.0
"""Measures how long prefill's blocks stay in use and their pages mapped: for one request, and under load."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from experiments.common.client import AnswerError, http_client
from experiments.common.pages import PageWatch
from experiments.common.servers import Server, running
from experiments.memory_path.arms import GIVING_BACK, PAGE_GROUP_BYTES, specs
from experiments.memory_path.asking import Asking
from experiments.push_vs_pull.arms import Arm

LOOK_SECONDS = 0.002
SETTLE_SECONDS = 30.0
LATE_SECONDS = 0.5
"""Under load, time between prefill's answer and decode's request, as with a router that waits for room on decode."""
CLIENTS = 4


@dataclass(frozen=True)
class Occupied:
    """One request without other load. All times but ``copied_seconds`` begin at the end of prefill's last step.

    Attributes:
        occupied_seconds: until its blocks are free.
        mapped_seconds: until their pages are unmapped.
        copied_seconds: time that prefill spent on copying KV out of its blocks; 0 on the direct path.
        whole_seconds: until decode's first token.
    """

    arm: str
    prompt_tokens: int
    occupied_seconds: float
    mapped_seconds: float
    copied_seconds: float
    whole_seconds: float


@dataclass(frozen=True)
class Loaded:
    """Under load: mapped bytes of prefill's pool, averaged over time; the number of hand-overs and their duration."""

    arm: str
    requests: int
    seconds: float
    mean_mapped_bytes: float
    pool_bytes: int


def measure(
    arm: Arm, lengths: tuple[int, ...], rounds: int, requests: int, model: Path, logs: Path, say: Callable[[str], None]
) -> tuple[list[Occupied], Loaded]:
    """Start a pair, measure both figures, stop it."""
    with running(specs(arm, GIVING_BACK, model), logs, say) as (prefill, decode):
        return asyncio.run(_measure(arm, lengths, rounds, requests, prefill, decode, say))


async def _measure(
    arm: Arm,
    lengths: tuple[int, ...],
    rounds: int,
    requests: int,
    prefill: Server,
    decode: Server,
    say: Callable[[str], None],
) -> tuple[list[Occupied], Loaded]:
    async with http_client(CLIENTS) as http:
        with PageWatch(prefill.identity) as watch:
            pair = _Pair(arm, Asking(prefill, decode, http), watch)
            await pair.warm_up(max(lengths))
            found = []
            for length, number in itertools.product(lengths, range(rounds)):
                say(f"{arm.name}: {length} tokens, {number + 1} of {rounds}")
                found.append(await pair.one(length))
            say(f"{arm.name}: {requests} requests, {CLIENTS} at a time")
            return found, await pair.load(requests, max(lengths) // 4)


class _Pair:
    """A pair whose prefill pool is sampled."""

    def __init__(self, arm: Arm, asking: Asking, watch: PageWatch) -> None:
        self.arm, self.asking, self.watch = arm, asking, watch

    async def warm_up(self, length: int) -> None:
        """Make hand-overs that are not measured: they include the handshake and the first touch of all memory."""
        for side in (self.asking.prefill, self.asking.decode):
            await side.probe("time_transfers")
        if (await self.asking.prefill.probe("time_copies"))["staged"] is not ("memory_path" in self.arm.extra):
            raise AnswerError(f"{self.arm.name}: prefill does not use its configured memory path; see its log.")
        for _ in range(2):
            await self.one(length)

    async def one(self, length: int) -> Occupied:
        """Hand one prompt over; returns when prefill's pages are unmapped."""
        prefill = self.asking.prefill
        await prefill.probe("copied")
        asking = asyncio.create_task(self.asking.ask(length, streamed=self.arm.streamed))
        while not self._is_mapped() and not asking.done():
            await asyncio.sleep(LOOK_SECONDS)
        unmapped = await self._unmapped(asking)
        first_token = await asking
        computed = float((await prefill.probe("times"))["computed"])
        found = await prefill.probe("copied")
        freed, copied = float(found["freed"]), float(found["seconds"])
        if not computed < freed <= unmapped:
            raise AnswerError(
                f"{self.arm.name}: found blocks freed {freed - computed:.3f} s, and pages unmapped "
                f"{unmapped - computed:.3f} s after prefill's last step; expected 0 < first <= second."
            )
        return Occupied(self.arm.name, length, freed - computed, unmapped - computed, copied, first_token - computed)

    def _is_mapped(self) -> bool:
        """Whether more is mapped than when idle, which is the page of vLLM's null block."""
        return (self.watch.mapped_bytes() or 0) > PAGE_GROUP_BYTES

    async def _unmapped(self, asking: asyncio.Task[float]) -> float:
        """Wait until the pages are unmapped; returns that time (monotonic seconds)."""
        deadline = None
        while self._is_mapped():
            if asking.done():
                deadline = deadline or time.monotonic() + SETTLE_SECONDS
                if time.monotonic() > deadline:
                    raise AnswerError(
                        f"{self.arm.name}: found {self.watch.mapped_bytes()} bytes mapped {SETTLE_SECONDS:.0f} s after "
                        f"the answer; expected {PAGE_GROUP_BYTES} at most."
                    )
            await asyncio.sleep(LOOK_SECONDS)
        return time.monotonic()

    async def load(self, requests: int, length: int) -> Loaded:
        """Hand prompts over, ``CLIENTS`` at a time, with late requests to decode; sample the mapped bytes meanwhile."""
        places = asyncio.Semaphore(CLIENTS)

        async def one() -> None:
            async with places:
                await self.asking.ask(length, late_seconds=LATE_SECONDS)

        begun, area, last = time.monotonic(), 0.0, time.monotonic()
        asking = asyncio.gather(*(one() for _ in range(requests)))
        while not asking.done():
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            area, last = area + (self.watch.mapped_bytes() or 0) * (now - last), now
        await asking
        return Loaded(self.arm.name, requests, last - begun, area / (last - begun), self.watch.limit_bytes)
