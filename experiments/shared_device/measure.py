# SPDX-License-Identifier: Apache-2.0
"""Runs one arm of a table; and a pair with twice as many requests as decode can answer, where decode asks prefill if it
has room, or a router asks always."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from experiments.common.device import with_extra
from experiments.common.report import Narrator
from experiments.common.servers import Asking, Running, ServerError, asks
from experiments.shared_device.arms import BLOCK_SIZE, MODELS, PULL, Arm
from experiments.shared_device.clients import (
    Arrival,
    Asked,
    Outcome,
    Received,
    Swell,
    Target,
    arrivals,
    ask,
    nudge,
    offered,
)
from experiments.shared_device.counts import Counts, DeviceWatch, Engines, Sample, settled_counts
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
class Ran:
    """One arm's run, or all runs of one way. ``load_seconds``: how long requests were sent; ``samples``: of the device,
    none where it is split. ``not_run``: why it was not; then all else is empty."""

    arm: str
    load_seconds: float = 0.0
    received: list[Received] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    samples: list[Sample] = field(default_factory=list)
    not_run: str = ""


def overload(
    asked: Mapping[str, Asked], seed: int, logs: Path, narrator: Narrator, *, quick: bool
) -> tuple[float, list[Ran]]:
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
    seconds, rounds = (QUICK_LOAD_SECONDS, QUICK_ROUNDS) if quick else (LOAD_SECONDS, ROUNDS)
    with contextlib.ExitStack() as stack:
        place = logs / "overload"
        pair = stack.enter_context(Asking([prefill, decode], place, narrator.update)).ready()
        engines = {(MODEL, side): one for side, one in zip(("prefill", "decode"), pair, strict=True)}
        router = stack.enter_context(vllm_router(pair[:1], pair[1:], place / "router.log", narrator.update))
        prompts, answers = asked[MODEL].prompts, asked[MODEL].answers
        targets = {ASKS: Target(pair[1].base_url, prompts, answers), BEHIND: Target(router, prompts, answers)}
        capacity = asyncio.run(_capacity(targets[BEHIND], QUICK_CAPACITY_SECONDS if quick else CAPACITY_SECONDS))
        narrator.say(f"overload: decode answers {capacity:.2f} requests a second")
        found = {way: Ran(way) for way in WAYS}
        for number in range(rounds):
            rate = Swell(TIMES_CAPACITY * capacity, TIMES_CAPACITY * capacity)
            load = arrivals(MODEL, rate, seconds, len(asked[MODEL].prompts), seed + number)
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                name = f"overload, {way}, {number + 1} of {rounds}"
                target = {MODEL: targets[way]}
                received, counts = offered_and_counted(engines, target, load, name, narrator.update)
                found[way].received += received
                found[way].counts = found[way].counts.plus(counts)
                found[way].load_seconds += seconds
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


def run_arm(
    arm: Arm,
    asked: Mapping[str, Asked],
    load: Sequence[Arrival],
    seconds: float,
    logs: Path,
    say: Callable[[str], None],
) -> Ran:
    """Start everything, offer the load, stop everything. An arm whose servers do not serve throughout is not run."""
    device_name = f"shared-{uuid.uuid4().hex[:8]}"
    specs = {model: arm.specs(model, device_name) for model in MODELS}
    place = logs / arm.tag

    def wait(text: str) -> None:
        say(f"{arm.name}: {text}")

    try:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(Running([one for one, *_ in specs.values()], place, wait))
            decodes = [
                asks(decode, [prefill]) if arm.asks else decode
                for (_, *rest), prefill in zip(specs.values(), first.servers, strict=True)
                for decode in rest
            ]
            second = stack.enter_context(Running(decodes, place, wait))
            ready = (first.ready(), second.ready())
            servers = {
                (model, side): one
                for side, some in zip(arm.sides(), ready, strict=False)
                for model, one in zip(MODELS, some, strict=True)
            }
            targets = {}
            for model in MODELS:
                *prefills, last = (servers[model, side] for side in arm.sides())
                url = last.base_url
                if prefills and not arm.asks:
                    url = stack.enter_context(vllm_router(prefills, [last], place / f"{model}-router.log", say))
                targets[model] = Target(url, asked[model].prompts, asked[model].answers)
            say(f"{arm.name}: warming up")
            asyncio.run(_warm_up(targets, load, arm))
            sessions = {f"{model}, {side}": one.process.pid for (model, side), one in servers.items()}
            with DeviceWatch(device_name, sessions) as watch:
                found = offered_and_counted(servers, targets, load, arm.tag, wait)
            return Ran(arm.name, seconds, *found, watch.samples if arm.is_elastic else [])
    except (ServerError, httpx.HTTPError) as error:
        (logs / f"{arm.tag}-error.txt").write_text(str(error))
        return Ran(arm.name, not_run=_shortened(str(error)) or repr(error))


def offered_and_counted(
    engines: Engines, targets: Mapping[str, Target], load: Sequence[Arrival], salt: str, say: Callable[[str], None]
) -> tuple[list[Received], Counts]:
    """Offer the load; return what came of it, and what the servers have counted meanwhile."""
    before = settled_counts(engines)
    received = asyncio.run(offered(load, targets, salt, say))
    for one in engines.values():
        one.check_alive()
    asyncio.run(nudge(targets))
    return received, settled_counts(engines).since(before)


async def _warm_up(targets: Mapping[str, Target], load: Sequence[Arrival], arm: Arm) -> None:
    """Make hand-overs that are not measured: they include the handshake and the first steps.

    Raises:
        ServerError: not even one request alone is answered.
    """
    async with httpx.AsyncClient(timeout=ANSWERED_SECONDS, trust_env=False) as http:
        for number in range(WARM_UP_REQUESTS):
            found = await asyncio.gather(
                *(
                    ask(http, target, Arrival(0.0, model, number, 32), f"warm-{arm.tag}-{number}")
                    for model, target in targets.items()
                )
            )
            for one in found:
                if one.outcome in (Outcome.FAILED, Outcome.NO_END, Outcome.LEFT):
                    raise ServerError(f"found a request alone not answered ({one.outcome.value}): {one.why}")


def _shortened(text: str) -> str:
    lines = [line for line in text.splitlines() if "Error" in line] or text.splitlines()
    return lines[-1][-300:] if lines else ""
