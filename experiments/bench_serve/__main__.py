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

Runs `vllm bench serve` with a data set that it draws itself (prompts of 512 to 1,536 tokens, answers of 32 to 96)
against the router before one prefill and one decode server over kvcached, pulling and pushing, and against one stock
instance that has as many threads as both. The arms' servers run side by side and are asked in turn."""

EPILOG = """\
targets: every request is answered; no prompt is computed by decode instead of being handed over; hand-overs go in the
direction of the arm. How fast each arm is, is reported: on cores that both servers share, P/D has nothing to gain.

exit status: 0 all targets reached; 1 one was missed; 2 something could not be set up
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
    # Only here: --help has to work without the environment that these need.
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
