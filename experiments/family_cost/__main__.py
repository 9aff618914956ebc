# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/family_cost/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.command_line import add_quick, add_rounds, make_parser, run_main
from experiments.common.targets import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from experiments.family_cost.measure import Sample

RESULTS = Path(__file__).resolve().parent / "results"
SLOWEST = 1.15
"""Pull's time to first token, as a multiple of stock's."""

DESCRIPTION = """\
What does it cost to hand over a model that keeps KV in several KV-cache groups?

Gemma 4 (full attention and sliding windows, with blocks of their own size), Nemotron-H (Mamba2 states and full
attention), and a model with one group. Pairs of real servers run at the same time and take turns: stock pull (with the
layout of states that it wants), and this package's pull in both layouts and push, streamed while prefill computes.
Measures time to first token, and descriptors and bytes a prompt, which both servers count (vllm:nixl_*)."""

EPILOG = f"""\
targets, for each model:
  time to first token, pull contiguous / stock pull (medians)   <= {SLOWEST}
  a prompt's descriptors, contiguous / non-contiguous           <= 0.5, without that of the ownership token

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: a table; results/last-VERSION.json with every sample, versions and hardware."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_rounds(parser, 10, "hand-overs of each length by each arm")
    add_quick(parser, "5 rounds")
    return parser.parse_args()


def median(samples: Sequence[Sample], model: str, arm: str, length: int, what: str) -> float:
    return statistics.median(
        getattr(one, what) for one in samples if (one.model, one.arm, one.prompt_tokens) == (model, arm, length)
    )


def judge(samples: Sequence[Sample]) -> list[Verdict]:
    """Return the targets of each model and prompt length."""
    rows = []
    for model, length in dict.fromkeys((one.model, one.prompt_tokens) for one in samples):
        pull, apart, stock = "pull, contiguous", "pull, non-contiguous", "stock, pull"
        slower = median(samples, model, pull, length, "first_token_seconds") / median(
            samples, model, stock, length, "first_token_seconds"
        )
        # One of them reads the ownership token.
        few, many = (median(samples, model, arm, length, "descriptors") - 1 for arm in (pull, apart))
        fewer = few / many
        what = f"{model}, {length} tokens"
        rows += [
            Verdict(f"{what}: first token, pull / stock (<= {SLOWEST})", f"{slower:.2f} x", slower <= SLOWEST),
            Verdict(f"{what}: descriptors, contiguous / non-contiguous (<= 0.5)", f"{fewer:.2f} x", fewer <= 0.5),
        ]
    return rows


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from rich.table import Table

    from experiments.common.report import Narrator, begin, conclude, last_name
    from experiments.family_cost.measure import MODELS, measure

    rounds = 5 if options.quick else options.rounds
    began, stamp = begin(options.vllm)
    title = f"hand-overs by family, vLLM {options.vllm}, {rounds} rounds"
    samples: list[Sample] = []
    with Narrator(title) as narrator:
        for model in MODELS:
            samples += measure(model, rounds, RESULTS / stamp, narrator.update)
            narrator.say(f"{model}: done")

    table = Table(title=f"{title}; medians")
    for column in ("model", "arm", "tokens", "first token, ms", "descriptors", "KiB"):
        table.add_column(column, justify="left" if column in ("model", "arm") else "right", no_wrap=True)
    for model, length, arm in dict.fromkeys(sorted((one.model, one.prompt_tokens, one.arm) for one in samples)):
        seconds, descriptors, num_bytes = (
            median(samples, model, arm, length, what) for what in ("first_token_seconds", "descriptors", "bytes")
        )
        cells = (f"{seconds * 1e3:.1f}", f"{descriptors:.0f}", f"{num_bytes / 1024:,.0f}")
        table.add_row(model, arm, f"{length:,}", *cells)
    content = {"began": began, "rounds": rounds, "samples": [dataclasses.asdict(one) for one in samples]}
    name = last_name(options.vllm, quick=options.quick)
    return conclude([table], judge(samples), RESULTS / f"{name}.json", content)


if __name__ == "__main__":
    run_main(main, parse())
