# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/transfer_rate/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from experiments.common.command_line import add_quick, add_word, make_parser, run_main

RESULTS = Path(__file__).resolve().parent / "results"

DESCRIPTION = """\
Which fraction of plain NIXL's rate does a long hand-over reach, with the same bytes in the same descriptors?

Two processes with real agents of vLLM's NIXL hand over 64k tokens, 1 GiB: 32 layers with K and V of 256 bytes a token
each, in blocks of 16 tokens that are scattered over the pool as after some use, so that no blocks can be joined. A
block is one descriptor of 256 KiB (kvcached's contiguous layout) or 64 descriptors of 4 KiB (non-contiguous).
A hand-over is timed from the step that passes the request to decode's worker until the engine is told that the KV has
arrived, with all work of this package: descriptors, batches, the budget, the ownership token. Plain NIXL is one
transfer with all descriptors, polled without a pause; also measured is plain NIXL in this package's batches. All are
measured with idle engines and with engines that compute, that is, a thread on each side that uses Python's interpreter
for 2 ms and then leaves it for 2 ms. Arms take turns; the first round does not count."""

EPILOG = """\
targets, over shared memory and TCP, in both directions and layouts:
  with idle engines, a hand-over reaches >= 0.9 of plain NIXL's rate (medians)
  with engines that compute, it reaches >= 0.8 of plain NIXL's rate in the same circumstances (medians), and the
  engine's pieces of work take <= 1.02 times as long as meanwhile with plain NIXL (means)
  posting one batch of this package blocks Python's interpreter for the engine's thread for <= 1 ms (median of 20)

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: tables; results/last-VERSION.json with every sample, versions and hardware; results/last-VERSION.png."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_quick(parser, "8k tokens, 3 rounds")
    add_word(parser, "--only", "settings", "writes no files")
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.common.report import Narrator, conclude, last_name
    from experiments.transfer_rate.arms import DIRECTIONS, FULL, LAYOUTS, QUICK, TRANSPORTS
    from experiments.transfer_rate.pairs import measure
    from experiments.transfer_rate.report import cells, judge, plot, table_of

    load = QUICK if options.quick else FULL
    title = f"{load.tokens:,} tokens, {load.num_bytes / 2**20:.0f} MiB"
    samples, held = [], {}
    with Narrator(f"hand-overs of {title}, against plain NIXL of vLLM {options.vllm}") as narrator:
        for over in TRANSPORTS:
            for direction in DIRECTIONS:
                for layout in LAYOUTS:
                    setting = (over.name, direction, layout)
                    if (options.only or "") in ", ".join(setting):
                        found, held[setting] = measure(over, direction, layout, load, narrator.say)
                        samples += found

    summed = cells(samples, load.num_bytes)
    name = last_name(options.vllm, quick=options.quick)
    content = {
        "tokens": load.tokens,
        "bytes": load.num_bytes,
        "held_seconds": {", ".join(setting): seconds for setting, seconds in held.items()},
        "cells": [dataclasses.asdict(one) for one in summed],
        "samples": [dataclasses.asdict(one) for one in samples],
    }
    table = table_of(summed, f"{title}; ms, medians of {load.rounds}")
    status = conclude([table], judge(summed, held), None if options.only else RESULTS / f"{name}.json", content)
    if not options.only:
        plot(summed, f"{title}, NIXL of vLLM {options.vllm}", RESULTS / f"{name}.png")
    return status


if __name__ == "__main__":
    run_main(main, parse())
