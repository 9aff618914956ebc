# SPDX-License-Identifier: Apache-2.0
"""A whole run, and the content of last-VERSION.json: the last result of each arm, also when a run covered only some."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.byte_equivalence.arms import SINGLE, Arm, Phase, of_size, phases
from experiments.byte_equivalence.comparison import VERDICTS, NotCaught, exit_status, summary_of, table_of
from experiments.byte_equivalence.family_run import FamilyRun
from experiments.byte_equivalence.harness import Harness
from experiments.common.families import FAMILIES
from experiments.common.model import GQA
from experiments.common.report import Narrator, begin, last_name, stdout_console, versions, write_json
from experiments.common.servers import tag_of

RESULTS = Path(__file__).resolve().parent / "results"


def main(options: argparse.Namespace) -> int:
    every = [one for one in of_size("full" if options.arm else options.size, options.vllm) if one.mode != SINGLE]
    words = [word.lower() for word in options.arm] or [""]
    arms = [one for one in every if any(word in one.name.lower() for word in words)]
    arms = [one for one in arms if options.mode in (None, one.mode)]
    if options.model is not None:
        if options.model not in FAMILIES:
            sys.stderr.write(f"found --model {options.model!r}; expected one of {', '.join(FAMILIES)}.\n")
            return 2
        arms = [one for one in arms if one.kvcached and one.servers == one.ranks == 1 and not one.has_own_runner]
    if not arms:
        names = "; ".join(one.name for one in of_size("full", options.vllm) if one.mode != SINGLE)
        sys.stderr.write(f"found no arm that fits --arm {' or '.join(options.arm)!r}; there are: {names}.\n")
        return 2

    began, stamp = begin(options.vllm)
    kind = options.model or ("" if options.size == "full" else options.size)
    not_caught = None
    with Narrator(f"byte equivalence, vLLM {options.vllm}{f', {kind}' if kind else ''}") as narrator:
        run = _run_of(options, arms, RESULTS / stamp, narrator)
        try:
            run.run()
        except NotCaught as error:
            not_caught = error
    rows = summary_of(run.rows)
    console = stdout_console()
    console.print(table_of(run.rows, f"byte equivalence, vLLM {versions()['vllm']}, {kind} {narrator.seconds:.0f} s"))
    status = 1 if not_caught else exit_status(rows)
    if not_caught:
        console.print(f"{not_caught}: was not caught. Nothing was compared: the harness would miss real corruptions.")
    console.print(f"{VERDICTS[status]} (exit status {status}); details: {RESULTS / stamp}.json")
    asked = {"vllm": options.vllm, "mode": options.mode, "size": options.size, "arms": options.arm}
    content = {
        "began": began,
        "seconds": round(narrator.seconds, 1),
        "verdict": VERDICTS[status],
        "options": {**asked, **({} if options.model is None else {"model": options.model})},
    }
    write_json(RESULTS / f"{stamp}.json", {**content, "checks": [asdict(row) for row in run.rows]})
    _write_last(options, rows, content, console)
    return status


def _write_last(
    options: argparse.Namespace, rows: Sequence[dict[str, Any]], content: dict[str, Any], console: Console
) -> None:
    """Write the file with the last result of each arm; a brief run of the usual model has none."""
    is_family, is_quick = options.model is not None, options.size == "quick"
    if options.size == "brief" and not is_family:
        return
    name = (
        last_name(f"{options.vllm}-{tag_of(options.model)}") if is_family else last_name(options.vllm, quick=is_quick)
    )
    last = RESULTS / f"{name}.json"
    complete = ([], []) if is_family else (of_size(options.size, options.vllm), phases(GQA, quick=is_quick))
    found = summary(rows, last if options.arm or options.mode else None, *complete)
    if found["missing"]:
        missing = "; ".join(found["missing"])
        console.print(f"{last.name} does not cover all arms of such a run yet. Missing: {missing}")
    write_json(last, {**content, **found})


def _run_of(options: argparse.Namespace, arms: Sequence[Arm], logs: Path, narrator: Narrator) -> Harness | FamilyRun:
    if options.model is not None:
        return FamilyRun(options.model, arms, logs, narrator)
    return Harness(arms, logs, narrator, quick=options.size != "full")


def summary(
    rows: Sequence[dict[str, Any]], last: Path | None, arms: Sequence[Arm], phases: Sequence[Phase]
) -> dict[str, Any]:
    """Return the new content of the file: ``rows`` of this run, and the file's rows of arms that this run left out.

    Args:
        last: the file, if this run covered some arms only. Its rows of other arms are kept, each with the commit that
            it was measured at.
        arms: all arms of a complete run of this size.
        phases: all phases of such a run.

    Returns: "verdict" over all rows; "missing": arms that lack a required row; "checks": the rows.
    """
    before = json.loads(last.read_text()) if last is not None and last.is_file() else {"checks": []}
    run = {row["arm"] for row in rows}
    kept = [{"commit": before["commit"], **row} for row in before["checks"] if row["arm"] not in run]
    whole = [*kept, *rows]
    there = {(row["arm"], row["check"]) for row in whole}
    missing = [arm.name for arm in arms if not {(arm.name, check) for check in _needed(arm, phases)} <= there]
    return {"verdict": VERDICTS[exit_status(whole)], "missing": missing, "checks": whole}


def _needed(arm: Arm, phases: Sequence[Phase]) -> Iterator[str]:
    """Yield the names of the rows that an arm must have to count as compared."""
    for phase in phases:
        if arm.mode == SINGLE:
            yield f"{phase.name}: answers ({phase.dtype})"
            continue
        for order in arm.orders:
            name = phase.name if len(arm.orders) == 1 else f"{phase.name}, {order}"
            if phase.sequential:
                yield f"{name}: tokens and log-probabilities ({phase.dtype})"
                yield f"{name}: SHA-256 of KV blocks, sent and received"
            if phase.sequential and phase.exact_between_arms and arm.computes_as_stock and arm.kvcached:
                yield f"{name}: exactly as stock P/D"
            if phase.concurrent:
                yield f"{name}: tokens, 32 at a time ({phase.dtype})"
                yield f"{name}: SHA-256 of KV blocks, 32 at a time"
