# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/bench/run.sh QUESTION``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from experiments.bench.questions import QUESTIONS
from experiments.common.command_line import KEEPS_LAST, add_quick, add_rounds, add_word, make_parser, run_main

RESULTS = Path(__file__).resolve().parent / "results"

DESCRIPTION = """\
What does a hand-over cost? Each question compares arms, whose servers run at the same time and take turns.

""" + "\n\n".join(f"{name}: {text}" for name, text in QUESTIONS.items())

EPILOG = """\
exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: tables; results/last-VERSION-QUESTION.json with every sample, versions and hardware, and a plot beside it."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    parser.add_argument("question", choices=QUESTIONS, metavar="QUESTION", help=f"one of {', '.join(QUESTIONS)}")
    add_quick(parser, "fewer settings and rounds")
    add_rounds(parser, None, "instead of the question's; not of all questions")
    add_word(parser, "--only", "settings or arms", KEEPS_LAST, default="")
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.bench.samples import Run
    from experiments.common.report import Narrator, begin, conclude, last_name

    began, stamp = begin(options.vllm)
    with Narrator(f"{options.question}, vLLM {options.vllm}") as narrator:
        logs = RESULTS / f"{stamp}-{options.question}"
        run = Run(options.vllm, logs, narrator.update, narrator.say, options.quick, options.rounds, options.only)
        found = importlib.import_module(f"experiments.bench.{options.question}").answer(run)
    name = logs.name if options.only else last_name(f"{options.vllm}-{options.question}", quick=options.quick)
    status = conclude(found.tables, found.verdicts, RESULTS / f"{name}.json", {"began": began, **found.content})
    if found.plot is not None:
        found.plot(RESULTS / f"{name}.png")
    return status


if __name__ == "__main__":
    run_main(main, parse())
