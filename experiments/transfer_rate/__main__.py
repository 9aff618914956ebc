# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/transfer_rate/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from experiments.common.default_vllm import DEFAULT_VLLM
from experiments.common.targets import as_json, exit_status, table_of_targets

RESULTS = Path(__file__).resolve().parent / "results"

DESCRIPTION = """\
Which fraction of plain NIXL's rate does a long hand-over reach, with the same bytes in the same descriptors?

Two processes with real NIXL agents hand over 64k tokens, 1 GiB: 32 layers with K and V of 256 bytes a token each, in
blocks of 16 tokens that are scattered over the pool as after some use, so that no blocks can be joined. A block is one
descriptor of 256 KiB (kvcached's contiguous layout) or 64 descriptors of 4 KiB (non-contiguous).
A hand-over is timed from the step that passes the request to decode's worker until the engine is told that the KV has
arrived, with all work of this package: descriptors, batches, the budget, the ownership token. Plain NIXL is one
transfer with all descriptors, polled without a pause; also measured is plain NIXL in this package's batches. All are
measured with idle engines and with engines that compute, that is, a thread on each side that uses Python's interpreter
for 2 ms and then leaves it for 2 ms. Arms take turns; the first round does not count."""

EPILOG = """\
targets, with idle engines, over shared memory and TCP, in both directions and layouts:
  a hand-over reaches >= 0.9 of plain NIXL's rate (medians)
  posting one batch of this package blocks Python's interpreter for the engine's thread for <= 1 ms (median of 20)

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: tables; results/last-VERSION.json with every sample, versions and hardware; results/last-VERSION.png."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.sh", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", metavar="VERSION", default=DEFAULT_VLLM, help="whose NIXL is used (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="8k tokens, 3 rounds; writes last-VERSION-quick files")
    parser.add_argument("--only", metavar="WORD", help="only settings whose name contains WORD; writes no files")
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.common.report import Narrator, stdout_console, write_json
    from experiments.transfer_rate.arms import DIRECTIONS, FULL, LAYOUTS, QUICK, TRANSPORTS
    from experiments.transfer_rate.pairs import NodeError, measure
    from experiments.transfer_rate.report import cells, judge, plot, table_of

    load = QUICK if options.quick else FULL
    title = f"{load.tokens:,} tokens, {load.num_bytes / 2**20:.0f} MiB"
    narrator = Narrator(f"hand-overs of {title}, against plain NIXL of vLLM {options.vllm}")
    samples, held = [], {}
    try:
        for over in TRANSPORTS:
            for direction in DIRECTIONS:
                for layout in LAYOUTS:
                    setting = (over.name, direction, layout)
                    if (options.only or "") in ", ".join(setting):
                        found, held[setting] = measure(over, direction, layout, load, narrator.say)
                        samples += found
    except NodeError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    finally:
        narrator.close()

    summed = cells(samples, load.num_bytes)
    verdicts = judge(summed, held)
    console = stdout_console()
    console.print(table_of(summed, f"{title}; ms, medians of {load.rounds}"))
    console.print(table_of_targets(verdicts))
    if not options.only:
        name = f"last-{options.vllm}{'-quick' if options.quick else ''}"
        plot(summed, f"{title}, NIXL of vLLM {options.vllm}", RESULTS / f"{name}.png")
        write_json(
            RESULTS / f"{name}.json",
            {
                "tokens": load.tokens,
                "bytes": load.num_bytes,
                "targets": as_json(verdicts),
                "held_seconds": {", ".join(setting): seconds for setting, seconds in held.items()},
                "cells": [dataclasses.asdict(one) for one in summed],
                "samples": [dataclasses.asdict(one) for one in samples],
            },
        )
    return exit_status(verdicts)


if __name__ == "__main__":
    sys.exit(main(parse()))
