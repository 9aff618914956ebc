# SPDX-License-Identifier: Apache-2.0
"""Faults in a pair that serves, one kind after the other, and how long each takes to be over.

While a fault is inflicted and until it is over, clients go on asking. Then they pause, and what both sides still hold
has to come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import httpx

from experiments.common.pages import PageWatch
from experiments.common.servers import Running, Server, ServerError
from experiments.lease_recovery.arms import HEARTBEAT_SECONDS, LEASE_SECONDS
from experiments.lease_recovery.traffic import HANG_SECONDS, Ended, Traffic

CLIENTS = 4
PAUSE_SECONDS = 0.1
"""Before a client that had no answer asks again."""
LOOK_SECONDS = 0.05
GIVE_UP_SECONDS = 4 * (LEASE_SECONDS + 2 * HEARTBEAT_SECONDS)
STALE_REQUESTS = 50
_USAGE = re.compile(r"^vllm:(?:gpu|kv)_cache_usage_perc\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Recovery:
    """One fault.

    Attributes:
        lasted_seconds: from its beginning until both servers were there again.
        right_seconds: from then until the first request that began afterwards was answered rightly; None if none was.
        memory_seconds: from the end of the last request until both sides held what they hold at rest; None if they
            did not within GIVE_UP_SECONDS.
    """

    fault: str
    lasted_seconds: float
    right_seconds: float | None
    memory_seconds: float | None


class Held(NamedTuple):
    """What a server holds: a share of its blocks, and bytes that kvcached has mapped."""

    blocks: float
    bytes: int


class Chaos:
    """See the module.

    Args:
        running: the pair, P and D.
        seed: of everything that is drawn.
    """

    def __init__(self, running: Running, traffic: Traffic, say: Callable[[str], None], seed: int = 11) -> None:
        self.running = running
        self.traffic = traffic
        self.say = say
        self.draw = random.Random(seed)
        self.recoveries: list[Recovery] = []
        self._asking = asyncio.Event()
        self._idle: list[Held] = []

    def faults(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Each kind by its name."""
        # A lease outlives a heartbeat that is late by half of it.
        shorter, longer = 0.45 * LEASE_SECONDS, 2 * LEASE_SECONDS
        return {
            "prefill is killed": lambda: self._kill(0),
            "decode is killed": lambda: self._kill(1),
            f"prefill stands still, {shorter:.2f} s": lambda: self._stand_still(0, shorter),
            f"prefill stands still, {longer:.0f} s": lambda: self._stand_still(0, longer),
            f"decode stands still, {shorter:.2f} s": lambda: self._stand_still(1, shorter),
            f"decode stands still, {longer:.0f} s": lambda: self._stand_still(1, longer),
            "clients go away": self._clients_go_away,
            "clients go away while they wait": self._clients_of_a_burst_go_away,
            "stale parameters": self._stale,
        }

    async def run(self, rounds: int, least_requests: int) -> None:
        """Every fault ``rounds`` times in an order that is drawn, and at least so many requests in all."""
        # A pool's first page stays mapped once it was used, and its null block counts as used.
        await self.traffic.one()
        await asyncio.sleep(GIVE_UP_SECONDS)
        self._idle = await self._held()
        async with self._clients():
            for turn in range(rounds):
                kinds = list(self.faults().items())
                self.draw.shuffle(kinds)
                for name, inflict in kinds:
                    self.say(f"round {turn + 1} of {rounds}: {name}; so far {_said(self.traffic)}")
                    await self._one(name, inflict)
            self.traffic.fault = "none"
            self._asking.set()
            while len(self.traffic.ended) < least_requests:
                self.say(f"no fault; so far {_said(self.traffic)}")
                await asyncio.sleep(LOOK_SECONDS)

    async def _one(self, name: str, inflict: Callable[[], Awaitable[None]]) -> None:
        traffic = self.traffic
        traffic.fault = name
        self._asking.set()
        await asyncio.sleep(self.draw.uniform(0.2, 2.0))
        began = time.monotonic()
        await inflict()
        over = time.monotonic()

        def first_right() -> Ended | None:
            return next((one for one in traffic.ended if one.began_seconds >= over and one.verdict == "right"), None)

        while (right := first_right()) is None and time.monotonic() - over < HANG_SECONDS:
            await asyncio.sleep(LOOK_SECONDS)
        self._asking.clear()
        while self._under_way:
            await asyncio.sleep(LOOK_SECONDS)
        memory = await self._memory_seconds()
        self.recoveries.append(
            Recovery(name, over - began, None if right is None else right.ended_seconds - over, memory)
        )

    @contextlib.asynccontextmanager
    async def _clients(self) -> AsyncIterator[None]:
        self._under_way = 0

        async def client() -> None:
            while True:
                await self._asking.wait()
                self._under_way += 1
                try:
                    ended = await self.traffic.one()
                finally:
                    self._under_way -= 1
                if ended.verdict != "right":
                    await asyncio.sleep(PAUSE_SECONDS)

        tasks = [asyncio.create_task(client()) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _memory_seconds(self) -> float | None:
        """How long both sides take to hold no block of a request, and no page beyond what they hold at rest."""
        began = time.monotonic()
        while time.monotonic() - began < GIVE_UP_SECONDS:
            held = await self._held()
            if all(
                now.blocks <= idle.blocks and now.bytes <= idle.bytes
                for now, idle in zip(held, self._idle, strict=True)
            ):
                return time.monotonic() - began
            await asyncio.sleep(LOOK_SECONDS)
        return None

    async def _held(self) -> list[Held]:
        async with httpx.AsyncClient(timeout=HANG_SECONDS) as http:
            return [Held(await _usage(http, server), mapped_bytes(server)) for server in self.running.servers]

    # ------------------------------------------------------------------------------------------------------ the faults

    async def _kill(self, side: int) -> None:
        self.running.servers[side].kill()
        self.running.replace(side)
        await asyncio.to_thread(self.running.ready)

    async def _stand_still(self, side: int, seconds: float) -> None:
        server = self.running.servers[side]
        server.stand_still()
        try:
            await asyncio.sleep(seconds)
        finally:
            server.go_on()

    async def _clients_go_away(self) -> None:
        for _ in range(10):
            await asyncio.gather(*(self.traffic.one(self.draw.uniform(0.02, 0.6)) for _ in range(2)))

    async def _clients_of_a_burst_go_away(self) -> None:
        """More than decode has room for: some wait, and of those, half do not wait long."""
        await asyncio.gather(*(self.traffic.one(self.draw.uniform(0.3, 2.0) if n % 2 else None) for n in range(20)))

    async def _stale(self) -> None:
        await self.traffic.stale(STALE_REQUESTS, LEASE_SECONDS + 2 * HEARTBEAT_SECONDS)


def mapped_bytes(server: Server) -> int:
    """What kvcached has mapped for a server; 0 where there is no kvcached."""
    return PageWatch(server.identity).mapped_bytes() or 0


async def _usage(http: httpx.AsyncClient, server: Server) -> float:
    """The share of a server's blocks that is in use."""
    found = _USAGE.findall((await http.get(f"{server.base_url}/metrics")).text)
    if not found:
        raise ServerError(f"{server.spec.name} has no metric of its blocks in use")
    return max(map(float, found))


def _said(traffic: Traffic) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in traffic.verdicts.most_common()) or "nothing"
