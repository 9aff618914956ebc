# SPDX-License-Identifier: Apache-2.0
"""Computes targets, tables and a plot from the tenths of a run. No side effects except the plot's file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.plots import finish, line, make_panels, save
from experiments.common.tables import make_table
from experiments.common.targets import Verdict
from experiments.mesh.tables import STALE

if TYPE_CHECKING:
    from rich.table import Table

MOST_GROWTH = 1.25
"""Limit of the last tenth relative to the first. Not 1: other load on the machine shows in both."""
STALE_KEPT = 16
REMEMBERED = ("Registrations._finished",)
"""Tables that remember finished registrations and finished prefill requests, up to a fixed capacity."""
NEVER_EMPTY = frozenset({"TokenBuffers._free", *REMEMBERED})


@dataclass(frozen=True)
class Tenth:
    """A tenth of the hand-overs, and the state that engines keep after all of them have ended.

    Attributes:
        microseconds: CPU time of this process for one hand-over, in both its engines.
        peers: number of known ranks, summed over all engines.
        bytes_per_peer: memory of engines per known rank, beyond their memory before the first hand-over.
        resident_mib: resident memory of the process.
        tables: entries of each table, summed over all engines.
    """

    hand_overs: int
    microseconds: float
    peers: int
    bytes_per_peer: float
    resident_mib: float
    tables: Mapping[str, int]


@dataclass(frozen=True)
class Run:
    """The run of one transfer mode.

    Attributes:
        ends: number of hand-overs, by what the client got.
        done: number of faults, by kind.
        left: state that is left after the last hand-over, when all peers are forgotten.
    """

    mode: str
    engines: int
    tenths: Sequence[Tenth]
    ends: Mapping[str, int]
    done: Mapping[str, int]
    left: Sequence[str]


def judge(run: Run, wrong: str, failed: str) -> list[Verdict]:
    """Return the targets of a run. ``wrong``, ``failed``: keys of ``run.ends`` that must not occur."""
    first, last = run.tenths[0], run.tenths[-1]
    cost = last.microseconds / first.microseconds
    memory = last.bytes_per_peer / first.bytes_per_peer
    grown = grown_tables(run)
    bad = [f"{run.ends[end]} have {end}" for end in (wrong, failed) if run.ends.get(end)]
    found = (
        ("no wrong byte, and no client without KV unless one of its engines had a fault", ", ".join(bad), not bad),
        (f"a hand-over, last tenth / first (<= {MOST_GROWTH})", f"{cost:.2f} x", cost <= MOST_GROWTH),
        (f"memory per peer, last / first (<= {MOST_GROWTH})", f"{memory:.2f} x", memory <= MOST_GROWTH),
        ("no table grows", ", ".join(grown), not grown),
        (
            "at the end every block is free, no ownership token is left, every table is empty",
            ", ".join(run.left),
            not run.left,
        ),
    )
    return [Verdict(f"{run.mode}: {target}", words or "none", reached) for target, words, reached in found]


def grown_tables(run: Run) -> list[str]:
    """Return the tables that are larger in the last three tenths than in the first three.

    Allowed beyond `MOST_GROWTH`: one entry per engine; for stale deadlines, as many as are kept before a clean-up.
    """
    found = []
    for name in sorted({name for tenth in run.tenths for name in tenth.tables}):
        before, after = (max(tenth.tables.get(name, 0) for tenth in some) for some in (run.tenths[:3], run.tenths[-3:]))
        if after > MOST_GROWTH * before + run.engines * (STALE_KEPT if name.endswith(STALE) else 1):
            found.append(f"{name} from {before} to {after}")
    return found


def left_over(tables: Mapping[str, int], blocks: int, words: int, remembered: int) -> list[str]:
    """Return the state left in an idle mesh after all peers are forgotten.

    Args:
        blocks: number of blocks that are not free.
        words: number of engines with ownership tokens left.
        remembered: most finished registrations and requests that all engines together remember.
    """
    found = [f"{name} has {count}" for name, count in tables.items() if count and not _may_hold(name)]
    found += [f"{name} has {tables[name]}" for name in REMEMBERED if tables.get(name, 0) > remembered]
    if blocks:
        found.append(f"{blocks} blocks are not free")
    if words:
        found.append(f"{words} engines keep ownership tokens")
    return found


def _may_hold(name: str) -> bool:
    # Counters of dropped messages keep a few names for ever.
    return name in NEVER_EMPTY or name.endswith(".dropped")


def table_of(runs: Sequence[Run], title: str) -> Table:
    """Return a table with one row per tenth."""
    rows = [
        [run.mode, str(place), f"{one.hand_overs:,}", f"{one.microseconds:.0f}", f"{one.peers:,}"]
        + [f"{one.bytes_per_peer:.0f}", f"{one.resident_mib:.0f}"]
        for run in runs
        for place, one in enumerate(run.tenths, 1)
    ]
    columns = ("direction", "tenth", "hand-overs", "µs each", "peers", "bytes per peer", "resident MiB")
    return make_table(title, columns, rows)


def table_of_ends(runs: Sequence[Run]) -> Table:
    """Return a table of what clients got, and of the faults of engines."""
    rows = [
        (run.mode, what, f"{count:,}") for run in runs for ends in (run.ends, run.done) for what, count in ends.items()
    ]
    return make_table("what clients got, and faults of engines", ("direction", "what", "how often"), rows)


def plot(runs: Sequence[Run], title: str, path: Path) -> None:
    """Plot the cost of a hand-over and the memory per peer over the tenths."""
    figure, (cost, memory) = make_panels(2, 10, 3.6)
    for run in runs:
        places = list(itertools.accumulate(tenth.hand_overs for tenth in run.tenths))
        line(cost, places, [tenth.microseconds for tenth in run.tenths], run.mode)
        line(memory, places, [tenth.bytes_per_peer for tenth in run.tenths], run.mode)
    for panel, label in ((cost, "µs of one core for a hand-over"), (memory, "bytes per peer")):
        finish(panel, xlabel="hand-overs", ylabel=label)
        panel.set_ylim(bottom=0)
    save(figure, title, path)
