# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/step_cost/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.command_line import add_quick, make_parser, run_main
from experiments.common.targets import Verdict

if TYPE_CHECKING:
    from rich.table import Table

    from experiments.common.report import Narrator

RESULTS = Path(__file__).resolve().parent / "results"
WAITING = (0, 100, 1_000, 10_000)
REPETITIONS, QUICK_REPETITIONS = 3_000, 200
SCHEDULE_REPETITIONS, QUICK_SCHEDULE_REPETITIONS = 300, 40

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
IDLE_SECONDS, QUICK_IDLE_SECONDS = 8.0, 3.0


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
            costs, found, table, extra = MEASURES[arm](options, narrator)
            name = last_name(options.vllm + ("" if arm == "hand-over" else f"-{arm}"), quick=options.quick)
            content = {**extra, "costs": [dataclasses.asdict(one) for one in costs]}
            status = max(status, conclude([table], found, RESULTS / f"{name}.json", content))
    return status


Measured = tuple[Sequence[Any], list[Verdict], "Table", dict[str, Any]]


def _schedule(options: argparse.Namespace, narrator: Narrator) -> Measured:
    from experiments.step_cost.report import judge_schedule, table_of_schedule
    from experiments.step_cost.schedule_cost import measure_schedule

    repetitions = QUICK_SCHEDULE_REPETITIONS if options.quick else SCHEDULE_REPETITIONS
    costs = [cost for waiting in WAITING for cost in measure_schedule(waiting, repetitions, narrator.say)]
    costs.sort(key=lambda one: (one.kind, not one.has_room, one.engine, one.mode, one.waiting))
    title = f"vLLM's own scheduler with waiting requests, {repetitions} steps each, milliseconds of its thread"
    return costs, judge_schedule(costs), table_of_schedule(costs, title), {"repetitions": repetitions}


def _hand_over(options: argparse.Namespace, narrator: Narrator) -> Measured:
    from experiments.common.report import last_name
    from experiments.step_cost.measure import measure
    from experiments.step_cost.report import judge, plot, table_of

    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    costs = [cost for waiting in WAITING for cost in measure(waiting, repetitions, narrator.say)]
    costs.sort(key=lambda one: (one.direction, one.side, one.waiting))
    path = RESULTS / f"{last_name(options.vllm, quick=options.quick)}.png"
    plot(costs, "what waiting hand-overs cost", path)
    title = f"waiting hand-overs, this package alone, medians of {repetitions:,}, milliseconds"
    return costs, judge(costs), table_of(costs, title), {"repetitions": repetitions}


def _idle(options: argparse.Namespace, narrator: Narrator) -> Measured:
    from experiments.step_cost.idle import judge_idle, measure_idle
    from experiments.step_cost.report import table_of_idle

    seconds = QUICK_IDLE_SECONDS if options.quick else IDLE_SECONDS
    with tempfile.TemporaryDirectory(prefix="step_cost-") as logs:
        costs = measure_idle(seconds, Path(logs), narrator.say)
    title = f"CPU seconds per second, over {seconds:g} s, of servers with nothing to compute"
    return costs, judge_idle(costs), table_of_idle(costs, title), {"seconds": seconds}


MEASURES: Mapping[str, Callable[[argparse.Namespace, Narrator], Measured]] = {
    "schedule": _schedule,
    "hand-over": _hand_over,
    "idle": _idle,
}


if __name__ == "__main__":
    run_main(main, parse())
