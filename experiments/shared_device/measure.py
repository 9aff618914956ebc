# SPDX-License-Identifier: Apache-2.0
"""Runs one arm of a table; and a pair with twice as many requests as decode can answer, where decode asks prefill if it
has room, or a router asks always. Counts what servers have computed and moved, and watches the memory of the device."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from hostvmm.device import NAME_VARIABLE, SIZE_VARIABLE, device_info

from experiments.common.counted import Sampler, count, settled
from experiments.common.device import with_extra
from experiments.common.report import Run
from experiments.common.servers import Asking, Running, Server, ServerError, tag_of
from experiments.shared_device.arms import BLOCK_SIZE, DEVICE_GIB, KV_BYTES_PER_TOKEN, MODELS, PULL, Arm
from experiments.shared_device.clients import Arrival, Outcome, Received, Swell, Target, arrivals, ask, nudge, offered
from experiments.stacks.routers import vllm_router

Engines = Mapping[tuple[str, str], Server]
"""By model and side."""
Counts = Mapping[str, float]
"""Since the servers' start, or between two looks.

prefilled: tokens of prompts that prefill servers have computed; moved: tokens whose KV decode has received; preempted:
requests that lost their blocks at any server and were computed again; revoked: offers that prefill took back.
"""
SAMPLE_SECONDS = 0.25


@dataclass
class Ran:
    """One arm's run, or all runs of one way.

    Attributes:
        load_seconds: how long requests were sent.
        samples: seconds since the begin, and the bytes of the device that each engine has; none where it is split.
        not_run: why it was not; then all else is empty.
    """

    arm: str
    load_seconds: float = 0.0
    received: list[Received] = field(default_factory=list)
    counts: Counts = field(default_factory=dict)
    samples: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    not_run: str = ""

    @property
    def wasted_share(self) -> float | None:
        """Share of prefilled tokens whose KV no decode has received; None if nothing was prefilled."""
        prefilled = self.counts.get("prefilled", 0.0)
        return max(0.0, 1 - self.counts["moved"] / prefilled) if prefilled > 0 else None


def read_counts(engines: Engines) -> Counts:
    servers = list(engines.values())
    prefills = [one for (_, side), one in engines.items() if side == "prefill"]
    return {
        "prefilled": count(prefills, "vllm:prompt_tokens_total"),
        "moved": count(servers, "vllm:nixl_bytes_transferred_sum") / KV_BYTES_PER_TOKEN,
        "preempted": count(servers, "vllm:num_preemptions_total"),
        "revoked": count(servers, "kvcached_nixl:revoked_offers_total"),
    }


class DeviceWatch(Sampler):
    """Samples the emulated device ``name`` during a ``with`` block. ``sessions``: those of the engines (process ids of
    their leaders), by the engine's name."""

    def __init__(self, name: str, sessions: Mapping[str, int]) -> None:
        super().__init__(f"memory of {name}", SAMPLE_SECONDS)
        self._environment = {NAME_VARIABLE: name, SIZE_VARIABLE: str(DEVICE_GIB)}
        self._names = {session: name for name, session in sessions.items()}
        self._begun_seconds = time.monotonic()
        self.samples: list[tuple[float, dict[str, int]]] = []

    def sample(self) -> None:
        used = dict.fromkeys(self._names.values(), 0)
        for process in device_info(environment=self._environment).processes:
            with contextlib.suppress(ProcessLookupError, KeyError):
                used[self._names[os.getsid(process.pid)]] += process.created_bytes
        self.samples.append((time.monotonic() - self._begun_seconds, used))


def offered_and_counted(
    engines: Engines, targets: Mapping[str, Target], load: Sequence[Arrival], salt: str, say: Callable[[str], None]
) -> tuple[list[Received], Counts]:
    """Offer the load; return what came of it, and what the servers have counted meanwhile."""
    before = settled(lambda: read_counts(engines))
    received = asyncio.run(offered(load, targets, salt, say))
    for one in engines.values():
        one.check_alive()
    asyncio.run(nudge(targets))
    after = settled(lambda: read_counts(engines))
    return received, {name: after[name] - before[name] for name in after}


# ------------------------------------------------------------------------------------------------------------- overload


MODEL = "a"
DECODE_TOKENS = 3072
"""What decode can hold: about three requests."""
TIMES_CAPACITY = 2.0
CLOSED_LOOP_CLIENTS = 6
FULL, QUICK = (30.0, 45.0, 2), (15.0, 20.0, 1)
"""Seconds of measuring the capacity, seconds of a load, and rounds."""
ASKS, BEHIND = WAYS = ("decode asks", "behind vllm-router")


def overload(asked: Mapping[str, Target], seed: int, run: Run) -> tuple[float, list[Ran]]:
    """Start a pair, and a router before it, measure the capacity, then overload it in each way in turn.

    Returns: the requests a second that decode can answer, and what came of those in each way.
    """
    prefill, decode = PULL.specs(MODEL, f"overload-{uuid.uuid4().hex[:8]}")
    # The same servers serve both ways.
    assert decode.kv_transfer is not None
    decode = dataclasses.replace(
        decode,
        arguments=("--num-gpu-blocks-override", str(DECODE_TOKENS // BLOCK_SIZE)),
        kv_transfer=with_extra(decode.kv_transfer, {"accept_kv_transfer_params": True}),
    )
    capacity_seconds, seconds, rounds = QUICK if run.quick else FULL
    place = run.logs / "overload"
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(Asking([prefill, decode], place, run.update)).ready()
        engines = {(MODEL, side): one for side, one in zip(("prefill", "decode"), pair, strict=True)}
        router = stack.enter_context(vllm_router(pair[:1], pair[1:], place / "router.log", run.update))
        urls = {ASKS: pair[1].base_url, BEHIND: router}
        targets = {way: dataclasses.replace(asked[MODEL], url=url) for way, url in urls.items()}
        capacity = asyncio.run(_capacity(targets[BEHIND], capacity_seconds))
        run.say(f"overload: decode answers {capacity:.2f} requests a second")
        found = {way: Ran(way, rounds * seconds) for way in WAYS}
        rate = Swell(TIMES_CAPACITY * capacity, TIMES_CAPACITY * capacity)
        for number in range(rounds):
            load = arrivals(MODEL, rate, seconds, len(asked[MODEL].prompts), seed + number)
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                name, ran = f"overload, {way}, {number + 1} of {rounds}", found[way]
                received, counts = offered_and_counted(engines, {MODEL: targets[way]}, load, name, run.update)
                ran.received += received
                ran.counts = {one: value + ran.counts.get(one, 0.0) for one, value in counts.items()}
        return capacity, list(found.values())


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


# ---------------------------------------------------------------------------------------------------- an arm of a table


WARM_UP_REQUESTS = 3
ANSWERED_SECONDS = 60.0


def run_arm(arm: Arm, asked: Mapping[str, Target], load: Sequence[Arrival], seconds: float, run: Run) -> Ran:
    """Start everything, offer the load, stop everything. An arm whose servers do not serve throughout is not run."""
    device_name, tag = f"shared-{uuid.uuid4().hex[:8]}", tag_of(arm.name)

    def wait(text: str) -> None:
        run.update(f"{arm.name}: {text}")

    try:
        with contextlib.ExitStack() as stack:
            engines, urls = _started(stack, arm, device_name, run.logs / tag, wait)
            targets = {model: dataclasses.replace(asked[model], url=url) for model, url in urls.items()}
            wait("warming up")
            asyncio.run(_warm_up(targets, tag))
            sessions = {f"{model}, {side}": one.process.pid for (model, side), one in engines.items()}
            with DeviceWatch(device_name, sessions) as watch:
                found = offered_and_counted(engines, targets, load, tag, wait)
            return Ran(arm.name, seconds, *found, watch.samples if arm.is_elastic else [])
    except (ServerError, httpx.HTTPError) as error:
        (run.logs / f"{tag}-error.txt").write_text(str(error))
        lines = [line for line in str(error).splitlines() if "Error" in line] or str(error).splitlines()
        return Ran(arm.name, not_run=lines[-1][-300:] if lines else repr(error))


def _started(
    stack: contextlib.ExitStack, arm: Arm, device_name: str, place: Path, say: Callable[[str], None]
) -> tuple[Engines, dict[str, str]]:
    """Start the servers of each model, and a router where decode does not ask. Returns where requests go, too."""
    start = Asking if arm.asks else Running
    launched = [stack.enter_context(start(arm.specs(model, device_name), place, say)) for model in MODELS]
    engines, urls = dict[tuple[str, str], Server](), dict[str, str]()
    for model, running in zip(MODELS, launched, strict=True):
        ready = running.ready()
        engines |= {(model, side): one for side, one in zip(arm.sides, ready, strict=True)}
        urls[model] = ready[-1].base_url
        if len(ready) > 1 and not arm.asks:
            router = vllm_router(ready[:1], ready[1:], place / f"{model}-router.log", say)
            urls[model] = stack.enter_context(router)
    return engines, urls


async def _warm_up(targets: Mapping[str, Target], tag: str) -> None:
    """Make hand-overs that are not measured: they include the handshake and the first steps. Raises ServerError if not
    even one request alone is answered."""
    async with httpx.AsyncClient(timeout=ANSWERED_SECONDS, trust_env=False) as http:
        for number in range(WARM_UP_REQUESTS):
            arrived = {model: Arrival(0.0, model, number, 32) for model in targets}
            names = f"warm-{tag}-{number}"
            calls = (ask(http, target, arrived[model], names) for model, target in targets.items())
            for one in await asyncio.gather(*calls):
                if one.outcome in (Outcome.FAILED, Outcome.NO_END, Outcome.LEFT):
                    raise ServerError(f"found a request alone not answered ({one.outcome.value}): {one.why}")
