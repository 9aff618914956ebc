# SPDX-License-Identifier: Apache-2.0
"""Twice as many requests as decode can answer: decode asks prefill where it has room, or a router asks always."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from experiments.common.asking import asking
from experiments.common.report import Narrator
from experiments.common.transfer_config import with_extra
from experiments.shared_device.arms import PULL
from experiments.shared_device.clients import Outcome, Received, Target, ask, nudge, offered
from experiments.shared_device.counts import Counts, Engines, settled_counts
from experiments.shared_device.load import Arrival, Swell, arrivals
from experiments.shared_device.models import FULL_ATTENTION
from experiments.shared_device.reference import Asked
from experiments.stacks.routers import vllm_router

MODEL = "a"
DECODE_TOKENS = 3072
"""What decode can hold: about three requests."""
TIMES_CAPACITY = 2.0
CLOSED_LOOP_CLIENTS = 6
CAPACITY_SECONDS, LOAD_SECONDS, ROUNDS = 30.0, 45.0, 2
QUICK_CAPACITY_SECONDS, QUICK_LOAD_SECONDS, QUICK_ROUNDS = 15.0, 20.0, 1
ASKS, BEHIND = "decode asks", "behind vllm-router"
WAYS = (ASKS, BEHIND)


@dataclass
class Overloaded:
    """One run at a multiple of decode's capacity. ``capacity`` in requests a second."""

    way: str
    capacity: float
    load_seconds: float
    received: list[Received] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


def measure(
    folders: Mapping[str, Path],
    asked: Mapping[str, Asked],
    seed: int,
    logs: Path,
    narrator: Narrator,
    *,
    quick: bool,
) -> list[Overloaded]:
    """Start a pair, and a router before it, measure the capacity, then overload it in each way in turn."""
    prefill, decode = PULL.specs(FULL_ATTENTION, MODEL, folders[MODEL], f"overload-{uuid.uuid4().hex[:8]}")
    blocks = DECODE_TOKENS // FULL_ATTENTION.models[MODEL].block_size
    # The same servers serve both ways.
    assert decode.kv_transfer is not None
    decode = dataclasses.replace(
        decode,
        arguments=("--num-gpu-blocks-override", str(blocks)),
        kv_transfer=with_extra(decode.kv_transfer, {"accept_kv_transfer_params": True}),
    )
    seconds, rounds = (QUICK_LOAD_SECONDS, QUICK_ROUNDS) if quick else (LOAD_SECONDS, ROUNDS)
    with contextlib.ExitStack() as stack:
        place = logs / "overload"
        launched, server = stack.enter_context(asking([prefill], decode, place))
        engines = {(MODEL, "prefill"): launched.servers[0], (MODEL, "decode"): server}
        router = stack.enter_context(vllm_router(launched.servers, [server], place / "router.log", narrator.update))
        prompts, answers = asked[MODEL].prompts, asked[MODEL].answers
        targets = {ASKS: Target(server.base_url, prompts, answers), BEHIND: Target(router, prompts, answers)}
        capacity = asyncio.run(_capacity(targets[BEHIND], QUICK_CAPACITY_SECONDS if quick else CAPACITY_SECONDS))
        narrator.say(f"overload: decode answers {capacity:.2f} requests a second")
        found = []
        for number in range(rounds):
            rate = Swell(TIMES_CAPACITY * capacity, TIMES_CAPACITY * capacity)
            load = arrivals(MODEL, rate, seconds, len(asked[MODEL].prompts), seed + number)
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                name = f"overload, {way}, {number + 1} of {rounds}"
                found.append(_overloaded(way, capacity, targets[way], load, seconds, engines, name, narrator))
    return found


async def _capacity(target: Target, seconds: float) -> float:
    """Return how many requests a second are answered with as many in flight as keep decode full (closed loop)."""
    load = iter(arrivals(MODEL, Swell(50.0, 50.0), 60.0, len(target.prompts), 0))
    numbers = itertools.count()
    ended: list[float] = []
    async with httpx.AsyncClient(timeout=None, trust_env=False) as http:

        async def client() -> None:
            while time.monotonic() < until:
                one = dataclasses.replace(next(load), at_seconds=0.0)
                found = await ask(http, target, one, f"capacity-{next(numbers)}")
                if found.outcome is Outcome.RIGHT:
                    ended.append(time.monotonic())

        # The first ones find nobody before them.
        until = time.monotonic() + 1.5 * seconds
        begun = time.monotonic() + 0.5 * seconds
        await asyncio.gather(*(client() for _ in range(CLOSED_LOOP_CLIENTS)))
        return sum(begun <= at < until for at in ended) / seconds


def _overloaded(
    way: str,
    capacity: float,
    target: Target,
    load: Sequence[Arrival],
    seconds: float,
    engines: Engines,
    name: str,
    narrator: Narrator,
) -> Overloaded:
    before = settled_counts(FULL_ATTENTION, engines)
    received = asyncio.run(offered(load, {MODEL: target}, name, lambda text: narrator.update(f"{name}: {text}")))
    for one in engines.values():
        one.check_alive()
    asyncio.run(nudge({MODEL: target}))
    counts = settled_counts(FULL_ATTENTION, engines).since(before)
    return Overloaded(way, capacity, seconds, received, counts)
