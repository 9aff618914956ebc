# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/memory_path/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import sys
from pathlib import Path
from typing import Any

from experiments.common.default_vllm import DEFAULT_VLLM
from experiments.common.targets import Verdict, as_json, exit_status, table_of_targets

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


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.sh", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", metavar="VERSION", default=DEFAULT_VLLM, help="vLLM to serve with (%(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="fewer lengths and requests; does not write last-VERSION files"
    )
    parser.add_argument(
        "--part", choices=PARTS, help="only this part; last-VERSION.json keeps the results of the other parts"
    )
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    import httpx

    from experiments.common.client import AnswerError
    from experiments.common.report import Narrator, stdout_console, write_json
    from experiments.common.servers import ServerError
    from experiments.memory_path.measure import Measured, measure_part, read

    began = datetime.datetime.now(datetime.timezone.utc)
    stamp = f"{began:%Y%m%dT%H%M%SZ}-{options.vllm}"
    narrator = Narrator(f"direct and staged, vLLM {options.vllm}")
    found = Measured()
    try:
        for part in [options.part] if options.part else PARTS:
            measure_part(part, found, RESULTS / stamp, narrator, quick=options.quick)
    except (ServerError, AnswerError, httpx.HTTPError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    finally:
        narrator.close()

    name = f"last-{options.vllm}" if not options.quick else stamp
    if options.part and not options.quick:
        found = found.beside(read(RESULTS / f"{name}.json"))
    verdicts = _report(found, options.vllm, stdout_console())
    if found.occupied:
        from experiments.memory_path.report import plot

        plot(found.occupied, found.loaded, f"prefill's blocks and pages, vLLM {options.vllm}", RESULTS / f"{name}.png")
    content: dict[str, Any] = {
        field.name: [dataclasses.asdict(one) for one in getattr(found, field.name)]
        for field in dataclasses.fields(found)
    }
    write_json(
        RESULTS / f"{name}.json",
        {"began": began.isoformat(timespec="seconds"), "targets": as_json(verdicts), **content},
    )
    return exit_status(verdicts)


def _report(found: Any, vllm: str, console: Any) -> list[Verdict]:
    """Print the tables; returns the targets."""
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
    if found_cells:
        console.print(table_of_cells(found_cells, f"direct and staged, vLLM {vllm}; milliseconds"))
    if found.occupied:
        console.print(table_of_occupied(found.occupied))
        console.print(table_of_loaded(found.loaded, PAGE_GROUP_BYTES))
    verdicts = list(
        itertools.chain(judge_resident(found.resident), judge_first_token(found_cells), judge_occupied(found.occupied))
    )
    console.print(table_of_targets(verdicts))
    return verdicts


if __name__ == "__main__":
    sys.exit(main(parse()))
