# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/lease_recovery/run.sh``: inflict faults, judge answers, time recovery. ``--help`` explains."""

from __future__ import annotations

import argparse

from experiments.common.command_line import (
    KEEPS_LAST,
    add_policy,
    add_quick,
    add_rounds,
    add_word,
    make_parser,
    run_main,
)

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
answer of one server alone.

--soak instead: 10,000 hand-overs of mixed lengths, half of them pull and half push, between two servers each, with
prefix caches on both sides. One of the two is killed or stopped and restarted on its address 25 times in each
direction; the other one lives on, and is read every 50 hand-overs: memory, open files, threads, mappings, NIXL peers
and agents, kvcached's pages. A linear regression gives their rise with hand-overs and restarts. Answers are
compared with those of one stock server."""

EPILOG = """\
targets, for the arms over kvcached:
  at least 300 requests; none answered with HTTP 200 and a wrong token; none that hangs
  after every fault requests are answered correctly again, without restarting anything else
  a pause or a reset of a serving engine returns within 5 s
  blocks and kvcached's mapped pages are back at their idle level within a lease and two heartbeats, on both sides

targets of --soak:
  10,000 hand-overs and 50 restarts; none wrong, none that hangs, no error but around a restart
  nothing that lives on grows: rise and two standard errors beyond a stock server's are below the bounds in soak.py

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: tables; results/last-VERSION.json, with the text of every wrong answer and every error; with --soak
results/soak-VERSION.json, with all readings."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_rounds(parser, 2, "how often each fault is inflicted")
    add_word(parser, "--arm", "arms", f'for example "pull", "staged", "staged push", "hybrid" or "stock"; {KEEPS_LAST}')
    add_policy(parser)
    parser.add_argument("--soak", action="store_true", help="many hand-overs and restarts, in place of the faults")
    add_quick(parser, "with --soak: 300 hand-overs, 4 restarts, growth not judged", "writes quick-soak-VERSION.json")
    return parser.parse_args()


if __name__ == "__main__":
    run_main("lease_recovery.report", parse())
