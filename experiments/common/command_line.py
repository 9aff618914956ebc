# SPDX-License-Identifier: Apache-2.0
"""The command line of all experiments. Imports only the standard library: --help has to work without an environment."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any, NoReturn

DEFAULT_VLLM = (os.environ.get("KVCACHED_NIXL_VLLM") or "0.28.0").split()[-1]
"""Without ``--vllm``; must be the same as in experiments/run.sh."""
MODES = ("pull", "push")
KEEPS_LAST = "does not write last-VERSION files"


def make_parser(description: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser with ``--vllm``, which every experiment has."""
    parser = argparse.ArgumentParser(
        prog="run.sh", description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm", metavar="VERSION", default=DEFAULT_VLLM, help="vLLM whose environment is used (%(default)s)"
    )
    return parser


def add_quick(parser: argparse.ArgumentParser, less: str, files: str = "writes last-VERSION-quick files") -> None:
    """Add ``--quick``; ``less`` tells what it leaves out, ``files`` what becomes of the results."""
    parser.add_argument("--quick", action="store_true", help=f"{less}; {files}")


def add_mode(parser: argparse.ArgumentParser, files: str = KEEPS_LAST) -> None:
    """Add ``--mode``; ``files`` tells what becomes of the results."""
    parser.add_argument("--mode", choices=MODES, help=f"only this transfer mode; {files}")


def add_rounds(parser: argparse.ArgumentParser, default: int | None, what: str) -> None:
    """Add ``--rounds``; ``what`` each round repeats."""
    add_count(parser, "--rounds", default, what)


def add_count(parser: argparse.ArgumentParser, option: str, default: int | None, what: str) -> None:
    """Add an option that is a number of at least 1."""
    limits = "at least 1" if default is None else "at least 1; %(default)s"
    parser.add_argument(option, type=_at_least_one, default=default, metavar="N", help=f"{what} ({limits})")


def _at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of at least 1")
    return int(text)


def add_word(parser: argparse.ArgumentParser, option: str, things: str, files: str, **more: Any) -> None:
    """Add an option that chooses ``things`` by a part of their names; ``files`` tells what becomes of the results."""
    parser.add_argument(option, metavar="WORD", help=f"only {things} whose name contains WORD; {files}", **more)


def run_main(module: str, options: argparse.Namespace) -> NoReturn:
    """Call ``main(options)`` of a module of experiments, and exit with its status; with 2 if a server failed, so that
    nothing can be judged."""
    # Imported here, not at the top: --help has to work without an environment.
    import httpx

    from experiments.common.client import AnswerError
    from experiments.common.servers import ServerError

    try:
        status = importlib.import_module(f"experiments.{module}").main(options)
    except (ServerError, AnswerError, httpx.HTTPError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        status = 2
    sys.exit(status)
