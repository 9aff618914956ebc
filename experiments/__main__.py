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
KEEPS_LAST = "does not write last-VERSION files"
KEEPS_ROWS = "last-VERSION.json keeps its rows of the other arms"
KEEPS_OTHERS = "the results file keeps the others"
FAMILIES = """a family of experiments/common/families.py (gemma4, nemotron-h, ...) in place of the model with
grouped-query attention; writes last-VERSION-FAMILY.json"""
POLICY = "kv_load_failure_policy (%(default)s)"

Option = tuple[str, dict[str, Any]]


def _at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of at least 1")
    return int(text)


def _number(option: str, what: str, default: int | None = None) -> Option:
    limits = "at least 1" if default is None else "at least 1; %(default)s"
    return option, {"type": _at_least_one, "default": default, "metavar": "N", "help": f"{what} ({limits})"}


def _word(option: str, things: str, files: str = KEEPS_LAST, **more: Any) -> Option:
    words = f"only {things} whose name contains WORD; {files}"
    return option, {"metavar": "WORD", "default": "", "help": words, **more}


def _quick(less: str, files: str = "writes last-VERSION-quick files") -> Option:
    return "--quick", {"action": "store_true", "help": f"{less}; {files}"}


def _mode(files: str = KEEPS_LAST) -> Option:
    return "--mode", {"choices": ("pull", "push"), "help": f"only this transfer mode; {files}"}


def _size(size: str, what: str) -> Option:
    return f"--{size}", {"dest": "size", "action": "store_const", "const": size, "default": "full", "help": what}


QUESTIONS = ("push_vs_pull", "memory_path", "family_cost", "bench_serve", "asking", "conversations", "traces")
"""Of ``bench``; the module of the same name answers each."""

EXPERIMENTS: Mapping[str, tuple[str, tuple[Option, ...]]] = MappingProxyType(
    {
        "byte_equivalence": (
            "run",
            (
                _mode(KEEPS_ROWS),
                _size("quick", "float32 only, fewer zeroed blocks, forked engines"),
                _size("brief", "as --quick, with one arm per transfer mode; does not write last-VERSION.json"),
                _word("--arm", "arms", f"repeatable; {KEEPS_ROWS}", action="append", default=[]),
                ("--model", {"metavar": "FAMILY", "help": FAMILIES}),
            ),
        ),
        "bench": (
            "samples",
            (
                ("question", {"choices": QUESTIONS, "metavar": "QUESTION", "help": f"one of {', '.join(QUESTIONS)}"}),
                _quick("fewer settings and rounds"),
                _number("--rounds", "instead of the question's; not of all questions"),
                _word("--only", "settings or arms"),
            ),
        ),
        "lease_recovery": (
            "report",
            (
                _number("--rounds", "how often each fault is inflicted", 2),
                _word("--arm", "arms", f'such as "staged push" or "hybrid"; {KEEPS_LAST}'),
                ("--policy", {"choices": ("fail", "recompute"), "default": "recompute", "help": POLICY}),
                _quick("each fault once, in the arms pull and push if no --arm is given", KEEPS_LAST),
            ),
        ),
        "shared_device": (
            "report",
            (
                _quick("less load, and two arms if no --arm is given", KEEPS_LAST),
                ("--seed", {"type": int, "default": 1, "help": "seed of all random choices (%(default)s)"}),
                ("--part", {"choices": ("table", "overload"), "help": f"only this part; {KEEPS_LAST}"}),
                _word("--arm", "arms of the table"),
            ),
        ),
        "fleet_change": ("measure", (_mode(KEEPS_OTHERS), _word("--change", "changes", KEEPS_OTHERS))),
        "dashboard": ("queries", ()),
        "stacks": (
            "measure",
            (
                _quick("30 requests instead of 90"),
                _mode(),
                _word("--stack", "stacks"),
                _number("--engines", f"of each role; of several, each is restarted under load; {KEEPS_LAST}", 1),
            ),
        ),
    }
)
"""Experiment -> its module, which has ``main(options)``, which returns the exit status, and the docstring that
``--help`` prints; and its options."""


def _docstring(experiment: str, module: str) -> str:
    source = (Path(__file__).parent / experiment / f"{module}.py").read_text()
    return ast.get_docstring(ast.parse(source)) or ""


def parse(arguments: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """Return the module of the experiment that is named first, and the options; exits as argparse does."""
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
    return f"experiments.{experiment}.{module}", parser.parse_args(arguments[1:])


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: that of the experiment, or 2 if a server failed, so that nothing can be judged."""
    module, options = parse(arguments)
    import httpx

    from experiments.common.client import AnswerError
    from experiments.common.servers import ServerError

    try:
        status: int = importlib.import_module(module).main(options)
    except (ServerError, AnswerError, httpx.HTTPError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        status = 2
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
