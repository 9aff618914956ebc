# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/byte_equivalence/run.sh``: set up, serve, compare, report. ``--help`` explains."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.byte_equivalence import cli
from experiments.common.command_line import run_main

if TYPE_CHECKING:
    from experiments.byte_equivalence.arms import Arm
    from experiments.byte_equivalence.checks import Checks
    from experiments.common.report import Narrator

RESULTS = Path(__file__).resolve().parent / "results"


def main(options: cli.Options) -> int:
    """Run the comparison and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.byte_equivalence.arms import SINGLE, of_size
    from experiments.byte_equivalence.checks import VERDICTS, Checks, exit_status
    from experiments.byte_equivalence.comparison import NotCaught
    from experiments.byte_equivalence.last import summary, with_kept
    from experiments.byte_equivalence.phases import phases
    from experiments.common.families import FAMILIES
    from experiments.common.model import GQA
    from experiments.common.report import Narrator, begin, last_name, stdout_console, versions, write_json

    every = [one for one in of_size("full" if options.arms else options.size, options.vllm) if one.mode != SINGLE]
    arms = [one for one in every if options.wants(one.name, one.mode)]
    if options.model is not None:
        if options.model not in FAMILIES:
            sys.stderr.write(f"found --model {options.model!r}; expected one of {', '.join(FAMILIES)}.\n")
            return 2
        arms = [one for one in arms if one.kvcached and one.servers == one.ranks == 1 and not one.has_own_runner]
    if not arms:
        names = "; ".join(one.name for one in of_size("full", options.vllm) if one.mode != SINGLE)
        sys.stderr.write(f"found no arm that fits --arm {' or '.join(options.arms)!r}; there are: {names}.\n")
        return 2

    began, stamp = begin(options.vllm)
    kind = options.model or ("" if options.size == "full" else options.size)
    checks, not_caught = Checks(), None
    with Narrator(f"byte equivalence, vLLM {options.vllm}{f', {kind}' if kind else ''}") as narrator:
        try:
            _run(options, arms, RESULTS / stamp, narrator, checks)
        except NotCaught as error:
            not_caught = error
    console = stdout_console()
    console.print(checks.table(f"byte equivalence, vLLM {versions()['vllm']}, {kind} {narrator.seconds:.0f} s"))
    status = 1 if not_caught else checks.exit_status
    if not_caught:
        console.print(f"{not_caught}: was not caught. Nothing was compared: the harness would miss real corruptions.")
    console.print(f"{VERDICTS[status]} (exit status {status}); details: {RESULTS / stamp}.json")
    asked = {"vllm": options.vllm, "mode": options.mode, "size": options.size, "arms": options.arms}
    content = {
        "began": began,
        "seconds": round(narrator.seconds, 1),
        "verdict": VERDICTS[status],
        "options": {**asked, **({} if options.model is None else {"model": options.model})},
    }
    write_json(RESULTS / f"{stamp}.json", {**content, "checks": checks.details()})
    if options.model is not None:
        name = "".join(letter if letter.isalnum() else "-" for letter in options.model)
        last = RESULTS / f"last-{options.vllm}-{name}.json"
        rows = with_kept(checks.summary(), last if options.is_partial else None)
        write_json(last, {**content, "verdict": VERDICTS[status or exit_status(rows)], "checks": rows})
    elif options.size != "brief":
        is_quick = options.size == "quick"
        last = RESULTS / f"{last_name(options.vllm, quick=is_quick)}.json"
        kept = last if options.is_partial else None
        found = summary(checks.summary(), kept, of_size(options.size, options.vllm), phases(GQA, quick=is_quick))
        if found["missing"]:
            missing = "; ".join(found["missing"])
            console.print(f"{last.name} does not cover all arms of such a run yet. Missing: {missing}")
        write_json(last, {**content, **found})
    return status


def _run(options: cli.Options, arms: Sequence[Arm], logs: Path, narrator: Narrator, checks: Checks) -> None:
    """Compare with the usual model, or with that of a family; raises `NotCaught`."""
    from experiments.byte_equivalence.family_run import FamilyRun
    from experiments.byte_equivalence.harness import Harness

    if options.model is not None:
        FamilyRun(options.model, arms, logs, narrator, checks).run()
    else:
        Harness(arms, logs, narrator, checks, quick=options.size != "full").run()


if __name__ == "__main__":
    run_main(main, cli.parse())
