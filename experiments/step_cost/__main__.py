# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/step_cost/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse

from experiments.common.command_line import add_quick, make_parser, run_main

ARMS = ("schedule", "hand-over", "idle")

DESCRIPTION = """\
What do waiting hand-overs cost a step of the engine, and an idle engine? Three arms:

schedule   vLLM's own scheduler, stepped as EngineCore.step does it (schedule(), which includes the connector's
           metadata, and update_from_output(); no model, no workers), with 32 running and 0 to 10,000 waiting requests:
           decode requests whose KV never arrives, or prefill requests that are kept for a decode that never comes.
           Without a connector, with the stock one, and with this package. Times are CPU milliseconds of the engine's
           thread, so other load on the machine does not count.
hand-over  This package alone: both halves of an engine over the in-memory transport, both transfer modes. Measured:
           an ordinary step on the engine's thread, with the Step pickled as vLLM's multiprocess executor does it; a
           turn of the transfer thread; and the size of heartbeats.
idle       Real servers: one alone, one with two data-parallel ranks, one with the connector below MultiConnector. Their
           hand-overs wait, have another request queued behind them, are kept for decode, or are paused. Measured: CPU
           seconds per second of all their processes."""

EPILOG = """\
targets (medians; the 99th percentile is shown, too):
  schedule: for each number of waiting requests, a step with this package takes at most 1.25 times a step with the stock
    connector, plus 0.2 ms
  hand-over: with 10,000 waiting, on either side and with either transfer mode: a step < 1 ms, an idle turn < 0.1 ms; no
    heartbeat message larger than 4,096 bytes
  idle: each state costs less than 0.05 CPU seconds per second more than the same server without requests

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: tables; results/last-VERSION.json (hand-over), last-VERSION-schedule.json and last-VERSION-idle.json with
versions and hardware."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_quick(parser, "fewer repetitions")
    words = f"one of {', '.join(ARMS)}; repeatable; all arms by default"
    parser.add_argument("--arm", action="append", choices=ARMS, metavar="ARM", help=words)
    return parser.parse_args()


if __name__ == "__main__":
    run_main("step_cost.report", parse())
