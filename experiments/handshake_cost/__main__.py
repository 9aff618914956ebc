# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/handshake_cost/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.command_line import add_quick, add_rounds, make_parser, run_main
from experiments.common.targets import Verdict

if TYPE_CHECKING:
    from experiments.handshake_cost.measure import Sample

RESULTS = Path(__file__).resolve().parent / "results"
SIZES_GIB = (1, 8, 60)

DESCRIPTION = """\
What does the first hand-over of a pair cost, and does the cost grow with the memory that kvcached reserves?

Starts fresh pairs of real servers: stock vLLM, this package in both layouts, and kvcached with its own NIXL patch, each
with 1, 8 and 60 GiB reserved. Measures the very first hand-over; cold hand-overs, which include a handshake (the first
one, and twenty more, each after decode was made to forget its peer); warm hand-overs, without a handshake; decode's
resident memory; descriptors per block; and the time that this package's wrappers add to a decode step."""

EPILOG = """\
targets (for this package, both layouts; cold figures are first quartiles over all rounds, because other load on the
machine only adds time, and each NIXL agent's polling thread takes a core; all other figures are medians):
  cold hand-over at 60 GiB   <= 1.3 x the one at 1 GiB, <= 1.2 x stock
  resident memory            <= 64 MiB more at 60 GiB than at 1 GiB
  wrappers                   <  1 % of a decode step

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: a table; results/last-VERSION.json with every sample, versions and hardware."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_rounds(parser, 2, "fresh pairs per arm and size")
    add_quick(parser, "one round, 1 and 60 GiB, without kvcached's own patch", "writes last-VERSION.json")
    return parser.parse_args()


def median(samples: list[Sample], arm: str, gib: int, what: str) -> float:
    return statistics.median(getattr(s, what) for s in samples if s.arm == arm and s.reserved_gib == gib)


def cold_quartiles(samples: list[Sample], arm: str, gib: int) -> list[float]:
    """Return first quartile, median and third quartile of an arm's cold hand-overs over all rounds, in seconds."""
    return statistics.quantiles(
        [seconds for s in samples if s.arm == arm and s.reserved_gib == gib for seconds in s.cold_seconds]
    )


def judge(samples: list[Sample], ours: list[str], stock: str) -> list[Verdict]:
    """Return the targets of each arm in ``ours``; ``stock`` is the arm to compare with."""
    rows = []
    for arm in ours:
        small, large = (cold_quartiles(samples, arm, gib)[0] for gib in (SIZES_GIB[0], SIZES_GIB[-1]))
        against_stock = large / cold_quartiles(samples, stock, 0)[0]
        growth = median(samples, arm, SIZES_GIB[-1], "resident_bytes") - median(
            samples, arm, SIZES_GIB[0], "resident_bytes"
        )
        beside = median(samples, stock, 0, "idle_seconds")
        share = max(max(0.0, s.idle_seconds - beside) / s.step_seconds for s in samples if s.arm == arm)
        rows += [
            (f"{arm}: cold, 60 GiB / 1 GiB (<= 1.3)", f"{large / small:.2f} x", large / small <= 1.3),
            (f"{arm}: cold, 60 GiB / stock (<= 1.2)", f"{against_stock:.2f} x", against_stock <= 1.2),
            (f"{arm}: memory, 60 GiB - 1 GiB (<= 64 MiB)", f"{growth / 2**20:+.0f} MiB", growth <= 64 * 2**20),
            (f"{arm}: share of a decode step that wrappers add to stock (< 1 %)", f"{share:.2%}", share < 0.01),
        ]
    return [Verdict(*row) for row in rows]


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from rich.table import Table

    from experiments.common.model import make_model
    from experiments.common.report import Narrator, begin, conclude, last_name
    from experiments.handshake_cost.measure import ARMS, KVCACHED_OWN, STOCK, measure

    arms = [arm for arm in ARMS if not (options.quick and arm is KVCACHED_OWN)]
    sizes = (SIZES_GIB[0], SIZES_GIB[-1]) if options.quick else SIZES_GIB
    rounds = 1 if options.quick else options.rounds
    began, stamp = begin(options.vllm)
    title = f"cost of a cold pair, vLLM {options.vllm}, {rounds} round(s)"
    samples: list[Sample] = []
    with Narrator(title) as narrator:
        model = make_model()
        for turn in range(rounds):
            for size in sizes:
                for arm in arms:
                    if not arm.reserves and size != sizes[0]:
                        continue
                    sample = measure(arm, size, model, RESULTS / stamp / str(turn), narrator.update)
                    samples.append(sample)
                    cold = statistics.median(sample.cold_seconds)
                    narrator.say(f"{arm.name}, {size} GiB: cold {cold * 1000:.0f} ms")

    table = Table(title=title)
    for column in (
        "arm",
        "GiB",
        "first ms",
        "cold ms",
        "cold q1",
        "warm ms",
        "MiB",
        "peak",
        "descriptors",
        "per block",
        "step ms",
        "idle µs",
    ):
        table.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
    for arm_name, gib in dict.fromkeys((s.arm, s.reserved_gib) for s in samples):
        first, middle, _ = cold_quartiles(samples, arm_name, gib)
        cell: Any = lambda what, a=arm_name, g=gib: median(samples, a, g, what)  # noqa: E731
        table.add_row(
            arm_name,
            str(gib or "-"),
            f"{cell('first_seconds') * 1e3:.0f}",
            f"{middle * 1e3:.0f}",
            f"{first * 1e3:.0f}",
            f"{cell('warm_seconds') * 1e3:.0f}",
            f"{cell('resident_bytes') / 2**20:.0f}",
            f"{cell('peak_resident_bytes') / 2**20:.0f}",
            f"{cell('descriptors'):.0f}",
            f"{cell('descriptors_per_block'):.0f}",
            f"{cell('step_seconds') * 1e3:.2f}",
            f"{cell('idle_seconds') * 1e6:.1f}",
        )
    verdicts = judge(samples, [arm.name for arm in arms if arm.ours], STOCK.name)
    content = {"began": began, "rounds": rounds, "samples": [dataclasses.asdict(sample) for sample in samples]}
    return conclude([table], verdicts, RESULTS / f"{last_name(options.vllm)}.json", content)


if __name__ == "__main__":
    run_main(main, parse())
