# SPDX-License-Identifier: Apache-2.0
"""Runs the stacks; tables, and the targets."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from experiments.common.device import MODES
from experiments.common.report import Narrator, begin, conclude, last_name, make_table
from experiments.common.report import Verdict as Target
from experiments.stacks.measure import RECOVERY_SECONDS, Outcome, expected_of, measure
from experiments.stacks.stacks import STACKS
from experiments.stacks.traffic import Verdict

RESULTS = Path(__file__).resolve().parent / "results"


def main(options: argparse.Namespace) -> int:
    chosen = [one for one in STACKS if not options.stack or options.stack in one.name]
    if not chosen:
        names = "; ".join(one.name for one in STACKS)
        sys.stderr.write(f"found no stack that fits --stack {options.stack!r}; there are: {names}.\n")
        return 2
    modes = [options.mode] if options.mode else MODES
    began, run = begin(options.vllm)
    logs = RESULTS / run
    outcomes: list[Outcome] = []
    skipped: list[str] = []
    with Narrator(f"behind {len(chosen)} stacks, vLLM {options.vllm}") as narrator:
        expected = expected_of(range(12 if options.quick else 36), logs)
        for stack in chosen:
            if reason := stack.reason_to_skip(options.vllm, options.engines):
                skipped.append(f"{stack.name}: {reason}")
                narrator.say(f"not run: {skipped[-1]}")
                continue
            for mode in modes:
                if mode in stack.modes:
                    outcomes.append(measure(stack, mode, expected, logs, narrator.say, options.engines))
    if not outcomes:
        sys.stderr.write(f"found nothing to run; {'; '.join(skipped) or 'no stack has that mode'}.\n")
        return 2
    is_part = bool(options.stack or options.mode or options.engines > 1)
    path = RESULTS / f"{logs.name if is_part else last_name(options.vllm, quick=options.quick)}.json"
    content = {"began": began, "outcomes": [asdict(one) for one in outcomes], "not run": skipped}
    return conclude([table_of(outcomes)], [one for found in outcomes for one in targets(found)], path, content)


def table_of(outcomes: list[Outcome]) -> Table:
    rows = []
    for one in outcomes:
        recovered = "never" if one.recovered_seconds is None else f"after {one.recovered_seconds:.1f} s"
        counts = (_counts(one.calm), str(one.hand_overs), _counts(one.troubled))
        rows.append([f"{one.stack} {one.version}", one.mode, *counts, recovered, _counts(one.rolling) or "not run"])
    columns = ("stack", "mode", "all up", "hand-overs", "prefill killed", "right again", "each restarted")
    return make_table("what clients got", columns, rows)


def _counts(verdicts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in verdicts.items())


def targets(found: Outcome) -> list[Target]:
    recovered, asked = found.recovered_seconds, found.asked
    got = (found.calm, found.troubled, found.rolling, found.after)
    bad = sum(verdicts.get(kind.value, 0) for verdicts in got for kind in (Verdict.WRONG, Verdict.NO_END))
    cut_short = found.troubled.get(Verdict.CUT_SHORT.value, 0)
    right = found.calm.get(Verdict.RIGHT.value, 0)
    cached = "not told" if found.cached_tokens is None else f"{found.cached_tokens}"
    is_back = recovered is not None and found.after == {Verdict.RIGHT.value: asked} == {"right": found.hand_overs_after}
    again = f"right answers within {RECOVERY_SECONDS:.0f} s of prefill's return"
    rows = (
        ("every answer is that of one instance", f"{right} of {asked}", right == asked),
        ("KV is handed over for each", f"{found.hand_overs}", found.hand_overs == asked),
        ("usage names no cached tokens that prefill had not", cached, not found.cached_tokens),
        ("no wrong answer, and none without an end", f"{bad}", bad == 0),
        ("a stream whose hand-over fails ends with an error", f"{cut_short} did not", cut_short == 0),
        (again, "none" if recovered is None else f"{recovered:.1f} s", is_back),
    )
    return [Target(f"{found.stack}, {found.mode}: {words}", said, reached) for words, said, reached in rows]
