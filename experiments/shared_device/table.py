# SPDX-License-Identifier: Apache-2.0
"""A whole run; the arms of the table, one after another, with the same requests at the same times."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.common.report import Narrator, Verdict, begin, conclude, last_name, write_json
from experiments.shared_device import report
from experiments.shared_device.__main__ import PARTS
from experiments.shared_device.arms import ARMS, PULL, STATIC
from experiments.shared_device.clients import Swell, arrivals, merged
from experiments.shared_device.measure import TIMES_CAPACITY, Ran, overload, run_arm
from experiments.shared_device.reference import Asked, reference_of

RESULTS = Path(__file__).resolve().parent / "results"
SECONDS, QUICK_SECONDS = 36.0, 18.0
SWELLS = {"a": Swell(0.2, 2.4, 18.0), "b": Swell(0.2, 2.4, 18.0, phase=0.5)}
QUICK_ARMS = (STATIC, PULL)


def measure(asked: Mapping[str, Asked], options: argparse.Namespace, logs: Path, narrator: Narrator) -> Iterator[Ran]:
    """Run all arms that are asked for in turn, and yield each run when it has ended."""
    seconds = QUICK_SECONDS if options.quick else SECONDS
    load = merged(
        *(arrivals(name, swell, seconds, len(asked[name].prompts), options.seed) for name, swell in SWELLS.items())
    )
    narrator.say(f"{len(load)} requests in {seconds:.0f} s")
    for arm in QUICK_ARMS if options.quick and not options.arm else ARMS:
        if options.arm in arm.name:
            ran = run_arm(arm, asked, load, seconds, logs, narrator.update)
            goodput = report.figures_of(ran.received, seconds).goodput
            narrator.say(f"{arm.name}: {ran.not_run or f'{goodput:.2f} requests a second'}")
            yield ran


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    began, stamp = begin(options.vllm)
    logs = RESULTS / stamp
    logs.mkdir(parents=True)
    name = stamp if options.quick or options.part or options.arm else last_name(options.vllm)
    path = RESULTS / f"{name}.json"
    chosen = [options.part] if options.part else PARTS
    found: dict[str, list[Any]] = {"overload": [], "runs": []}

    def content() -> dict[str, Any]:
        return {"began": began, "seed": options.seed, **{part: [*map(asdict, some)] for part, some in found.items()}}

    verdicts: list[Verdict] = []
    tables = []
    with Narrator(f"two models on one device, vLLM {options.vllm}") as narrator:
        asked = reference_of(logs, narrator.update)
        if "overload" in chosen:
            capacity, found["overload"] = overload(asked, options.seed, logs, narrator, quick=options.quick)
            title = f"{TIMES_CAPACITY:g} x as many requests as decode can answer, which is {capacity:.2f} a second"
            tables += report.tables_of(found["overload"], title)
            verdicts += report.judge_overload(found["overload"])
        if "table" in chosen:
            runs = found["runs"]
            for ran in measure(asked, options, logs, narrator):
                runs.append(ran)
                # At once: a run takes a quarter of an hour.
                write_json(path, content())
            tables += report.tables_of(runs, "two models on one device")
            verdicts += report.judge(runs)
            report.plot(runs, f"memory of one device over time, vLLM {options.vllm}", RESULTS / f"{name}.png")
    return conclude(tables, verdicts, path, content())
