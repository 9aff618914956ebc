# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/step_cost/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from pathlib import Path

from experiments.common.default_vllm import DEFAULT_VLLM
from experiments.common.targets import as_json, exit_status, table_of_targets

RESULTS = Path(__file__).resolve().parent / "results"
WAITING = (0, 100, 1_000, 10_000)
REPETITIONS, QUICK_REPETITIONS = 3_000, 200

DESCRIPTION = """\
What do hand-overs that wait cost a step of the engine, and a turn of the transfer thread?

The real halves of an engine, scheduler and worker, over the in-memory transport, with 0 to 10,000 hand-overs that wait:
decode's requests for KV that does not come, prefill's for a decode that does not (and with push as many registrations
for requests that have not come), in both directions. Timed while nothing of them happens: an ordinary step of 32
running requests on the engine's thread, with the Step pickled as vLLM's multiprocess executor does it, and a turn of
the transfer thread. And what does happen: a request that arrives, a turn that sends beats, a turn that reads some."""

EPILOG = """\
targets (medians; the 99th percentile is shown, too):
  10,000 waiting hand-overs, either side and direction: a step < 1 ms, an idle turn < 0.1 ms
  no beat is larger than 4,096 bytes

exit status: 0 all targets reached; 1 one was missed
Results: a table; results/last-VERSION.json with versions and hardware; results/last-VERSION.png."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.sh", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", metavar="VERSION", default=DEFAULT_VLLM, help="whose environment (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; writes last-VERSION-quick files")
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Only here: --help has to work without the environment that these need.
    from experiments.common.report import Narrator, stdout_console, write_json
    from experiments.step_cost.measure import measure
    from experiments.step_cost.report import judge, plot, table_of

    # Requests that go are worth a word each.
    logging.disable(logging.WARNING)
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    narrator = Narrator("what waiting hand-overs cost a step")
    costs = [cost for waiting in WAITING for cost in measure(waiting, repetitions, narrator.say)]
    narrator.close()
    costs.sort(key=lambda one: (one.direction, one.side, one.waiting))

    verdicts = judge(costs)
    console = stdout_console()
    title = f"waiting hand-overs, medians of {repetitions:,}, milliseconds"
    console.print(table_of(costs, title))
    console.print(table_of_targets(verdicts))
    name = f"last-{options.vllm}{'-quick' if options.quick else ''}"
    plot(costs, "what waiting hand-overs cost", RESULTS / f"{name}.png")
    content = {
        "repetitions": repetitions,
        "targets": as_json(verdicts),
        "costs": [dataclasses.asdict(one) for one in costs],
    }
    write_json(RESULTS / f"{name}.json", content)
    return exit_status(verdicts)


if __name__ == "__main__":
    sys.exit(main(parse()))
