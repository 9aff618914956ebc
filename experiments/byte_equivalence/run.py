# SPDX-License-Identifier: Apache-2.0
"""A whole run, and the content of last-VERSION.json: the last result of each arm, also when a run covered only some."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.byte_equivalence.arms import SINGLE, of_size
from experiments.byte_equivalence.harness import Harness, NotCaught
from experiments.byte_equivalence.rows import VERDICTS, exit_status, summary, summary_of, table_of
from experiments.byte_equivalence.subjects import FamilySubject, Subject, phases
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
        is_usual = options.model is None
        subject = Subject(quick=options.size != "full") if is_usual else FamilySubject(options.model)
        run = Harness(subject, arms, RESULTS / stamp, narrator)
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
