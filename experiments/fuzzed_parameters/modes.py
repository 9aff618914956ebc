# SPDX-License-Identifier: Apache-2.0
"""One transfer mode after the other: the options and the run of both experiments that send malformed requests."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.common.command_line import add_mode, add_seed, make_parser
from experiments.common.targets import Verdict

FuzzMode = Callable[[str, argparse.Namespace, Path, Callable[[str], None]], tuple[list[Verdict], dict[str, Any]]]
"""Runs one mode: mode, options, folder for logs, progress -> its targets, and its part of the results file."""


def make_fuzz_parser(description: str, epilog: str, counted: str) -> argparse.ArgumentParser:
    """Return a parser with ``--vllm``, ``--count``, ``--seed`` and ``--mode``; ``counted`` are those of ``--count``."""
    parser = make_parser(description, epilog)
    parser.add_argument("--count", type=int, default=10_000, help=f"{counted} in each mode (%(default)s)")
    add_seed(parser)
    add_mode(parser)
    return parser


def run_modes(
    title: str, modes: Sequence[str], fuzz_mode: FuzzMode, options: argparse.Namespace, results: Path, **content: Any
) -> int:
    """Run ``modes``, write the results file, with ``content`` besides the modes, and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.common.report import Narrator, begin, conclude, last_name

    began, stamp = begin(options.vllm)
    verdicts: list[Verdict] = []
    told = []
    with Narrator(f"{title}, vLLM {options.vllm}") as narrator:
        for mode in modes:
            narrator.say(f"{mode}: starting")
            reached, found = fuzz_mode(mode, options, results / stamp, narrator.update)
            narrator.say(f"{mode}: {found['verdicts']}")
            verdicts += reached
            told.append(found)
    path = results / f"{stamp if options.mode else last_name(options.vllm)}.json"
    return conclude([], verdicts, path, {"began": began, **content, "seed": options.seed, "modes": told})
