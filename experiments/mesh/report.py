# SPDX-License-Identifier: Apache-2.0
"""Runs both directions; targets, and tables of the tenths of a run; and how large all tables of this package are."""

from __future__ import annotations

import argparse
import collections
import gc
import logging
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.table import Table

from experiments.common.command_line import MODES
from experiments.common.memory_transport import MemoryGate, MemoryTransport, Network
from experiments.common.report import Narrator, Verdict, conclude, last_name, make_table
from experiments.mesh.members import End
from experiments.mesh.mesh import LEASE_SECONDS, Mesh, NotAtRest
from kvcached_nixl.deadlines import Deadlines, ManualClock
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.worker.transfer import context
from kvcached_nixl.worker.transfer.context import RecentSet
from kvcached_nixl.worker.transfer.ownership_tokens import BUCKETS
from kvcached_nixl.worker.transfer.peers import FORGOTTEN_SECONDS

_TABLES = (dict, set, list, collections.deque)
STALE = ", stale"
_SHARED = (ManualClock, MemoryGate, MemoryTransport, Network)
"""Not counted: these are shared, and their content belongs to the mesh, not to an engine."""
_NOT_COUNTED = (type, types.ModuleType, types.FunctionType, np.ndarray, *_SHARED)


def sizes(roots: Iterable[object]) -> Counter[str]:
    """Return ``Class.attribute`` -> entries, summed over all objects of this package reachable from the roots.

    An object that is itself a table has the name of the attribute that refers to it. Entries of `Deadlines` that were
    moved or dropped are counted separately, with the suffix `STALE`.
    """
    found: Counter[str] = Counter()
    for place, one in _objects(roots):
        if isinstance(one, Deadlines):
            found[place] += len(one)
            found[place + STALE] += len(one._heap) - len(one)
            continue
        for name, value in _attributes(one):
            if isinstance(value, _TABLES):
                found[place if isinstance(one, RecentSet) else f"{type(one).__name__}.{name}"] += len(value)
    return found


def num_bytes(roots: Iterable[object]) -> int:
    """Return the bytes of all objects of this package reachable from the roots, with their tables and contents."""
    seen: set[int] = set()
    total = 0
    for _, one in _objects(roots):
        waiting: list[Any] = [one, *(value for _, value in _attributes(one))]
        while waiting:
            value = waiting.pop()
            if id(value) in seen or isinstance(value, _NOT_COUNTED):
                continue
            seen.add(id(value))
            total += sys.getsizeof(value)
            waiting += _parts(value)
    return total


def _objects(roots: Iterable[object]) -> Iterator[tuple[str, object]]:
    """Yield each reachable object of this package once, with the name of the attribute that refers to it."""
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [("", root) for root in roots]
    while waiting:
        place, one = waiting.pop()
        if id(one) in seen or isinstance(one, _SHARED):
            continue
        seen.add(id(one))
        if isinstance(one, types.MethodType):
            waiting.append((place, one.__self__))
        elif isinstance(one, (*_TABLES, tuple)):
            waiting += ((place, part) for part in _parts(one))
        elif type(one).__module__.startswith("kvcached_nixl."):
            yield place, one
            waiting += ((f"{type(one).__name__}.{name}", value) for name, value in _attributes(one))


def _attributes(one: object) -> list[tuple[str, Any]]:
    fields = getattr(one, "__struct_fields__", ())
    return [*getattr(one, "__dict__", {}).items(), *((name, getattr(one, name)) for name in fields)]


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (set, list, tuple, frozenset, collections.deque)):
        return list(value)
    return []


# ---------------------------------------------------------------------------------------------------------- a whole run


RESULTS = Path(__file__).resolve().parent / "results"
FULL, QUICK = (64, 100_000, 100), (8, 2_000, 40)
"""Engines of each role, hand-overs, and hand-overs between two faults of engines."""
AT_ONCE = 4
TENTHS = 10
MOST_GROWTH = 1.25
"""Limit of the last tenth relative to the first. Not 1: other load on the machine shows in both."""
STALE_KEPT = 16
REMEMBERED = ("Writer._finished",)
"""Tables that remember finished registrations and finished prefill requests, up to a fixed capacity."""
NEVER_EMPTY = frozenset({"TokenBuffers._free", *REMEMBERED})


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Many engines log a warning for each engine that ends.
    logging.disable(logging.WARNING)
    size = QUICK if options.quick else FULL
    runs: list[Run] = []
    verdicts: list[Verdict] = []
    with Narrator(f"a mesh of {size[0]} and {size[0]} engines, {size[1]:,} hand-overs each way") as narrator:
        for mode in MODES:
            try:
                run = measure(mode, *size, options.seed, narrator.say)
            except NotAtRest as left:
                verdicts.append(Verdict(f"{mode}: every request ends", f"not {left}", False))
                continue
            runs.append(run)
            verdicts += judge(run)

    title = f"{size[0]} prefill and {size[0]} decode engines"
    name = last_name(options.vllm, quick=options.quick)
    content = {"seed": options.seed, "runs": [asdict(run) for run in runs]}
    return conclude([table_of(runs, title), table_of_ends(runs)], verdicts, RESULTS / f"{name}.json", content)


def measure(mode: str, engines: int, hand_overs: int, events: int, seed: int, say: Callable[[str], None]) -> Run:
    """Run one transfer mode. Raises `NotAtRest` if engines still have state of requests that have ended."""
    count = hand_overs // TENTHS
    # Small enough that every RecentSet is full before the first tenth ends; growth beyond the capacity is then visible.
    remembered = context.CAPACITY = max(1, count // engines // 4)
    mesh = Mesh(TransferMode(mode), engines, AT_ONCE * engines, events, seed)
    empty_bytes = num_bytes(mesh.roots)
    tenths = []
    for place in range(TENTHS):
        before = mesh.seconds
        mesh.run(count)
        spent = mesh.seconds - before
        mesh.settle()
        # Names of ended requests are kept for one lease.
        mesh.rest(2 * LEASE_SECONDS)
        gc.collect()
        tables = sizes(mesh.roots)
        peers = tables["Peers._links"]
        tenths.append(
            Tenth(
                hand_overs=count,
                microseconds=spent / count * 1e6,
                peers=peers,
                bytes_per_peer=(num_bytes(mesh.roots) - empty_bytes) / max(1, peers),
                resident_mib=psutil.Process().memory_info().rss / 2**20,
                tables={name: found for name, found in tables.items() if found},
            )
        )
        say(f"{mode}, {(place + 1) * count:,} hand-overs: {tenths[-1].microseconds:.0f} µs each")
    mesh.rest(2 * FORGOTTEN_SECONDS)
    mesh.settle()
    pools = [member.engine.pool for member in mesh.members]
    left = left_over(
        sizes(mesh.roots),
        blocks=sum(pool.num_blocks - len(set(pool.free_blocks)) for pool in pools),
        words=sum(bool(member.engine.token_table[:BUCKETS].any()) for member in mesh.members),
        remembered=2 * engines * remembered,
    )
    ends = {end.value: number for end, number in mesh.ends.items()}
    return Run(mode, 2 * engines, tenths, ends, dict(mesh.done), left)


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


def judge(run: Run) -> list[Verdict]:
    """Return the targets of a run."""
    first, last = run.tenths[0], run.tenths[-1]
    cost = last.microseconds / first.microseconds
    memory = last.bytes_per_peer / first.bytes_per_peer
    grown = grown_tables(run)
    bad = [f"{run.ends[end]} have {end}" for end in (End.WRONG.value, End.FAILED.value) if run.ends.get(end)]
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
