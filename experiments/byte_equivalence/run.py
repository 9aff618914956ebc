# SPDX-License-Identifier: Apache-2.0
"""Is the output of prefill/decode disaggregation over kvcached identical to that of one stock vLLM instance?

Starts real servers, and compares token ids, log-probabilities and the SHA-256 of every transferred KV block, on the
sending and on the receiving side. Before anything is called equal, planted corruptions must be caught, and zeroing a KV
block must change the output. experiments/README.md tells which arms there are, and why the result can be trusted.

examples:
  bash experiments/byte_equivalence/run.sh                    all arms, one request at a time and 32 at a time
  bash experiments/byte_equivalence/run.sh --quick            the same in float32 only, ten minutes
  bash experiments/byte_equivalence/run.sh --brief            the same with one arm per transfer mode, three minutes
  bash experiments/byte_equivalence/run.sh --mode push        only arms of this transfer mode (and the reference)
  bash experiments/byte_equivalence/run.sh --only contiguous  only arms whose name contains this (and the reference)
  bash experiments/byte_equivalence/run.sh --model nemotron-h --quick     states beside attention

Targets: everything is equal, every corruption is caught, and kvcached unmaps and remaps pages during the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from experiments.byte_equivalence.arms import Arm, Size, of_size
from experiments.byte_equivalence.compare import Check
from experiments.byte_equivalence.harness import Harness, NotCaught
from experiments.byte_equivalence.subjects import FamilySubject, Subject
from experiments.common.families import FAMILIES
from experiments.common.report import Run, make_table, stdout_console
from experiments.common.servers import ServerError, tag_of

DIFFERENCES_SHOWN = 3
VERDICTS = {0: "equal", 1: "NOT EQUAL", 2: "could not be compared"}
"""Exit status -> verdict."""


def main(run: Run) -> int:
    options = run.options
    size: Size = "brief" if options.brief else "quick" if run.quick else "full"
    # More arms than a quick run has may be asked for.
    every = [one for one in of_size("full" if options.only else size, run.vllm) if one.mode in run.modes]
    if options.model:
        if options.model not in FAMILIES:
            raise ServerError(f"found --model {options.model!r}; expected one of {', '.join(FAMILIES)}.")
        every = [one for one in every if one.kvcached and one.computes_as_stock]
    subject = FamilySubject(options.model) if options.model else Subject(quick=size != "full")
    harness, not_caught = Harness(subject, run.chosen(every), run), None
    try:
        harness.run()
    except NotCaught as error:
        not_caught = error
    rows, console, details = summary_of(harness.rows), stdout_console(), Path(f"{run.logs}.json")
    console.print(table_of(harness.rows, f"{run.title}, {options.model or size}, {run.seconds:.0f} s"))
    status = 1 if not_caught else exit_status(rows)
    if not_caught:
        console.print(f"{not_caught}: was not caught. Nothing was compared: the harness would miss real corruptions.")
    console.print(f"{VERDICTS[status]} (exit status {status}); details: {details}")
    asked = {"vllm": run.vllm, "size": size, "mode": options.mode, "arms": options.only, "model": options.model}
    content = {"seconds": round(run.seconds, 1), "verdict": VERDICTS[status], "options": asked}
    run.write({**content, "checks": [asdict(row) for row in harness.rows]}, details)
    # A brief run of the usual model has no such file.
    if options.model or size != "brief":
        path = run.last.with_name(f"last-{run.vllm}-{tag_of(options.model)}.json") if options.model else run.last
        complete = [] if options.model else of_size(size, run.vllm)
        last = summary(rows, path if options.only or options.mode else None, complete)
        run.write({**content, **last}, path)
        if last["missing"]:
            console.print(f"{path.name} does not have all arms of such a run yet. Missing: {last['missing']}")
    return status


def table_of(rows: Sequence[Check], title: str) -> Table:
    def outcome(row: Check) -> str:
        shown = [f"{one.prompt}: {one.aspect}: {one.text}" for one in row.differences]
        if more := len(shown[DIFFERENCES_SHOWN:]):
            shown[DIFFERENCES_SHOWN:] = [f"... and {more} more, see the JSON"]
        return escape("\n".join([row.outcome, *shown]))

    words = {True: "[green]ok[/green]", False: "[red]FAILED[/red]"}
    cells = [(row.arm, row.what, words[row.passed], outcome(row)) for row in rows]
    return make_table(title, ("arm", "check", "", "outcome"), cells)


def summary_of(rows: Sequence[Check]) -> list[dict[str, Any]]:
    return [
        {
            "arm": row.arm,
            "check": row.what,
            "passed": row.passed,
            "outcome": row.outcome,
            **({"differences": len(row.differences)} if row.differences else {}),
            **({"failed_setup": True} if row.failed_setup else {}),
            **row.figures,
        }
        for row in rows
    ]


def exit_status(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return 0 if all rows of a summary passed (and there are any), 1 for a difference, 2 if only the set-up failed."""
    failed = [row for row in rows if not row["passed"]]
    if any(not row.get("failed_setup") for row in failed):
        return 1
    return 2 if failed or not rows else 0


def summary(rows: Sequence[dict[str, Any]], last: Path | None, arms: Sequence[Arm]) -> dict[str, Any]:
    """Return the new content of the file: ``rows`` of this run, and the file's rows of arms that this run left out.

    Args:
        last: the file, if this run covered some arms only. Its rows of other arms are kept, each with the commit that
            it was measured at.
        arms: all arms of a complete run of this size.

    Returns: "verdict" over all rows; "missing": arms without a row; "checks": the rows.
    """
    before = json.loads(last.read_text()) if last is not None and last.is_file() else {"checks": []}
    run = {row["arm"] for row in rows}
    whole = [*({"commit": before["commit"], **row} for row in before["checks"] if row["arm"] not in run), *rows]
    there = {row["arm"] for row in whole}
    missing = [arm.name for arm in arms if arm.name not in there]
    return {"verdict": VERDICTS[exit_status(whole)], "missing": missing, "checks": whole}
