# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/memory_path/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.command_line import KEEPS_LAST, add_quick, make_parser, run_main

if TYPE_CHECKING:
    from rich.table import Table

    from experiments.common.targets import Verdict
    from experiments.memory_path.measure import Measured

RESULTS = Path(__file__).resolve().parent / "results"
PARTS = ("memory", "first-token", "pages")

DESCRIPTION = """\
What does staging cost, and how much memory does it free sooner?

Starts pairs of real servers over kvcached, on the direct path and staged through a slab in host memory, with pull and
with streamed push, and compares:
  memory       a server's resident memory besides kvcached's pages, with 1, 8 and 60 GiB reserved; and the size that
               vLLM's own host buffer would have
  first-token  time to first token over TCP and shared memory, with all pairs running and taking turns; also for a pull
               whose every hand-over is verified (verify_fraction 1)
  pages        how long prefill's blocks stay in use after its last step, and how long their pages stay mapped; and how
               much of its pool is mapped on average under load, when decode gets a request half a second after
               prefill's answer"""

EPILOG = """\
targets:
  resident memory beyond the direct path's: at most 1.05 x the slab, whatever the reserved size
  time to first token over TCP: at most 1.15 x the direct path's (for shared memory it is reported without a target)
  prefill's blocks stay in use for at most 1.2 x the time of the copy

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: tables; results/last-VERSION.json with every sample, versions and hardware; results/last-VERSION.png."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_quick(parser, "fewer lengths and requests", KEEPS_LAST)
    parser.add_argument(
        "--part", choices=PARTS, help="only this part; last-VERSION.json keeps the results of the other parts"
    )
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.common.report import Narrator, begin, conclude, last_name
    from experiments.memory_path.measure import Measured, measure_part, read
    from experiments.memory_path.report import plot

    began, stamp = begin(options.vllm)
    found = Measured()
    with Narrator(f"direct and staged, vLLM {options.vllm}") as narrator:
        for part in [options.part] if options.part else PARTS:
            measure_part(part, found, RESULTS / stamp, narrator, quick=options.quick)

    name = stamp if options.quick else last_name(options.vllm)
    if options.part and not options.quick:
        found = found.beside(read(RESULTS / f"{name}.json"))
    tables, verdicts = _judged(found, options.vllm)
    content: dict[str, Any] = {
        field.name: [dataclasses.asdict(one) for one in getattr(found, field.name)]
        for field in dataclasses.fields(found)
    }
    status = conclude(tables, verdicts, RESULTS / f"{name}.json", {"began": began, **content})
    if found.occupied:
        plot(found.occupied, found.loaded, f"prefill's blocks and pages, vLLM {options.vllm}", RESULTS / f"{name}.png")
    return status


def _judged(found: Measured, vllm: str) -> tuple[list[Table], list[Verdict]]:
    """Return the tables of what was measured, and the targets."""
    from experiments.memory_path.arms import PAGE_GROUP_BYTES
    from experiments.memory_path.report import (
        judge_first_token,
        judge_occupied,
        judge_resident,
        table_of_loaded,
        table_of_occupied,
    )
    from experiments.push_vs_pull.report import cells, table_of_cells

    found_cells = cells(found.samples)
    tables = []
    if found_cells:
        tables.append(table_of_cells(found_cells, f"direct and staged, vLLM {vllm}; milliseconds"))
    if found.occupied:
        tables += [table_of_occupied(found.occupied), table_of_loaded(found.loaded, PAGE_GROUP_BYTES)]
    judged = (judge_resident(found.resident), judge_first_token(found_cells), judge_occupied(found.occupied))
    return tables, list(itertools.chain(*judged))


if __name__ == "__main__":
    run_main(main, parse())
