# SPDX-License-Identifier: Apache-2.0
"""The arms of the table, one after another, with the same requests at the same times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from experiments.common.model import make_model
from experiments.common.report import Narrator
from experiments.shared_device.arms import ARMS, MODELS, PULL, STATIC
from experiments.shared_device.figures import figures_of
from experiments.shared_device.load import Swell, arrivals, merged
from experiments.shared_device.measure import Ran, run_arm
from experiments.shared_device.reference import Asked

SECONDS, QUICK_SECONDS = 36.0, 18.0
SWELLS = {"a": Swell(0.2, 1.6, 18.0), "b": Swell(0.2, 1.6, 18.0, phase=0.5)}
QUICK_ARMS = (STATIC, PULL)


def model_folders() -> dict[str, Path]:
    """Return the folder of each model; makes those that do not exist."""
    return {name: make_model(shape) for name, shape in MODELS.items()}


def measure(
    folders: Mapping[str, Path],
    asked: Mapping[str, Asked],
    seed: int,
    logs: Path,
    narrator: Narrator,
    *,
    quick: bool,
    word: str,
) -> Iterator[Ran]:
    """Run all arms whose names contain ``word``, and yield each when it has ended."""
    seconds = QUICK_SECONDS if quick else SECONDS
    load = merged(*(arrivals(name, swell, seconds, len(asked[name].prompts), seed) for name, swell in SWELLS.items()))
    narrator.say(f"{len(load)} requests in {seconds:.0f} s")
    for arm in QUICK_ARMS if quick else ARMS:
        if word not in arm.name:
            continue
        ran = run_arm(arm, folders, asked, load, seconds, logs, narrator.update)
        said = ran.not_run or f"{figures_of(ran.received, seconds).goodput:.2f} requests a second"
        narrator.say(f"{arm.name}: {said}")
        yield ran
