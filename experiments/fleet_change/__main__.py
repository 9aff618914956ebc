# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/fleet_change/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse

from experiments.common.command_line import add_mode, add_word, make_parser, run_main

BEFORE = "0.26.0"

DESCRIPTION = f"""\
What does it cost clients to restart, update or lose servers?

Runs two prefill and two decode servers with vLLM {BEFORE} over kvcached, pull and push. Each decode server asks both
prefill servers, and nginx is before decode. Clients ask through OpenAI's client, streamed and not, while
  every server gets SIGTERM, ends, and is started again, one after the other;
  every server is replaced by one with the other vLLM, in the same way;
  ten processes beside the servers compute for a minute;
  a prefill server is killed, then both, then a decode server, and brought back.
Nobody is told of any of this. Each answer is compared with one stock instance's."""

EPILOG = """\
targets: no wrong answer; none without an end; no error, unless a decode server is killed.

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: a table; results/last-VERSION.json with every count, versions and hardware."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    keeps = "the results file keeps the others"
    add_mode(parser, keeps)
    add_word(parser, "--change", "changes", keeps)
    return parser.parse_args()


if __name__ == "__main__":
    run_main("fleet_change.measure", parse())
