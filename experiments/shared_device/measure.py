# SPDX-License-Identifier: Apache-2.0
"""Runs one arm: starts its servers on one device, offers the load, and counts what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from experiments.common.asking import asks
from experiments.common.servers import Running, ServerError
from experiments.shared_device.arms import Arm
from experiments.shared_device.clients import Outcome, Received, Target, ask, nudge, offered
from experiments.shared_device.counts import Counts, Engines, settled_counts
from experiments.shared_device.load import Arrival
from experiments.shared_device.memory import DeviceWatch, Sample
from experiments.shared_device.models import Device
from experiments.shared_device.reference import Asked
from experiments.stacks.routers import vllm_router

WARM_UP_REQUESTS = 3
ANSWERED_SECONDS = 60.0


@dataclass
class Ran:
    """One arm's run. ``load_seconds``: how long requests were sent; ``samples``: of the device, none where it is
    split. ``not_run``: why it was not; then all else is empty."""

    arm: str
    load_seconds: float = 0.0
    received: list[Received] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    samples: list[Sample] = field(default_factory=list)
    not_run: str = ""


def run_arm(
    arm: Arm,
    device: Device,
    folders: Mapping[str, Path],
    asked: Mapping[str, Asked],
    load: Sequence[Arrival],
    seconds: float,
    logs: Path,
    say: Callable[[str], None],
) -> Ran:
    """Start everything, offer the load, stop everything. An arm whose servers do not serve throughout is not run."""
    device_name = f"shared-{uuid.uuid4().hex[:8]}"
    specs = {model: arm.specs(device, model, folder, device_name) for model, folder in folders.items()}
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
                for model, one in zip(folders, some, strict=True)
            }
            targets = {}
            for model in folders:
                *prefills, last = (servers[model, side] for side in arm.sides())
                url = last.base_url
                if prefills and not arm.asks:
                    url = stack.enter_context(vllm_router(prefills, [last], place / f"{model}-router.log", say))
                targets[model] = Target(url, asked[model].prompts, asked[model].answers)
            say(f"{arm.name}: warming up")
            asyncio.run(_warm_up(targets, load, arm))
            return _measured(arm, device, servers, targets, load, seconds, device_name, say)
    except (ServerError, httpx.HTTPError) as error:
        (logs / f"{arm.tag}-error.txt").write_text(str(error))
        return Ran(arm.name, not_run=_shortened(str(error)) or repr(error))


def _measured(
    arm: Arm,
    device: Device,
    servers: Engines,
    targets: Mapping[str, Target],
    load: Sequence[Arrival],
    seconds: float,
    device_name: str,
    say: Callable[[str], None],
) -> Ran:
    before = settled_counts(device, servers)
    sessions = {f"{model}, {side}": one.process.pid for (model, side), one in servers.items()}
    with DeviceWatch(device, device_name, sessions) as watch:
        received = asyncio.run(offered(load, targets, arm.tag, lambda text: say(f"{arm.name}: {text}")))
    for one in servers.values():
        one.check_alive()
    asyncio.run(nudge(targets))
    counts = settled_counts(device, servers).since(before)
    return Ran(arm.name, seconds, received, counts, watch.samples if arm.is_elastic else [])


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
