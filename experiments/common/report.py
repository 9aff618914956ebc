# SPDX-License-Identifier: Apache-2.0
"""Output of an experiment: progress while it runs, tables at the end, JSON with versions and hardware."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

from experiments.common.device import MODES
from experiments.common.servers import REPOSITORY, ServerError
from kvcached_nixl.vllm.adapter.versions import found_version

T = TypeVar("T")
LIBRARIES = ("vllm", "kvcached", "nixl", "torch", "transformers", "numpy")
PROGRESS_SECONDS = 15.0


class Run:
    """One run of an experiment, from its command line. Prints progress on stderr.

    Attributes:
        logs: a folder of its own.
        last: the file with the results of the last whole run.
        path: of the results of this one: of a part, a file of its own.
    """

    def __init__(self, options: argparse.Namespace, results: Path) -> None:
        now = datetime.datetime.now(datetime.timezone.utc)
        self.options, self.vllm, self.quick = options, options.vllm, options.quick
        self.title = f"{options.question or options.experiment}, vLLM {self.vllm}"
        self.began = now.isoformat(timespec="seconds")
        name = "".join(f"-{one}" for one in (options.question, self.quick and "quick") if one)
        self.logs = results / f"{now:%Y%m%dT%H%M%SZ}-{self.vllm}{name}"
        self.last = results / f"last-{self.vllm}{name}.json"
        is_part = options.only or options.mode or options.engines
        self.path = Path(f"{self.logs}.json") if is_part else self.last
        self._console = Console(stderr=True, highlight=False)
        self._started = time.monotonic()
        self._last_update = 0.0
        self.say(self.title)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        self._console.print(f"[dim]{self.seconds:6.1f} s[/dim]  {text}", soft_wrap=True)

    def update(self, text: str) -> None:
        """Say what is going on, now and then."""
        if self.seconds - self._last_update >= PROGRESS_SECONDS:
            self._last_update = self.seconds
            self.say(text)

    @property
    def modes(self) -> Sequence[str]:
        """The transfer modes that are asked for."""
        return (self.options.mode,) if self.options.mode else MODES

    def times(self, full: int, quick: int) -> int:
        return quick if self.quick else self.options.rounds or full

    def chosen(self, some: Iterable[T]) -> list[T]:
        """Return those whose names have a word in them that ``--only`` gives, or are one. Raises ServerError if a word
        fits none."""
        words, known = self.options.only or [""], {str(getattr(one, "name", one)): one for one in some}
        for word in words:
            if not any(word.lower() in name.lower() for name in known):
                raise ServerError(f"found none that fits --only {word!r}; there are: {'; '.join(known)}.")
        return [one for name, one in known.items() if any(word.lower() in name.lower() for word in words)]

    def write(self, content: Mapping[str, Any], path: Path | None = None) -> None:
        """Write ``content`` with versions, hardware and commit added. Atomic: no reader sees an incomplete file."""
        path, where = path or self.path, {"commit": commit(), "versions": versions(), "hardware": hardware()}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({**where, "began": self.began, **content}, indent=1) + "\n")
        partial.replace(path)

    def conclude(self, tables: Iterable[Table], verdicts: Sequence[Verdict], content: Mapping[str, Any]) -> int:
        """Print the tables and the targets, write them and ``content``, and return the exit status: 1 if a target was
        missed."""
        words = {True: "[green]reached[/green]", False: "[red]MISSED[/red]"}
        rows = [(one.target, one.found, words[one.reached]) for one in verdicts]
        for table in (*tables, make_table("targets", ("target", "found", ""), rows)):
            stdout_console().print(table)
        self.write({"targets": [verdict._asdict() for verdict in verdicts], **content})
        return 0 if all(verdict.reached for verdict in verdicts) else 1


def versions() -> dict[str, str | None]:
    """Return the version of each library that results depend on, None where it is not installed."""
    return {"python": platform.python_version(), **{name: found_version(name) for name in LIBRARIES}}


def hardware() -> dict[str, Any]:
    model = re.search(r"(?m)^model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "processor": model[1] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def commit() -> str | None:
    """Return the commit of the working tree, with ``+changes`` if files differ from it; None outside a repository, or
    without git."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--abbrev=12", "--dirty=+changes"]
    # An unpacked archive may lie in another project's repository.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(REPOSITORY.parent)}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(command, env=environment, stderr=subprocess.DEVNULL, text=True).strip() or None
    return None


def stdout_console() -> Console:
    """Return the console for results: colours only on a terminal; elsewhere wide enough not to cut words."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140, highlight=False)


class Verdict(NamedTuple):
    """One target. ``target`` is its text with the limit, ``found`` the measured figure with its unit."""

    target: str
    found: str
    reached: bool


_NUMBER = re.compile(r"[-+(]?\d|-?\Z")


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table. Columns whose every cell begins with a number, or is empty, are justified to the right. Rows may
    be shorter."""
    made = list(rows)
    table = Table(title=title)
    for place, column in enumerate(columns):
        is_number = all(_NUMBER.match(cell) for row in made for cell in row[place : place + 1])
        table.add_column(column, justify="right" if is_number else "left")
    for row in made:
        table.add_row(*row)
    return table


# --------------------------------------------------------------------------------- plots, as pictures without a display


def make_panels(count: int, width: float, height: float, *, a_row: int = 0, **more: Any) -> tuple[Any, Any]:
    """Return a figure of ``width`` by ``height`` inches, and its ``count`` panels, ``a_row`` of them side by side; 0:
    all."""
    # Imported here, not at the top: tables need no matplotlib.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    columns = min(a_row or count, count)
    panels = figure.subplots(-(-count // columns), columns, squeeze=False, **more).flatten()
    for one in panels[count:]:
        one.remove()
    return figure, panels[:count]


def finish(panel: Any, **properties: Any) -> None:
    panel.set(**properties)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def save(figure: Any, title: str, path: Path) -> None:
    if title:
        figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
