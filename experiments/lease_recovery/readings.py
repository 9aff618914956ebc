# SPDX-License-Identifier: Apache-2.0
"""What servers say of themselves: the memory that they use, and the leases that have ended."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from experiments.common.counted import samples
from experiments.common.pages import PageWatch
from experiments.common.servers import Running, Server, ServerError
from experiments.lease_recovery.arms import HEARTBEAT_SECONDS, LEASE_SECONDS
from experiments.lease_recovery.traffic import LOOK_SECONDS

GIVE_UP_SECONDS = 4 * (LEASE_SECONDS + 2 * HEARTBEAT_SECONDS)
_USAGE = "vllm:kv_cache_usage_perc"
_LEASES_ENDED = "vllm:nixl_num_kv_expired_reqs_total"


class Held(NamedTuple):
    """Memory that a server uses: the fraction of its blocks, and the bytes that kvcached has mapped."""

    blocks: float
    bytes: int


class IdleMemory:
    """The memory that each server of a pair uses when it is idle."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._idle: list[Held] = []

    async def note(self) -> None:
        """Take what the servers use now as their idle level. They must be idle."""
        self._idle = [held for _, held in await self._held()]

    async def seconds_until(self, *sides: int) -> float | None:
        """Return the seconds until these sides, or both, use no more blocks and pages than when idle; None if that
        takes longer than GIVE_UP_SECONDS."""
        began = time.monotonic()
        while time.monotonic() - began < GIVE_UP_SECONDS:
            held = await self._held(*sides)
            if all(now.blocks <= self._idle[side].blocks and now.bytes <= self._idle[side].bytes for side, now in held):
                return time.monotonic() - began
            await asyncio.sleep(LOOK_SECONDS)
        return None

    async def _held(self, *sides: int) -> list[tuple[int, Held]]:
        """Return (side, memory that it uses) for these sides, or both."""
        servers = self._running.servers
        return [
            (side, Held(max(await _metric(servers[side], _USAGE)), mapped_bytes(servers[side])))
            for side in sides or range(len(servers))
        ]


def mapped_bytes(server: Server) -> int:
    """Return the bytes that kvcached has mapped for a server; 0 without kvcached."""
    return PageWatch(server.identity).mapped_bytes() or 0


async def leases_ended(prefill: Server) -> int:
    """Return how many leases of prefill have ended since it started."""
    return round(sum(await _metric(prefill, _LEASES_ENDED)))


async def _metric(server: Server, name: str) -> list[float]:
    """Return the values of a server's metric, one for each of its engines."""
    found = list((await asyncio.to_thread(samples, f"{server.base_url}/metrics", name)).values())
    if not found:
        raise ServerError(
            f"{server.spec.name} has no metric {name}; this vLLM may have renamed it. Recovery cannot be measured."
        )
    return found
