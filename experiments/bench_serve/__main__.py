# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/bench_serve/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from pathlib import Path

from experiments.common.default_vllm import DEFAULT_VLLM
from experiments.common.targets import as_json, exit_status, table_of_targets

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


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.sh", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", metavar="VERSION", default=DEFAULT_VLLM, help="vLLM to serve with (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round; writes last-VERSION-quick.json")
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.bench_serve.arms import MODEL
    from experiments.bench_serve.measure import measure
    from experiments.bench_serve.report import judge, table_of
    from experiments.common.model import make_model
    from experiments.common.report import Narrator, stdout_console, write_json
    from experiments.common.servers import ServerError

    began = datetime.datetime.now(datetime.timezone.utc)
    narrator = Narrator(f"vllm bench serve through the router, vLLM {options.vllm}")
    quick = options.quick
    try:
        runs, handed = measure(
            QUICK_AT_A_TIME if quick else AT_A_TIME,
            QUICK_ROUNDS if quick else ROUNDS,
            QUICK_PROMPTS if quick else PROMPTS,
            make_model(MODEL),
            RESULTS / f"{began:%Y%m%dT%H%M%SZ}-{options.vllm}",
            narrator.update,
        )
    except ServerError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    finally:
        narrator.close()
    verdicts = judge(runs, handed)
    console = stdout_console()
    console.print(table_of(runs))
    console.print(table_of_targets(verdicts))
    write_json(
        RESULTS / f"last-{options.vllm}{'-quick' if quick else ''}.json",
        {
            "began": began.isoformat(timespec="seconds"),
            "targets": as_json(verdicts),
            "handed": [dataclasses.asdict(one) for one in handed],
            "runs": [dataclasses.asdict(one) for one in runs],
        },
    )
    return exit_status(verdicts)


if __name__ == "__main__":
    sys.exit(main(parse()))
