# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/mesh/run.sh``: run both directions, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse

from experiments.common.command_line import add_quick, add_seed, make_parser, run_main

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
Results: tables; results/last-VERSION.json with versions and hardware."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_seed(parser)
    add_quick(parser, "8 and 8 engines, 2,000 hand-overs")
    return parser.parse_args()


if __name__ == "__main__":
    run_main("mesh.report", parse())
