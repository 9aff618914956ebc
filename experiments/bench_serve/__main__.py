# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/bench_serve/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from experiments.common.command_line import add_quick, make_parser, run_main

RESULTS = Path(__file__).resolve().parent / "results"
AT_A_TIME, QUICK_AT_A_TIME = (1, 4, 16), (4,)
ROUNDS, QUICK_ROUNDS = 2, 1
PROMPTS, QUICK_PROMPTS = 16, 12

DESCRIPTION = """\
What does vLLM's own load generator measure through the router?

Runs `vllm bench serve` with its random data set (prompts of 512 to 1,536 tokens, answers of 32 to 96) against the
router with one prefill and one decode server over kvcached, with pull and with push, and against one stock instance
with as many threads as both servers together. The servers of all arms run at the same time; the arms take turns."""

EPILOG = """\
targets: every request is answered; decode computes no prompt instead of a hand-over; hand-overs go in the direction of
the arm. The speed of each arm is reported without a target: where both servers share cores, P/D cannot be faster.

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: a table; results/last-VERSION.json with every run, versions and hardware."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_quick(parser, "one round")
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.bench_serve.arms import MODEL
    from experiments.bench_serve.measure import measure
    from experiments.bench_serve.report import judge, table_of
    from experiments.common.model import make_model
    from experiments.common.report import Narrator, begin, conclude, last_name

    began, stamp = begin(options.vllm)
    quick = options.quick
    with Narrator(f"vllm bench serve through the router, vLLM {options.vllm}") as narrator:
        runs, handed = measure(
            QUICK_AT_A_TIME if quick else AT_A_TIME,
            QUICK_ROUNDS if quick else ROUNDS,
            QUICK_PROMPTS if quick else PROMPTS,
            make_model(MODEL),
            RESULTS / stamp,
            narrator.update,
        )
    content = {
        "began": began,
        "handed": [dataclasses.asdict(one) for one in handed],
        "runs": [dataclasses.asdict(one) for one in runs],
    }
    path = RESULTS / f"{last_name(options.vllm, quick=quick)}.json"
    return conclude([table_of(runs)], judge(runs, handed), path, content)


if __name__ == "__main__":
    run_main(main, parse())
