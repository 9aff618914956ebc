# SPDX-License-Identifier: Apache-2.0
"""A command whose libraries are an optional extra of the same name. The other commands must run without them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcached_nixl.errors import Refused

__all__ = ["OptionalCommand"]

Options = TypeVar("Options")


@dataclass(frozen=True)
class OptionalCommand(Generic[Options]):
    """See the module.

    Attributes:
        name: of the command, and of the extra.
        add_arguments: adds its flags to a parser. Called only if the command is asked for.
        read: returns its options; raises `Refused` if they cannot be used.
        load: imports its libraries, and returns what runs it; raises `ImportError`. What that returns is the exit
            status, and it raises `Refused` if it cannot start.
        unusable_status: exit status for options that cannot be used.
    """

    name: str
    help: str
    description: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    read: Callable[[argparse.Namespace], Options]
    load: Callable[[], Callable[[Options], int]]
    unusable_status: int

    def add_to(self, add: Callable[..., argparse.ArgumentParser], *, is_asked: bool) -> None:
        """Add the command to a command line; its flags only if it is asked for."""
        parser = add(
            self.name,
            help=self.help,
            description=self.description,
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if is_asked:
            self.add_arguments(parser)

    def run(self, found: argparse.Namespace) -> int:
        """Run it with a parsed command line. Returns the exit status."""
        try:
            options = self.read(found)
        except Refused as error:
            sys.stderr.write(f"{error}\n")
            return self.unusable_status
        try:
            run = self.load()
        except ImportError as error:
            sys.stderr.write(f"{self.name}: {error}. Run pip install '.[{self.name}]' in a clone to install it.\n")
            return 1
        try:
            return run(options)
        except Refused as error:
            sys.stderr.write(f"{error}\n")
            return 1
