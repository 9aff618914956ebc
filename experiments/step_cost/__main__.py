# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/step_cost/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.command_line import add_quick, make_parser, run_main
from experiments.common.targets import Verdict

if TYPE_CHECKING:
    from rich.table import Table

    from experiments.bench.samples import Samples
    from experiments.common.report import Narrator

RESULTS = Path(__file__).resolve().parent / "results"
WAITING = (0, 100, 1_000, 10_000)

DESCRIPTION = """\
What do waiting hand-overs cost a step of the engine, and an idle engine? Three arms:

schedule   vLLM's own scheduler, stepped as EngineCore.step does it (schedule(), which includes the connector's
           metadata, and update_from_output(); no model, no workers), with 32 running and 0 to 10,000 waiting requests:
           decode requests whose KV never arrives, or prefill requests that are kept for a decode that never comes.
           Without a connector, with the stock one, and with this package. Times are CPU milliseconds of the engine's
           thread, so other load on the machine does not count.
hand-over  This package alone: both halves of an engine over the in-memory transport, both transfer modes. Measured:
           an ordinary step on the engine's thread, with the Step pickled as vLLM's multiprocess executor does it; a
           turn of the transfer thread; the arrival of a request; a turn that sends heartbeats; a turn that reads some.
idle       Real servers: one alone, one with two data-parallel ranks, one with the connector below MultiConnector. Their
           hand-overs wait, have another request queued behind them, are kept for decode, or are paused. Measured: CPU
           seconds per second of all their processes."""

EPILOG = """\
targets (medians; the 99th percentile is shown, too):
  schedule: for each number of waiting requests, a step with this package takes at most 1.25 times a step with the stock
    connector, plus 0.2 ms
  hand-over: with 10,000 waiting, on either side and with either transfer mode: a step < 1 ms, an idle turn < 0.1 ms; no
    heartbeat message larger than 4,096 bytes
  idle: each state costs less than 0.05 CPU seconds per second more than the same server without requests

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: tables; results/last-VERSION.json (hand-over), last-VERSION-schedule.json and last-VERSION-idle.json with
versions and hardware; results/last-VERSION.png."""

ARMS = ("schedule", "hand-over", "idle")


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_quick(parser, "fewer repetitions")
    parser.add_argument(
        "--arm",
        action="append",
        choices=ARMS,
        metavar="ARM",
        help=f"one of {', '.join(ARMS)}; repeatable; all arms by default",
    )
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.common.report import Narrator, conclude, last_name

    # Each request that is aborted logs a warning.
    logging.disable(logging.WARNING)
    status = 0
    with Narrator("what waiting hand-overs cost an engine") as narrator:
        for arm in options.arm or ARMS:
            name = last_name(options.vllm + ("" if arm == "hand-over" else f"-{arm}"), quick=options.quick)
            samples, verdicts, table = MEASURES[arm](options, narrator, RESULTS / f"{name}.png")
            content = {"costs": samples.as_json()}
            status = max(status, conclude([table], verdicts, RESULTS / f"{name}.json", content))
    return status


Measured = tuple["Samples", list[Verdict], "Table"]


def _schedule(options: argparse.Namespace, narrator: Narrator, _: Path) -> Measured:
    from experiments.bench.samples import Samples
    from experiments.step_cost.report import SCHEDULE_COLUMNS, SCHEDULE_FORMS, judge_schedule
    from experiments.step_cost.schedule_cost import measure_schedule

    repetitions, samples = (40 if options.quick else 300), Samples(SCHEDULE_FORMS)
    for waiting in WAITING:
        measure_schedule(samples, waiting, repetitions, narrator.say)
    title = f"vLLM's own scheduler with waiting requests, {repetitions} steps each, milliseconds of its thread"
    return samples, judge_schedule(samples), samples.table(title, SCHEDULE_COLUMNS)


def _hand_over(options: argparse.Namespace, narrator: Narrator, path: Path) -> Measured:
    from experiments.bench.samples import Samples
    from experiments.step_cost.measure import measure
    from experiments.step_cost.report import HAND_OVER_COLUMNS, HAND_OVER_FORMS, judge, plot

    repetitions, samples = (200 if options.quick else 3_000), Samples(HAND_OVER_FORMS)
    for waiting in WAITING:
        measure(samples, waiting, repetitions, narrator.say)
    plot(samples, "what waiting hand-overs cost", path)
    title = f"waiting hand-overs, this package alone, {repetitions:,} of each, milliseconds"
    return samples, judge(samples), samples.table(title, HAND_OVER_COLUMNS)


def _idle(options: argparse.Namespace, narrator: Narrator, _: Path) -> Measured:
    from experiments.bench.samples import Samples
    from experiments.step_cost.idle import IDLE_COLUMNS, judge_idle, measure_idle

    seconds, samples = (3.0 if options.quick else 8.0), Samples(("{}",))
    with tempfile.TemporaryDirectory(prefix="step_cost-") as logs:
        measure_idle(samples, seconds, Path(logs), narrator.say)
    title = f"CPU seconds per second, over {seconds:g} s, of servers with nothing to compute"
    return samples, judge_idle(samples), samples.table(title, IDLE_COLUMNS)


MEASURES: Mapping[str, Callable[[argparse.Namespace, Narrator, Path], Measured]] = {
    "schedule": _schedule,
    "hand-over": _hand_over,
    "idle": _idle,
}


if __name__ == "__main__":
    run_main(main, parse())
