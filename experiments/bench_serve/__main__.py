# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/bench_serve/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.command_line import MODES, add_mode, add_quick, make_parser, run_main

if TYPE_CHECKING:
    from experiments.bench_serve.measure import Handed, Run

RESULTS = Path(__file__).resolve().parent / "results"
PROMPTS = {1: 6, 8: 16, 64: 64}
"""Prompts of a run, by how many are in flight at a time."""
QUICK_PROMPTS = {8: 16}
ROUNDS, QUICK_ROUNDS = 3, 1

DESCRIPTION = """\
What does vLLM's own load generator measure with prefill/decode, beside stock prefill/decode?

Runs `vllm bench serve` with its random data set (prompts of 512 to 1,536 tokens, answers of 32 to 96) against one
prefill and one decode server, with pull and with push:
  decode asks    this package over kvcached; clients talk to decode, which asks prefill
  vllm-router    the same behind vllm-router
  stock          vLLM's own NixlConnector, or NixlPushConnector, without kvcached, behind vllm-router
and against one instance with as many threads as both servers together. The servers of all arms of a transfer mode run
at the same time; the arms take turns, each with the same prompts."""

EPILOG = """\
targets: every request is answered, with KV from prefill. Decode that asks, beside stock: at least as many requests a
second; first and further tokens as soon, and for as little CPU time of all servers and the router, as the median of
ratios over the rounds. The speed beside one instance is reported without a target: where both servers share cores, P/D
cannot be faster.

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: a table; results/last-VERSION.json with every run, versions and hardware."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_quick(parser, "one round, one load")
    add_mode(parser, "last-VERSION.json keeps the results of the other one")
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.bench_serve.arms import MODEL, groups
    from experiments.bench_serve.measure import measure
    from experiments.bench_serve.report import judge, table_of
    from experiments.common.model import make_model
    from experiments.common.report import Narrator, begin, conclude, last_name

    began, stamp = begin(options.vllm)
    quick = options.quick
    path = RESULTS / f"{last_name(options.vllm, quick=quick)}.json"
    modes = (options.mode,) if options.mode else MODES
    asked = groups(modes, has_stock_push=has_stock_push())
    runs, handed = kept(path, {arm.name for arms in asked.values() for arm in arms}) if options.mode else ([], [])
    with Narrator(f"vllm bench serve, vLLM {options.vllm}") as narrator:
        for mode, arms in asked.items():
            more = measure(
                arms,
                QUICK_PROMPTS if quick else PROMPTS,
                QUICK_ROUNDS if quick else ROUNDS,
                make_model(MODEL),
                RESULTS / stamp / mode,
                narrator.update,
            )
            runs, handed = [*runs, *more[0]], [*handed, *more[1]]
    content = {
        "began": began,
        "handed": [dataclasses.asdict(one) for one in handed],
        "runs": [dataclasses.asdict(one) for one in runs],
    }
    return conclude([table_of(runs)], judge(runs, handed), path, content)


def has_stock_push() -> bool:
    """Return whether the installed vLLM has ``NixlPushConnector``. Does not import it."""
    found = importlib.util.find_spec("vllm")
    nixl = "distributed/kv_transfer/kv_connector/v1/nixl/push_worker.py"
    return found is not None and found.origin is not None and (Path(found.origin).parent / nixl).is_file()


def kept(path: Path, arms: set[str]) -> tuple[list[Run], list[Handed]]:
    """Return what an earlier results file has of arms other than ``arms``; nothing if there is no such file."""
    from experiments.bench_serve.measure import Handed, Run

    if not path.is_file():
        return [], []
    content = json.loads(path.read_text())
    return (
        [Run(**one) for one in content["runs"] if one["arm"] not in arms],
        [Handed(**one) for one in content["handed"] if one["arm"] not in arms],
    )


if __name__ == "__main__":
    run_main(main, parse())
