# SPDX-License-Identifier: Apache-2.0
"""``python -m experiments NAME``: the command line of all experiments, and what ``--help`` says of each.

Imports only the standard library: ``--help`` has to work without an environment.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

DEFAULT_VLLM = (os.environ.get("KVCACHED_NIXL_VLLM") or "0.28.0").split()[-1]
"""Without ``--vllm``; must be the same as in experiments/run.sh."""
PART = "does not write last-VERSION files"
KEEPS = "the results keep their rows of the others"
FAMILIES = """a family of experiments/common/families.py (gemma4, nemotron-h, ...) in place of the model with
grouped-query attention; writes last-VERSION-FAMILY.json"""
POLICY = "kv_load_failure_policy (%(default)s)"

Option = tuple[str, dict[str, Any]]


def _at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of at least 1")
    return int(text)


def _number(option: str, what: str) -> Option:
    return option, {"type": _at_least_one, "metavar": "N", "help": what}


def _only(things: str, files: str = PART) -> Option:
    words = f"only {things} whose name contains WORD; repeatable; {files}"
    return "--only", {"metavar": "WORD", "action": "append", "default": [], "help": words}


def _mode(files: str = PART) -> Option:
    return "--mode", {"choices": ("pull", "push"), "help": f"only this transfer mode; {files}"}


def _quick(less: str) -> Option:
    return "--quick", {"action": "store_true", "help": f"{less}; writes last-VERSION-quick files"}


QUESTIONS = ("push_vs_pull", "memory_path", "family_cost", "bench_serve", "asking", "conversations", "traces")
"""Of ``bench``; the module of the same name answers each."""

EXPERIMENTS: Mapping[str, tuple[str, tuple[Option, ...]]] = MappingProxyType(
    {
        "byte_equivalence": (
            "run",
            (
                _quick("float32 only, fewer zeroed blocks, forked engines"),
                ("--brief", {"action": "store_true", "help": f"as --quick, with one arm per transfer mode; {PART}"}),
                _mode(KEEPS),
                _only("arms", KEEPS),
                ("--model", {"metavar": "FAMILY", "help": FAMILIES}),
            ),
        ),
        "bench": (
            "comparison",
            (
                ("question", {"choices": QUESTIONS, "metavar": "QUESTION", "help": f"one of {', '.join(QUESTIONS)}"}),
                _quick("fewer settings and rounds"),
                _number("--rounds", "instead of the question's; not of all questions"),
                _only("settings or arms"),
            ),
        ),
        "lease_recovery": (
            "report",
            (
                _number("--rounds", "how often each fault is inflicted (2)"),
                _only('arms, such as "staged push" or "hybrid",'),
                ("--policy", {"choices": ("fail", "recompute"), "default": "recompute", "help": POLICY}),
                _quick("each fault once, in the arms pull and push if --only names none"),
            ),
        ),
        "shared_device": (
            "report",
            (
                _quick("less load, and two arms if --only names none"),
                ("--seed", {"type": int, "default": 1, "help": "seed of all random choices (%(default)s)"}),
                _only('arms of the table, or "overload",'),
            ),
        ),
        "fleet_change": ("measure", (_mode(), _only("changes"))),
        "dashboard": ("queries", ()),
        "stacks": (
            "measure",
            (
                _quick("30 requests instead of 90"),
                _mode(),
                _only("stacks"),
                _number("--engines", f"of each role (1); of several, each is restarted under load; {PART}"),
            ),
        ),
    }
)
"""Experiment -> its module, which has the docstring that ``--help`` prints, and ``main(run)``, which returns the exit
status (of ``bench``, the question's module); and its options."""


def _docstring(experiment: str, module: str) -> str:
    source = (Path(__file__).parent / experiment / f"{module}.py").read_text()
    return ast.get_docstring(ast.parse(source)) or ""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the experiment that is named first, and its ``module``; exits as argparse does."""
    if not arguments or arguments[0] not in EXPERIMENTS:
        sys.exit(f"usage: python -m experiments {'|'.join(EXPERIMENTS)} [OPTION...]")
    experiment, (module, options) = arguments[0], EXPERIMENTS[arguments[0]]
    description = _docstring(experiment, module)
    if experiment == "bench":
        description += "".join(f"\n\n{name}: {_docstring(experiment, name)}" for name in QUESTIONS)
    epilog = "exit status: 0 all targets reached; 1 a target was missed; 2 setup failed\n"
    epilog += f"Results: tables; JSON with versions and hardware in experiments/{experiment}/results/"
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("run.sh", description=description, epilog=epilog, formatter_class=raw)
    parser.add_argument(
        "--vllm", metavar="VERSION", default=DEFAULT_VLLM, help="vLLM whose environment is used (%(default)s)"
    )
    for name, how in options:
        parser.add_argument(name, **how)
    without = {"question": "", "quick": False, "only": [], "mode": None, "engines": None}
    found = parser.parse_args(arguments[1:], argparse.Namespace(experiment=experiment, **without))
    found.module = f"experiments.{experiment}.{found.question or module}"
    return found


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: that of the experiment, or 2 if a server failed, so that nothing can be judged."""
    options = parse(arguments)
    import httpx

    from experiments.common.client import AnswerError
    from experiments.common.report import Run
    from experiments.common.servers import ServerError

    try:
        run = Run(options, Path(__file__).parent / options.experiment / "results")
        return int(importlib.import_module(options.module).main(run))
    except (ServerError, AnswerError, httpx.HTTPError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
