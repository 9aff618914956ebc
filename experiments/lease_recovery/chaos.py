# SPDX-License-Identifier: Apache-2.0
"""Inflicts faults on a serving pair, one kind after the other, and times the recovery from each.

Clients keep sending requests while a fault is inflicted and until a request is answered correctly again. Then they
pause, and both sides must free all memory of requests.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from hostvmm.device import device_info, occupy

from experiments.common.client import Client, http_client
from experiments.common.counted import PageWatch, own_names, samples
from experiments.common.servers import Running, Server, ServerError
from experiments.lease_recovery.arms import (
    FIRST_WEIGHTS,
    HANG_SECONDS,
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
    LOOK_SECONDS,
    OTHER_WEIGHTS,
    Arm,
    Ended,
    Traffic,
)
from kvcached_nixl.wants import Want, Wants

Inflict = Callable[[], Awaitable[object]]
SIDES = ("prefill", "decode")
CLIENTS = 4
STALE_REQUESTS = 50
# A lease must not end when a heartbeat is late by up to half of the lease.
SHORTER_SECONDS, LONGER_SECONDS = 0.45 * LEASE_SECONDS, 2 * LEASE_SECONDS
SHORTER, LONGER = f"{SHORTER_SECONDS:.2f} s", f"{LONGER_SECONDS:.0f} s"
GONE = "prefill is killed and stays away"
MEANWHILE = "decode, while prefill stays away"
FREED_SECONDS = LEASE_SECONDS + 2 * HEARTBEAT_SECONDS
GIVE_UP_SECONDS = 4 * FREED_SECONDS
FAULT_SECONDS = 6.0
"""Longer than engines wait before they give way, several times."""
MOST_PAUSE_SECONDS = 0.7


@dataclass(frozen=True)
class Recovery:
    """One fault.

    Attributes:
        lasted_seconds: from the beginning of the fault until both servers ran again.
        right_seconds: from then until the first request that began later was answered correctly; None if none was.
        memory_seconds: from the end of the last request until both sides were down to their idle memory; None if that
            took longer than GIVE_UP_SECONDS.
        leases_ended: leases of prefill that ended from the beginning until then; None if prefill was replaced.
    """

    fault: str
    lasted_seconds: float
    right_seconds: float | None
    memory_seconds: float | None
    leases_ended: int | None = None


@dataclass(frozen=True)
class Told:
    """A request of an operator to a serving server, and how long it took."""

    what: str
    seconds: float


@dataclass
class Chaos:
    """See the module.

    Attributes:
        running: the pair, P and D.
        arm: of the pair. An operator pauses those over kvcached, resets their caches and changes their weights; for
            stock, answers after a change of weights, or from caches of other weights, would only be wrong.
        told: every request of the operator.
    """

    running: Running
    traffic: Traffic
    arm: Arm
    say: Callable[[str], None]
    draw: random.Random = field(default_factory=lambda: random.Random(11))
    recoveries: list[Recovery] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    _idle: list[tuple[float, int]] = field(default_factory=list)

    async def run(self, rounds: int, least_requests: int) -> None:
        """Inflict every fault ``rounds`` times in random order; end after at least ``least_requests`` requests."""
        # One request before the idle level is read: the first page stays mapped once used, for vLLM's null block.
        await self.traffic.one()
        await asyncio.sleep(GIVE_UP_SECONDS)
        self._idle = [await _held(server) for server in self.running.servers]
        async with self.traffic.clients(CLIENTS):
            for turn in range(rounds):
                kinds = list(self._kinds().items())
                self.draw.shuffle(kinds)
                for name, inflict in kinds:
                    self.say(f"round {turn + 1} of {rounds}: {name}; so far {_said(self.traffic)}")
                    await self._one(name, inflict)
            self.traffic.fault = "none"
            self.traffic.asking.set()
            while len(self.traffic.ended) < least_requests:
                self.say(f"no fault; so far {_said(self.traffic)}")
                await asyncio.sleep(LOOK_SECONDS)

    async def _one(self, name: str, inflict: Inflict) -> None:
        traffic = self.traffic
        traffic.fault = name
        prefill = self.running.servers[0]
        if name.endswith(SHORTER):
            # Wait until leases of earlier, aborted requests have ended, so that they are not counted here. Staged ones
            # have slots of a slab and no blocks, so waiting for blocks is not enough.
            await asyncio.sleep(FREED_SECONDS)
            # An engine updates its metrics only when it steps.
            await traffic.one()
        ended = await _leases_ended(prefill)
        traffic.asking.set()
        await asyncio.sleep(self.draw.uniform(0.2, 2.0))
        began = time.monotonic()
        await inflict()
        over = time.monotonic()

        def first_right() -> Ended | None:
            return next((one for one in traffic.ended if one.began_seconds >= over and one.verdict == "right"), None)

        while (right := first_right()) is None and time.monotonic() - over < HANG_SECONDS:
            await asyncio.sleep(LOOK_SECONDS)
        await traffic.rest()
        memory = await self._seconds_until_idle(0, 1)
        same = prefill is self.running.servers[0]
        right_seconds = None if right is None else right.ended_seconds - over
        leases_ended = await _leases_ended(prefill) - ended if same else None
        self.recoveries.append(Recovery(name, over - began, right_seconds, memory, leases_ended))

    async def _seconds_until_idle(self, *sides: int) -> float | None:
        """Return the seconds until these sides use no more blocks and pages than when idle; None if that takes longer
        than GIVE_UP_SECONDS."""
        began = time.monotonic()
        while time.monotonic() - began < GIVE_UP_SECONDS:
            held = [(await _held(self.running.servers[side]), self._idle[side]) for side in sides]
            if all(now[0] <= idle[0] and now[1] <= idle[1] for now, idle in held):
                return time.monotonic() - began
            await asyncio.sleep(LOOK_SECONDS)
        return None

    # ------------------------------------------------------------------------------------------ faults

    def _kinds(self) -> dict[str, Inflict]:
        if self.arm.is_short:
            return self._shortages()
        kinds: dict[str, Inflict] = {
            "clients go away": self._clients_go_away,
            "clients go away while they wait": self._clients_of_a_burst_go_away,
            "stale parameters": partial(self.traffic.stale, STALE_REQUESTS, FREED_SECONDS),
            GONE: self._prefill_is_gone,
        }
        for side, name in enumerate(SIDES):
            for words, seconds in ((SHORTER, SHORTER_SECONDS), (LONGER, LONGER_SECONDS)):
                kinds[f"{name} stands still, {words}"] = partial(self._stand_still, side, seconds)
            kinds[f"{name} is killed"] = partial(self._replace, side, Server.kill)
            if self.arm.kvcached:
                kinds[f"{name} is paused"] = partial(self._pause, side)
        if self.arm.kvcached:
            kinds["both are paused"] = lambda: self._pause(*self.draw.sample([0, 1], 2))
            kinds |= {"caches are reset": self._reset, "weights change": self._change_weights}
        return kinds

    def _shortages(self) -> dict[str, Inflict]:
        still = f"limits change, prefill stands still, {SHORTER}"
        kinds: dict[str, Inflict] = {
            "limits change": lambda: self._change_limits(*self.running.servers),
            "limits and both neighbours": partial(self._limits_and, self._neighbours, 0, 1),
            still: partial(self._limits_and, self._stand_still, 0, SHORTER_SECONDS),
            "limits change, prefill is paused": partial(self._limits_and, self._pause, 0),
            "clients go away while they wait": self._clients_of_a_burst_go_away,
            "memory changes, prefill is killed": partial(self._limits_and, self._replace, 0, Server.kill),
        }
        for side, name in enumerate(SIDES):
            kinds[f"a neighbour of {name}"] = partial(self._neighbours, side)
            kinds[f"{name} is shut down"] = partial(self._replace, side, Server.shut_down)
        return kinds

    async def _neighbours(self, *sides: int) -> None:
        await asyncio.gather(*(self._be_a_neighbour(self.running.servers[side].identity) for side in sides))

    async def _replace(self, side: int, end: Callable[[Server], None]) -> None:
        """End a server like a machine that fails, or as an orchestrator does; start a new one when it has ended."""
        await asyncio.to_thread(end, self.running.servers[side])
        await asyncio.to_thread(self.running.bring_back, side)

    async def _limits_and(self, inflict: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Inflict another fault while limits change, but not those of a prefill that is killed."""
        servers = self.running.servers[1:] if inflict == self._replace else self.running.servers
        await asyncio.gather(self._change_limits(*servers), inflict(*arguments))

    async def _change_limits(self, *servers: Server) -> None:
        """Set each engine's limit to random values, as ``kvctl limit`` does, and back to what it was."""
        from kvcached.cli.utils import get_kv_cache_limit, update_kv_cache_limit

        names = [name for server in servers for name in own_names(server.identity)]
        whole = {name: get_kv_cache_limit(name).total_size for name in names}
        until = time.monotonic() + FAULT_SECONDS
        try:
            while time.monotonic() < until:
                name = self.draw.choice(names)
                update_kv_cache_limit(name, max(1, int(whole[name] * self.draw.choice((0.1, 0.3, 0.6, 1.0)))))
                await asyncio.sleep(self.draw.uniform(0.0, MOST_PAUSE_SECONDS))
        finally:
            for name in names:
                update_kv_cache_limit(name, whole[name])

    async def _be_a_neighbour(self, device: str) -> None:
        """Take most of the free memory of a server's device, or give it back, and say that more is waited for.

        To an engine this process looks like another one with this package: its memory is in the emulated device's
        account, and it says what it waits for where engines say it.
        """
        environment = {"KVCACHED_HOSTVMM_DEVICE": device}
        wants = Wants(Path("/tmp"), f"neighbour-of-{device}", f"hostvmm {device}")
        until = time.monotonic() + FAULT_SECONDS
        try:
            while time.monotonic() < until:
                occupy(0, environment=environment)
                if self.draw.random() < 0.7:
                    free_bytes = device_info(environment=environment).free_bytes
                    occupy(max(1, free_bytes - self.draw.choice((0, 8 << 20, 32 << 20))), environment=environment)
                wants.say(Want(self.draw.choice((0, 16 << 20, 64 << 20)), self.draw.random() < 0.5))
                await asyncio.sleep(self.draw.uniform(0.0, MOST_PAUSE_SECONDS))
        finally:
            occupy(0, environment=environment)
            wants.say(Want(0, False))

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
        """Send more requests than decode has blocks for: some wait, and half of all clients disconnect soon."""
        await asyncio.gather(*(self.traffic.one(self.draw.uniform(0.3, 2.0) if n % 2 else None) for n in range(20)))

    async def _prefill_is_gone(self) -> None:
        """Kill prefill, and start no new one at its address until decode is down to its idle memory."""
        self.running.servers[0].kill()
        began = time.monotonic()
        memory = await self._seconds_until_idle(1)
        self.recoveries.append(Recovery(MEANWHILE, time.monotonic() - began, 0.0, memory))
        await asyncio.to_thread(self.running.bring_back, 0)

    async def _pause(self, *sides: int) -> None:
        for side in sides:
            mode, clears = self.draw.choice(["keep", "wait", "abort"]), self.draw.choice(["true", "false"])
            await self._tell(side, "pause", mode=mode, clear_cache=clears)
            await asyncio.sleep(self.draw.uniform(0.0, 1.0))
        for side in self.draw.sample(sides, len(sides)):
            await self._tell(side, "resume")

    async def _reset(self) -> None:
        for side in self.draw.choices([0, 1], k=6):
            await self._tell(side, "reset_prefix_cache", reset_running_requests="true")
            await asyncio.sleep(self.draw.uniform(0.0, 0.5))

    async def _change_weights(self) -> None:
        """Change the weights of one side after the other, and back.

        Each side is paused with its cache cleared, as an operator does who wants no answer computed with both weights.
        """
        self.traffic.other_until_seconds = math.inf
        for seed in (OTHER_WEIGHTS, FIRST_WEIGHTS):
            for side in self.draw.sample([0, 1], 2):
                await self._tell(side, "pause", mode=self.draw.choice(["wait", "abort"]), clear_cache="true")
                async with http_client(1) as http:
                    await Client(self.running.servers[side].base_url, http).probe("other_weights", seed)
                await self._tell(side, "resume")
                await asyncio.sleep(self.draw.uniform(0.0, 1.5))
        self.traffic.other_until_seconds = time.monotonic()

    async def _tell(self, side: int, what: str, **query: str) -> None:
        server = self.running.servers[side]
        began = time.monotonic()
        async with httpx.AsyncClient(timeout=HANG_SECONDS) as http:
            reply = await http.post(f"{server.base_url}/{what}", params=query)
        reply.raise_for_status()
        self.told.append(Told(f"{what} {query.get('mode', '')}".strip(), time.monotonic() - began))


def _said(traffic: Traffic) -> str:
    verdicts = Counter(one.verdict for one in traffic.ended)
    return ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()) or "nothing"


async def _held(server: Server) -> tuple[float, int]:
    return max(await _metric(server, "vllm:kv_cache_usage_perc")), mapped_bytes(server)


def mapped_bytes(server: Server) -> int:
    """Return the bytes that kvcached has mapped for a server; 0 without kvcached."""
    return PageWatch(server.identity).mapped_bytes()


async def _leases_ended(prefill: Server) -> int:
    return round(sum(await _metric(prefill, "vllm:nixl_num_kv_expired_reqs_total")))


async def _metric(server: Server, name: str) -> list[float]:
    """Return the values of a server's metric, one for each of its engines."""
    found = list((await asyncio.to_thread(samples, f"{server.base_url}/metrics", name)).values())
    if not found:
        raise ServerError(
            f"{server.spec.name} has no metric {name}; this vLLM may have renamed it. Recovery cannot be measured."
        )
    return found
