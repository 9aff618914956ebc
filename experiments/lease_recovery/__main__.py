# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/lease_recovery/run.sh``: inflict faults, judge answers, time recovery. ``--help`` explains."""

from __future__ import annotations

import argparse

from experiments.common.command_line import KEEPS_LAST, add_quick, add_rounds, add_word, make_parser, run_main

DESCRIPTION = """\
What do clients get when servers die, freeze or respond late, and how soon does the pair recover?

Starts a prefill and a decode server with a pool of 96 blocks and leases of 3 s, and sends requests without a pause,
while faults are inflicted in random order: either server is killed at a random moment and a new one is started on its
ports; either is frozen (SIGSTOP) for less and for more than a lease; prefill stays away until decode has freed its
memory; clients disconnect in every phase, also while their requests wait for blocks of decode; a decode request has the
parameters of a lease that has ended and whose blocks other requests have used; an operator pauses one or both servers,
in every mode, resets caches with running requests, and changes the weights of one server after the other. In arms
that are short of memory, kvcached's limits change at random, a neighbour on a server's device takes memory, gives it
back and waits for more, and servers are shut down (SIGTERM).
Arms: kvcached with pull and push, direct and staged, with registrations that follow its pages and that do not, and with
a model whose layers keep states (Nemotron-H); and the stock connector for comparison. Every answer is compared with the
answer of one server alone."""

EPILOG = """\
targets, for the arms over kvcached:
  at least 300 requests; none answered with HTTP 200 and a wrong token; none that hangs
  after every fault requests are answered correctly again, without restarting anything else
  a pause or a reset of a serving engine returns within 5 s
  blocks and kvcached's mapped pages are back at their idle level within a lease and two heartbeats, on both sides

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: a table; results/last-VERSION.json, with the text of every wrong answer and every error."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_rounds(parser, 2, "how often each fault is inflicted")
    add_word(parser, "--arm", "arms", f'such as "staged push" or "hybrid"; {KEEPS_LAST}', default="")
    parser.add_argument(
        "--policy", choices=("fail", "recompute"), default="recompute", help="kv_load_failure_policy (%(default)s)"
    )
    add_quick(parser, "each fault once, in the arms pull and push if no --arm is given", KEEPS_LAST)
    return parser.parse_args()


if __name__ == "__main__":
    run_main("lease_recovery.report", parse())
