# SPDX-License-Identifier: Apache-2.0
"""The memory that servers use; and faults of it: limits that change, and a neighbour that takes memory of a server's
device and gives it back.

The neighbour is this process. To an engine it looks like another one with this package: its memory is in the emulated
device's account, and it says what it waits for where engines say it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

from hostvmm.device import device_info, occupy

from experiments.common.counted import samples
from experiments.common.pages import PageWatch, own_names
from experiments.common.servers import Running, Server, ServerError
from experiments.lease_recovery.arms import HEARTBEAT_SECONDS, LEASE_SECONDS
from experiments.lease_recovery.traffic import LOOK_SECONDS
from kvcached_nixl.wants import Want, Wants

GIVE_UP_SECONDS = 4 * (LEASE_SECONDS + 2 * HEARTBEAT_SECONDS)
_USAGE = "vllm:kv_cache_usage_perc"
_LEASES_ENDED = "vllm:nixl_num_kv_expired_reqs_total"
FAULT_SECONDS = 6.0
"""Longer than engines wait before they give way, several times."""
MOST_PAUSE_SECONDS = 0.7


async def change_limits(servers: list[Server], draw: random.Random, seconds: float = FAULT_SECONDS) -> None:
    """Sets each engine's limit to random values, as ``kvctl limit`` does, and back to what it was."""
    from kvcached.cli.utils import get_kv_cache_limit, update_kv_cache_limit

    names = [name for server in servers for name in own_names(server.identity)]
    whole = {name: get_kv_cache_limit(name).total_size for name in names}
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            name = draw.choice(names)
            update_kv_cache_limit(name, max(1, int(whole[name] * draw.choice((0.1, 0.3, 0.6, 1.0)))))
            await asyncio.sleep(draw.uniform(0.0, MOST_PAUSE_SECONDS))
    finally:
        for name in names:
            update_kv_cache_limit(name, whole[name])


async def be_a_neighbour(server: Server, draw: random.Random, seconds: float = FAULT_SECONDS) -> None:
    """Takes most of the free memory of a server's device, or gives it back, and says that it waits for more."""
    environment = {"KVCACHED_HOSTVMM_DEVICE": server.identity}
    until = time.monotonic() + seconds
    with _wants(server) as wants:
        try:
            while time.monotonic() < until:
                occupy(0, environment=environment)
                if draw.random() < 0.7:
                    free_bytes = device_info(environment=environment).free_bytes
                    occupy(max(1, free_bytes - draw.choice((0, 8 << 20, 32 << 20))), environment=environment)
                wants.say(Want(draw.choice((0, 16 << 20, 64 << 20)), draw.random() < 0.5))
                await asyncio.sleep(draw.uniform(0.0, MOST_PAUSE_SECONDS))
        finally:
            occupy(0, environment=environment)


@contextlib.contextmanager
def _wants(server: Server) -> Iterator[Wants]:
    wants = Wants(Path("/tmp"), f"neighbour-of-{server.identity}", f"hostvmm {server.identity}")
    try:
        yield wants
    finally:
        wants.say(Want(0, False))


# ------------------------------------------------------------------------------------------------- what servers say


class IdleMemory:
    """What each server of a pair uses when it is idle: the fraction of its blocks, and kvcached's mapped bytes."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._idle: list[tuple[float, int]] = []

    async def note(self) -> None:
        """Take what the servers use now as their idle level. They must be idle."""
        self._idle = [await _held(server) for server in self._running.servers]

    async def seconds_until(self, *sides: int) -> float | None:
        """Return the seconds until these sides, or both, use no more blocks and pages than when idle; None if that
        takes longer than GIVE_UP_SECONDS."""
        began = time.monotonic()
        while time.monotonic() - began < GIVE_UP_SECONDS:
            held = [(await _held(self._running.servers[side]), self._idle[side]) for side in sides or (0, 1)]
            if all(now[0] <= idle[0] and now[1] <= idle[1] for now, idle in held):
                return time.monotonic() - began
            await asyncio.sleep(LOOK_SECONDS)
        return None


async def _held(server: Server) -> tuple[float, int]:
    return max(await _metric(server, _USAGE)), mapped_bytes(server)


def mapped_bytes(server: Server) -> int:
    """Return the bytes that kvcached has mapped for a server; 0 without kvcached."""
    return PageWatch(server.identity).mapped_bytes() or 0


async def leases_ended(prefill: Server) -> int:
    return round(sum(await _metric(prefill, _LEASES_ENDED)))


async def _metric(server: Server, name: str) -> list[float]:
    """Return the values of a server's metric, one for each of its engines."""
    found = list((await asyncio.to_thread(samples, f"{server.base_url}/metrics", name)).values())
    if not found:
        raise ServerError(
            f"{server.spec.name} has no metric {name}; this vLLM may have renamed it. Recovery cannot be measured."
        )
    return found
