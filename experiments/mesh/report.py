# SPDX-License-Identifier: Apache-2.0
"""From tenths of a run to targets, a table and a plot. Pure, but for the plot's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.targets import Verdict
from experiments.mesh.tables import STALE

if TYPE_CHECKING:
    from rich.table import Table

MOST_GROWTH = 1.25
"""Of the last tenth over the first: what else the machine does shows in both."""
STALE_KEPT = 16
REMEMBERED = ("OfferRegistry._finished",)
"""The last registrations, and requests of prefill, that were over, as many as are remembered at most."""
NEVER_EMPTY = frozenset({"TokenBuffers._free", *REMEMBERED})


@dataclass(frozen=True)
class Tenth:
    """A tenth of the hand-overs, and what engines keep when all of it has come to rest.

    Attributes:
        microseconds: of this process, for one hand-over, in both its engines.
        peers: ranks that are known, summed over all engines.
        bytes_per_peer: that engines keep beyond what they kept before the first hand-over.
        resident_mib: of the process.
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
    """One direction.

    Attributes:
        ends: by what the client got.
        done: what was done to engines.
        left: after the last hand-over and after all peers are forgotten, what is not as it was in the beginning.
    """

    mode: str
    engines: int
    tenths: Sequence[Tenth]
    ends: Mapping[str, int]
    done: Mapping[str, int]
    left: Sequence[str]


def judge(run: Run, wrong: str, failed: str) -> list[Verdict]:
    """``wrong``, ``failed``: the ends that must not be."""
    first, last = run.tenths[0], run.tenths[-1]
    cost = last.microseconds / first.microseconds
    memory = last.bytes_per_peer / first.bytes_per_peer
    grown = grown_tables(run)
    bad = [f"{run.ends[end]} have {end}" for end in (wrong, failed) if run.ends.get(end)]
    return [
        Verdict(
            f"{run.mode}: no wrong byte, and nobody without KV to whom nothing was done",
            ", ".join(bad) or "none",
            not bad,
        ),
        Verdict(
            f"{run.mode}: a hand-over, last tenth / first (<= {MOST_GROWTH})", f"{cost:.2f} x", cost <= MOST_GROWTH
        ),
        Verdict(
            f"{run.mode}: memory per peer, last / first (<= {MOST_GROWTH})", f"{memory:.2f} x", memory <= MOST_GROWTH
        ),
        Verdict(f"{run.mode}: no table grows", ", ".join(grown) or "none", not grown),
        Verdict(
            f"{run.mode}: at the end every block is free, no word is kept, every table is empty",
            ", ".join(run.left) or "so it is",
            not run.left,
        ),
    ]


def grown_tables(run: Run) -> list[str]:
    """Those that are larger in the last three tenths than in the first three.

    An entry per engine is none too many; nor are as many as deadlines keep before they clear up.
    """
    found = []
    for name in sorted({name for tenth in run.tenths for name in tenth.tables}):
        before, after = (max(tenth.tables.get(name, 0) for tenth in some) for some in (run.tenths[:3], run.tenths[-3:]))
        if after > MOST_GROWTH * before + run.engines * (STALE_KEPT if name.endswith(STALE) else 1):
            found.append(f"{name} from {before} to {after}")
    return found


def left_over(tables: Mapping[str, int], blocks: int, words: int, remembered: int) -> list[str]:
    """What is left of a mesh at rest that nobody names any more.

    Args:
        blocks: that are not free.
        words: engines that keep some.
        remembered: registrations, and requests that have ended, that all engines remember at most.
    """
    found = [f"{name} has {count}" for name, count in tables.items() if count and not _may_hold(name)]
    found += [f"{name} has {tables[name]}" for name in REMEMBERED if tables.get(name, 0) > remembered]
    if blocks:
        found.append(f"{blocks} blocks are not free")
    if words:
        found.append(f"{words} engines keep words")
    return found


def _may_hold(name: str) -> bool:
    # Counters of what was dropped have a few names for ever.
    return name in NEVER_EMPTY or name.endswith(".dropped")


def table_of(runs: Sequence[Run], title: str) -> Table:
    """One row per tenth."""
    from rich.table import Table

    table = Table(title=title)
    for column in ("direction", "tenth", "hand-overs", "µs each", "peers", "bytes per peer", "resident MiB"):
        table.add_column(column, justify="left" if column == "direction" else "right")
    for run in runs:
        for place, one in enumerate(run.tenths, 1):
            table.add_row(
                run.mode,
                str(place),
                f"{one.hand_overs:,}",
                f"{one.microseconds:.0f}",
                f"{one.peers:,}",
                f"{one.bytes_per_peer:.0f}",
                f"{one.resident_mib:.0f}",
            )
    return table


def table_of_ends(runs: Sequence[Run]) -> Table:
    """What clients got, and what was done to engines."""
    from rich.table import Table

    table = Table(title="what clients got; what was done to engines")
    for column in ("direction", "what", "how often"):
        table.add_column(column, justify="right" if column == "how often" else "left")
    for run in runs:
        for counts in (run.ends, run.done):
            for what, count in counts.items():
                table.add_row(run.mode, what, f"{count:,}")
    return table


def plot(runs: Sequence[Run], title: str, path: Path) -> None:
    """Cost of a hand-over and memory per peer over the tenths."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (cost, memory) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    for run in runs:
        done, places = 0, []
        for tenth in run.tenths:
            done += tenth.hand_overs
            places.append(done)
        cost.plot(places, [tenth.microseconds for tenth in run.tenths], marker="o", markersize=3, label=run.mode)
        memory.plot(places, [tenth.bytes_per_peer for tenth in run.tenths], marker="o", markersize=3, label=run.mode)
    for panel, label in ((cost, "µs of one core for a hand-over"), (memory, "bytes per peer")):
        panel.set(xlabel="hand-overs", ylabel=label)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
