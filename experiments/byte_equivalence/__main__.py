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

RESULTS = Path(__file__).resolve().parent / "results"


def main(options: cli.Options) -> int:
    """Run the comparison and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.byte_equivalence.arms import SINGLE, of_size
    from experiments.byte_equivalence.checks import VERDICTS, Checks
    from experiments.byte_equivalence.harness import Harness, NotCaught
    from experiments.byte_equivalence.last import summary
    from experiments.byte_equivalence.phases import phases
    from experiments.common.model import GQA
    from experiments.common.report import Narrator, begin, last_name, stdout_console, versions, write_json

    arms = [
        arm
        for arm in of_size("full" if options.arms else options.size, options.vllm)
        if arm.mode != SINGLE
        and (options.mode is None or arm.mode == options.mode)
        and (not options.arms or any(word.lower() in arm.name.lower() for word in options.arms))
    ]
    if options.model is not None:
        return _family(options, arms)
    if not arms:
        names = "; ".join(arm.name for arm in of_size("full", options.vllm) if arm.mode != SINGLE)
        sys.stderr.write(f"found no arm that fits --arm {' or '.join(options.arms)!r}; there are: {names}.\n")
        return 2

    began, stamp = begin(options.vllm)
    title = f"byte equivalence, vLLM {options.vllm}{'' if options.size == 'full' else f', {options.size}'}"
    checks = Checks()
    not_caught = None
    with Narrator(title) as narrator:
        try:
            Harness(arms, RESULTS / stamp, narrator, checks, quick=options.size != "full").run()
        except NotCaught as error:
            not_caught = error
    console = stdout_console()
    console.print(checks.table(f"byte equivalence, vLLM {versions()['vllm']}, {narrator.seconds:.0f} s"))
    status = 1 if not_caught else checks.exit_status
    if not_caught:
        console.print(f"{not_caught}: was not caught. Nothing was compared: the harness would miss real corruptions.")
    console.print(f"{VERDICTS[status]} (exit status {status}); details: {RESULTS / stamp}.json")
    content = {
        "began": began,
        "seconds": round(narrator.seconds, 1),
        "verdict": VERDICTS[status],
        "options": {"vllm": options.vllm, "mode": options.mode, "size": options.size, "arms": options.arms},
    }
    write_json(RESULTS / f"{stamp}.json", {**content, "checks": checks.details()})
    if options.size != "brief":
        last = RESULTS / f"{last_name(options.vllm, quick=options.size == 'quick')}.json"
        kept = last if options.is_partial else None
        found = summary(
            checks.summary(), kept, of_size(options.size, options.vllm), phases(GQA, quick=options.size == "quick")
        )
        if found["missing"]:
            console.print(
                f"{last.name} does not cover all arms of such a run yet. Missing: {'; '.join(found['missing'])}"
            )
        write_json(last, {**content, **found})
    return status


def _family(options: cli.Options, arms: Sequence[Arm]) -> int:
    """Run the comparison with another model; return the exit status."""
    from experiments.byte_equivalence.checks import VERDICTS, Checks, exit_status
    from experiments.byte_equivalence.family_run import FamilyRun
    from experiments.byte_equivalence.harness import NotCaught
    from experiments.byte_equivalence.last import with_kept
    from experiments.common.families import FAMILIES
    from experiments.common.report import Narrator, begin, stdout_console, versions, write_json

    arms = [arm for arm in arms if arm.kvcached and arm.servers == arm.ranks == 1 and not arm.has_own_runner]
    if options.model not in FAMILIES or not arms:
        sys.stderr.write(
            f"found --model {options.model!r} and {len(arms)} arms; expected one of {', '.join(FAMILIES)}, and an arm "
            "with kvcached, one P, one D and the default runner.\n"
        )
        return 2
    began, stamp = begin(options.vllm)
    checks = Checks()
    not_caught = None
    with Narrator(f"byte equivalence, vLLM {options.vllm}, {options.model}") as narrator:
        try:
            FamilyRun(options.model, arms, RESULTS / stamp, narrator, checks).run()
        except NotCaught as error:
            not_caught = error
    console = stdout_console()
    title = f"byte equivalence, vLLM {versions()['vllm']}, {options.model}, {narrator.seconds:.0f} s"
    console.print(checks.table(title))
    status = 1 if not_caught else checks.exit_status
    console.print(
        f"{not_caught or ''}{': was not caught. ' if not_caught else ''}{VERDICTS[status]} (exit status {status})"
    )
    content = {
        "began": began,
        "seconds": round(narrator.seconds, 1),
        "verdict": VERDICTS[status],
        "options": {"vllm": options.vllm, "model": options.model, "size": options.size, "arms": options.arms},
    }
    write_json(RESULTS / f"{stamp}.json", {**content, "checks": checks.details()})
    name = "".join(letter if letter.isalnum() else "-" for letter in options.model)
    last = RESULTS / f"last-{options.vllm}-{name}.json"
    rows = with_kept(checks.summary(), last if options.is_partial else None)
    write_json(last, {**content, "verdict": VERDICTS[status or exit_status(rows)], "checks": rows})
    return status


if __name__ == "__main__":
    run_main(main, cli.parse())
