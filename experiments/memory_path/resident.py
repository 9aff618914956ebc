# SPDX-License-Identifier: Apache-2.0
"""Measures a server's resident memory besides kvcached's pages, for several reserved sizes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from experiments.common.client import http_client
from experiments.common.servers import Server, running
from experiments.memory_path.arms import BLOCK_BYTES, planned, specs
from experiments.memory_path.asking import Asking
from experiments.push_vs_pull.arms import Arm

PROMPT_TOKENS = 2048
AT_A_TIME = 8
ROUNDS = 2


@dataclass(frozen=True)
class Resident:
    """Memory of one server after it has served.

    Attributes:
        anonymous_bytes: resident memory of all its processes, without kvcached's pages.
        stock_buffer_bytes: size that vLLM's own host buffer would have: a copy of every planned block.
    """

    arm: str
    side: str
    reserved_gib: float
    anonymous_bytes: int
    stock_buffer_bytes: int


def measure(arm: Arm, reserved_gib: float, model: Path, logs: Path, say: Callable[[str], None]) -> list[Resident]:
    """Start a pair, hand over as much at a time as the slab holds, read its memory, stop it."""
    pool = planned(reserved_gib)
    with running(specs(arm, pool, model), logs, say) as servers:
        say(f"{arm.name}, {reserved_gib} GiB reserved: serving")
        asyncio.run(_serve(*servers))
        return [
            Resident(arm.name, side, reserved_gib, anonymous_bytes(server), pool.blocks * BLOCK_BYTES)
            for side, server in zip(("prefill", "decode"), servers, strict=True)
        ]


def anonymous_bytes(server: Server) -> int:
    """Return the anonymous resident memory of all processes of the server's session."""
    total = 0
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == server.process.pid:
                found = process.memory_info()
                total += found.rss - found.shared
        except (psutil.Error, ProcessLookupError):
            # The process has ended meanwhile.
            continue
    return total


async def _serve(prefill: Server, decode: Server) -> None:
    async with http_client(AT_A_TIME) as http:
        asking = Asking(prefill, decode, http)
        for _ in range(ROUNDS):
            await asyncio.gather(*(asking.ask(PROMPT_TOKENS) for _ in range(AT_A_TIME)))
