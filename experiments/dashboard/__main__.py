# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/dashboard/run.sh``: load pairs, ask Prometheus, draw, report. ``--help`` explains."""

from __future__ import annotations

import argparse

from experiments.common.command_line import KEEPS_LAST, add_word, make_parser, run_main

PICTURE = "docs/deploy/prometheus/dashboard.png"

DESCRIPTION = """\
Does every query of the dashboard and of the alert rules return data from a real Prometheus?

Starts Prometheus with docs/deploy/prometheus/prometheus.yaml and the alert rules, scraping each second. Then, one after
the other, pairs of prefill and decode over kvcached, where clients ask decode, and decode asks prefill:
  pull    KV moves directly. Requests fail on purpose: parameters that were used before, those of another prompt, a
          lower memory limit; at last both servers are killed under load
  push    prefill writes while it computes
  staged  KV moves through a small slab in host memory, whose slots are waited for
Each query of docs/deploy/prometheus/dashboard.json (its variables chosen as "All") and of alerts.yaml (without its
threshold) is run over the whole time, and the dashboard's panels are drawn from the answers.

Prometheus has to be installed: apt-get install prometheus (Debian, Ubuntu)."""

EPILOG = f"""\
targets: every query returns a finite value; a query for a metric that does not exist returns none, which shows that the
check can fail; decode answers most of the requests of each pair; when a pair is idle again, its memory is back.

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: a table; results/last-VERSION.json with every query, what it returned, and which alerts fired; {PICTURE}."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_word(parser, "--pair", "pairs", f"{KEEPS_LAST}, and most queries return nothing", default="")
    return parser.parse_args()


if __name__ == "__main__":
    run_main("dashboard.report", parse())
