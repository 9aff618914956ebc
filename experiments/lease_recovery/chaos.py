# SPDX-License-Identifier: Apache-2.0
"""Inflicts faults on a serving pair, one kind after the other, and times the recovery from each.

Clients keep sending requests while a fault is inflicted and until a request is answered correctly again. Then they
pause, and both sides must free all memory of requests.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from experiments.common.servers import Running
from experiments.lease_recovery.arms import HEARTBEAT_SECONDS, LEASE_SECONDS
from experiments.lease_recovery.faults import SHORTER, Faults, Recovery, Told
from experiments.lease_recovery.readings import GIVE_UP_SECONDS, IdleMemory, leases_ended
from experiments.lease_recovery.traffic import HANG_SECONDS, LOOK_SECONDS, Ended, Traffic

CLIENTS = 4


class Chaos:
    """See the module.

    Args:
        running: the pair, P and D.
        is_operated: whether an operator also pauses them, resets their caches and changes their weights.
        is_short: instead of that, memory comes and goes, and servers are shut down.
        seed: seed of all random choices.
    """

    def __init__(
        self,
        running: Running,
        traffic: Traffic,
        say: Callable[[str], None],
        *,
        is_operated: bool,
        is_short: bool = False,
        seed: int = 11,
    ) -> None:
        self.running = running
        self.traffic = traffic
        self.say = say
        self.draw = random.Random(seed)
        self.recoveries: list[Recovery] = []
        self._idle = IdleMemory(running)
        self._faults = Faults(
            running,
            traffic,
            self._idle,
            self.draw,
            is_operated=is_operated,
            is_short=is_short,
            recovered=self.recoveries.append,
        )

    @property
    def told(self) -> list[Told]:
        """The requests of the operator so far."""
        return self._faults.told

    async def run(self, rounds: int, least_requests: int) -> None:
        """Inflict every fault ``rounds`` times in random order; end after at least ``least_requests`` requests."""
        # One request before the idle level is read: the first page stays mapped once used, for vLLM's null block.
        await self.traffic.one()
        await asyncio.sleep(GIVE_UP_SECONDS)
        await self._idle.note()
        async with self.traffic.clients(CLIENTS):
            for turn in range(rounds):
                kinds = list(self._faults.kinds().items())
                self.draw.shuffle(kinds)
                for name, inflict in kinds:
                    self.say(f"round {turn + 1} of {rounds}: {name}; so far {_said(self.traffic)}")
                    await self._one(name, inflict)
            self.traffic.fault = "none"
            self.traffic.asking.set()
            while len(self.traffic.ended) < least_requests:
                self.say(f"no fault; so far {_said(self.traffic)}")
                await asyncio.sleep(LOOK_SECONDS)

    async def _one(self, name: str, inflict: Callable[[], Awaitable[None]]) -> None:
        traffic = self.traffic
        traffic.fault = name
        prefill = self.running.servers[0]
        if name.endswith(SHORTER):
            # Wait until leases of earlier, aborted requests have ended, so that they are not counted here. Staged ones
            # have slots of a slab and no blocks, so waiting for blocks is not enough.
            await asyncio.sleep(LEASE_SECONDS + 2 * HEARTBEAT_SECONDS)
            # An engine updates its metrics only when it steps.
            await traffic.one()
        ended = await leases_ended(prefill)
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
        memory = await self._idle.seconds_until()
        same = prefill is self.running.servers[0]
        self.recoveries.append(
            Recovery(
                fault=name,
                lasted_seconds=over - began,
                right_seconds=None if right is None else right.ended_seconds - over,
                memory_seconds=memory,
                leases_ended=await leases_ended(prefill) - ended if same else None,
            )
        )


def _said(traffic: Traffic) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in traffic.verdicts.most_common()) or "nothing"
