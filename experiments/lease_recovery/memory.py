# SPDX-License-Identifier: Apache-2.0
"""Faults of memory: limits that are changed, and a neighbour on a server's device that takes memory and gives it back.

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

from experiments.common.pages import own_names
from experiments.common.servers import Server
from kvcached_nixl.naming.wants import Want, Wants

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
