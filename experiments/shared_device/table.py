# SPDX-License-Identifier: Apache-2.0
"""A whole run; the arms of a table, one after another, with the same requests at the same times."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.common.report import Narrator, Verdict, begin, conclude, last_name, write_json
from experiments.shared_device import report
from experiments.shared_device.__main__ import PARTS
from experiments.shared_device.arms import ARMS, FULL_ATTENTION, HYBRID_ARMS, PULL, STATIC, WITH_HYBRID, Arm, Device
from experiments.shared_device.clients import Swell, arrivals, merged
from experiments.shared_device.measure import Ran, overload, run_arm
from experiments.shared_device.reference import Asked, reference_of
from experiments.shared_device.report import figures_of

RESULTS = Path(__file__).resolve().parent / "results"
SECONDS, QUICK_SECONDS = 36.0, 18.0
SWELLS = {"a": Swell(0.2, 2.4, 18.0), "b": Swell(0.2, 2.4, 18.0, phase=0.5)}
QUICK_ARMS = (STATIC, PULL)


@dataclass(frozen=True)
class Part:
    """A device and its models, and the arms that share it, in the order of the table. ``title``: what is served."""

    title: str
    device: Device
    arms: Sequence[Arm]


TABLES: Mapping[str, Part] = {
    "table": Part("two models on one device", FULL_ATTENTION, ARMS),
    "hybrid": Part("a hybrid model (a) and another one (b) on one device", WITH_HYBRID, HYBRID_ARMS),
}


def measure(
    part: Part,
    folders: Mapping[str, Path],
    asked: Mapping[str, Asked],
    options: argparse.Namespace,
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


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    began, stamp = begin(options.vllm)
    logs = RESULTS / stamp
    logs.mkdir(parents=True)
    name = stamp if options.quick or options.part or options.arm else last_name(options.vllm)
    path = RESULTS / f"{name}.json"
    chosen = [options.part] if options.part else PARTS
    found: dict[str, list[Any]] = {"overload": [], "runs": [], "hybrid": []}

    def content() -> dict[str, Any]:
        return {"began": began, "seed": options.seed, **{part: [*map(asdict, some)] for part, some in found.items()}}

    verdicts: list[Verdict] = []
    tables = []
    with Narrator(f"two models on one device, vLLM {options.vllm}") as narrator:
        if "overload" in chosen:
            folders = FULL_ATTENTION.make_models()
            asked = reference_of(FULL_ATTENTION, folders, logs, narrator.update)
            found["overload"] = overload(folders, asked, options.seed, logs, narrator, quick=options.quick)
            tables.append(report.table_of_overload(found["overload"]))
            verdicts += report.judge_overload(found["overload"])
        for part, one in TABLES.items():
            if part not in chosen:
                continue
            is_table = part == "table"
            folders, place = one.device.make_models(), logs if is_table else logs / part
            asked = reference_of(one.device, folders, place, narrator.update)
            runs = found["runs" if is_table else part]
            for ran in measure(one, folders, asked, options, place, narrator):
                runs.append(ran)
                # At once: a run takes a quarter of an hour.
                write_json(path, content())
            tables += report.tables_of(runs, one.title)
            verdicts += report.judge(runs, one.device, "" if is_table else f"{part}: ")
            if is_table:
                title = f"memory of one device over time, vLLM {options.vllm}"
                report.plot(runs, one.device, title, RESULTS / f"{name}.png")
    return conclude(tables, verdicts, path, content())
