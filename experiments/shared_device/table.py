# SPDX-License-Identifier: Apache-2.0
"""The arms of a table, one after another, with the same requests at the same times."""

from __future__ import annotations

from argparse import Namespace as Options
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.common.report import Narrator
from experiments.shared_device.arms import ARMS, HYBRID_ARMS, PULL, STATIC, Arm
from experiments.shared_device.figures import figures_of
from experiments.shared_device.load import Swell, arrivals, merged
from experiments.shared_device.measure import Ran, run_arm
from experiments.shared_device.models import FULL_ATTENTION, WITH_HYBRID, Device
from experiments.shared_device.reference import Asked

SECONDS, QUICK_SECONDS = 36.0, 18.0
SWELLS = {"a": Swell(0.2, 2.4, 18.0), "b": Swell(0.2, 2.4, 18.0, phase=0.5)}
QUICK_ARMS = (STATIC, PULL)


@dataclass(frozen=True)
class Part:
    """A device and its models, and the arms that share it, in the order of the table. ``title``: what is served."""

    title: str
    device: Device
    arms: Sequence[Arm]


PARTS: Mapping[str, Part] = {
    "table": Part("two models on one device", FULL_ATTENTION, ARMS),
    "hybrid": Part("a hybrid model (a) and another one (b) on one device", WITH_HYBRID, HYBRID_ARMS),
}


def measure(
    part: Part,
    folders: Mapping[str, Path],
    asked: Mapping[str, Asked],
    options: Options,
    logs: Path,
    narrator: Narrator,
) -> Iterator[Ran]:
    """Run all arms that are asked for in turn, and yield each run when it has ended."""
    seconds = QUICK_SECONDS if options.quick else SECONDS
    load = merged(
        *(arrivals(name, swell, seconds, len(asked[name].prompts), options.seed) for name, swell in SWELLS.items())
    )
    narrator.say(f"{part.title}: {len(load)} requests in {seconds:.0f} s")
    logs.mkdir(parents=True, exist_ok=True)
    for arm in QUICK_ARMS if options.quick and not options.arm else part.arms:
        if options.arm in arm.name:
            ran = run_arm(arm, part.device, folders, asked, load, seconds, logs, narrator.update)
            said = ran.not_run or f"{figures_of(ran.received, seconds).goodput:.2f} requests a second"
            narrator.say(f"{arm.name}: {said}")
            yield ran
