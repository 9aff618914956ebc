# SPDX-License-Identifier: Apache-2.0
"""The command line of ``kvcached-nixl top``. Imports no third-party library."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from kvcached_nixl.cli.top.target import Target, target_of_url

__all__ = ["Options", "add_arguments", "from_arguments"]

LEAST_SECONDS, MOST_SECONDS = 0.5, 3600.0


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        targets: at least one; no two have one name.
        interval_seconds: between two looks.
        once: print one table, after two looks.
    """

    targets: tuple[Target, ...]
    interval_seconds: float
    once: bool
    as_json: bool


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected seconds, {LEAST_SECONDS:g} to {MOST_SECONDS:g}")
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser."""
    parser.add_argument("url", nargs="+", metavar="URL", help="a router, whose servers are shown too, or an engine")
    parser.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="SECONDS", help="between two looks (default: %(default)s)"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="look twice, print one table and end; the default where standard output is no terminal",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON, for programs")


def from_arguments(found: argparse.Namespace, *, is_terminal: bool) -> Options:
    """Returns the options of a parsed command line.

    Raises:
        SettingsError: a URL cannot be used.
    """
    return Options(
        targets=_distinct([target_of_url(url) for url in found.url]),
        interval_seconds=found.interval,
        once=found.once or found.json or not is_terminal,
        as_json=found.json,
    )


def _distinct(targets: Sequence[Target]) -> tuple[Target, ...]:
    return tuple({one.name: one for one in targets}.values())
