# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/mesh/run.sh``: run both directions, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.command_line import MODES, add_quick, add_seed, make_parser, run_main
from experiments.common.targets import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from experiments.mesh.report import Run

RESULTS = Path(__file__).resolve().parent / "results"
FULL, QUICK = (64, 100_000, 100), (8, 2_000, 40)
"""Engines of each role, hand-overs, and hand-overs between two faults of engines."""
AT_ONCE = 4
TENTHS = 10

DESCRIPTION = """\
Do hand-over cost and engine memory stay flat over many hand-overs, while engines restart and disappear?

Runs 64 prefill and 64 decode engines in one process: the real scheduler and worker halves of this package, over the
in-memory transport, driven step by step on a virtual clock. A router hands over 100,000 requests from any prefill to
any decode engine, first with one transfer mode, then with the other. Some requests are in decode's prefix cache, some
clients disconnect, and with push, half of the requests reach both sides at the same time. Once in a hundred hand-overs
an engine has a fault: it restarts at the same or at another port, is replaced by another engine, is away for a while,
disappears without notice, or loses a connection. Every byte that decode receives is compared."""

EPILOG = """\
targets, for both transfer modes:
  no wrong byte; no client without its KV unless one of its two engines had a fault
  a hand-over in the last tenth of the run costs <= 1.25 x one in the first tenth; the same for memory per peer
  no table of any engine grows (entries in the last three tenths, compared with the first three)
  at the end every block is free, no ownership token is left, and every table is empty once unused peers are forgotten

exit status: 0 all targets reached; 1 a target was missed
Results: tables; results/last-VERSION.json with versions and hardware; results/last-VERSION.png."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_seed(parser)
    add_quick(parser, "8 and 8 engines, 2,000 hand-overs")
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.common.report import Narrator, conclude, last_name
    from experiments.mesh.cases import End
    from experiments.mesh.mesh import NotAtRest
    from experiments.mesh.report import judge, plot, table_of, table_of_ends

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
            verdicts += judge(run, End.WRONG.value, End.FAILED.value)

    title = f"{size[0]} prefill and {size[0]} decode engines"
    name = last_name(options.vllm, quick=options.quick)
    content = {"seed": options.seed, "runs": [dataclasses.asdict(run) for run in runs]}
    status = conclude([table_of(runs, title), table_of_ends(runs)], verdicts, RESULTS / f"{name}.json", content)
    if runs:
        plot(runs, title, RESULTS / f"{name}.png")
    return status


def measure(mode: str, engines: int, hand_overs: int, events: int, seed: int, say: Callable[[str], None]) -> Run:
    """Run one transfer mode. Raises `NotAtRest` if engines still have state of requests that have ended."""
    import gc

    import psutil

    from experiments.mesh.mesh import LEASE_SECONDS, Mesh
    from experiments.mesh.report import Run, Tenth, left_over
    from experiments.mesh.tables import num_bytes, sizes
    from kvcached_nixl.transfer_mode import TransferMode
    from kvcached_nixl.worker.transfer import context
    from kvcached_nixl.worker.transfer.ownership_tokens import BUCKETS
    from kvcached_nixl.worker.transfer.peers import FORGOTTEN_SECONDS

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


if __name__ == "__main__":
    run_main(main, parse())
