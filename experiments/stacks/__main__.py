# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/stacks/run.sh``: serve through each stack, kill prefill, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.command_line import KEEPS_LAST, MODES, add_mode, add_quick, add_word, make_parser, run_main

if TYPE_CHECKING:
    from rich.table import Table

    from experiments.stacks.measure import Outcome

RESULTS = Path(__file__).resolve().parent / "results"

DESCRIPTION = """\
Do other projects' routers get right answers from a prefill and a decode server with kvcached, and errors when prefill
dies?

Starts one prefill and one decode server, and the stack's own router before them, unchanged. Asks for completions and
chats, streamed and not, and for calls of a tool, eight at a time, through the official OpenAI client; each request has
a prompt of its own. Every answer, with its log-probabilities, is compared with that of one stock instance, and vLLM's
own counter says how many requests got their KV from prefill. Then prefill is killed under load, stays away for two
seconds and comes back, and as many other prompts are asked.
Stacks: this package's own router, vllm-router. Their environments are made when they are first used."""

EPILOG = """\
targets, for each stack and transfer mode:
  every answer is that of one stock instance; KV is handed over for each request
  no wrong answer and none without an end while prefill dies and comes back; errors are allowed
  right answers again within 60 s of prefill's return

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: tables; results/last-VERSION.json."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_quick(parser, "30 requests instead of 90")
    add_mode(parser)
    add_word(parser, "--stack", "stacks", KEEPS_LAST)
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    """Run all stacks and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.common.report import Narrator, begin, conclude, last_name
    from experiments.stacks.frontends import STACKS
    from experiments.stacks.measure import expected_of, measure, targets

    chosen = [one for one in STACKS if not options.stack or options.stack in one.name]
    if not chosen:
        names = "; ".join(one.name for one in STACKS)
        sys.stderr.write(f"found no stack that fits --stack {options.stack!r}; there are: {names}.\n")
        return 2
    modes = [options.mode] if options.mode else MODES
    began, run = begin(options.vllm)
    logs = RESULTS / run
    outcomes: list[Outcome] = []
    with Narrator(f"behind {len(chosen)} stacks, vLLM {options.vllm}") as narrator:
        expected = expected_of(range(12 if options.quick else 36), logs)
        for stack in chosen:
            for mode in modes:
                if mode in stack.modes:
                    outcomes.append(measure(stack, mode, expected, logs, narrator.say))
    is_part = bool(options.stack or options.mode)
    path = logs.with_suffix(".json") if is_part else RESULTS / f"{last_name(options.vllm, quick=options.quick)}.json"
    content = {"began": began, "outcomes": [dataclasses.asdict(one) for one in outcomes]}
    return conclude([table_of(outcomes)], [one for found in outcomes for one in targets(found)], path, content)


def table_of(outcomes: list[Outcome]) -> Table:
    """Return a row for each stack and mode."""
    from rich.table import Table

    table = Table(title="what clients got")
    for column in ("stack", "mode", "all up", "hand-overs", "prefill killed", "right again", "first token"):
        table.add_column(column)
    for one in outcomes:
        recovered = "never" if one.recovered_seconds is None else f"after {one.recovered_seconds:.1f} s"
        table.add_row(
            f"{one.stack} {one.version}",
            one.mode,
            _counts(one.calm),
            str(one.hand_overs),
            _counts(one.troubled),
            recovered,
            f"{one.first_token_ms:.0f} ms",
        )
    return table


def _counts(verdicts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in verdicts.items())


if __name__ == "__main__":
    run_main(main, parse())
