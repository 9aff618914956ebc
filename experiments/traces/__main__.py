# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/traces/run.sh``: trace requests, add their spans up, draw two of them. ``--help`` explains."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from experiments.common.command_line import add_quick, add_word, make_parser, run_main

RESULTS = Path(__file__).resolve().parent / "results"
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "trace.png"
REQUESTS, QUICK_REQUESTS, PROMPT_TOKENS = 8, 3, 4000

DESCRIPTION = """\
Do the spans of a request account for its time to first token?

Starts a prefill and a decode server that asks it, both with --otlp-traces-endpoint, and a collector. Streams requests,
one after the other, each with a W3C trace context of its own, and measures the time to first token as a client does.
With pull, with push, and with both where KV is staged through host memory. Decode's spans before the first token, and
prefill's while decode asks, are added up."""

EPILOG = """\
targets, for each arm:
  the spans of prefill and decode have the client's trace, and every state of the hand-over is there
  they add up to the time to first token: within 5 % for the median request, within 10 % for any

exit status: 0 all targets reached; 1 a target was missed
Results: tables; results/last-VERSION.json with versions and hardware; docs/trace.png, a request of the first two
arms."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    files = "writes last-VERSION-quick files, and no picture"
    add_quick(parser, f"{QUICK_REQUESTS} requests an arm instead of {REQUESTS}", files)
    add_word(parser, "--arm", "arms", "writes no files")
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.common.report import Narrator, conclude, last_name
    from experiments.traces.measure import ARMS, Arm, Traced, run
    from experiments.traces.report import judge, plot, table_of

    arms = [arm for arm in ARMS if not options.arm or options.arm in arm.name]
    found: dict[Arm, list[Traced]] = {}
    with (
        Narrator(f"traces of {', '.join(arm.name for arm in arms)}") as narrator,
        tempfile.TemporaryDirectory() as logs,
    ):
        for arm in arms:
            place = Path(logs) / arm.name.replace(", ", "-")
            found[arm] = run(arm, QUICK_REQUESTS if options.quick else REQUESTS, PROMPT_TOKENS, place, narrator.update)
            narrator.say(f"{arm.name}: {len(found[arm])} requests")
    verdicts = [verdict for arm, traced in found.items() for verdict in judge(arm, traced)]
    name = last_name(options.vllm, quick=options.quick)
    rows = [
        {"arm": arm.name, "first_token_seconds": one.first_token_seconds, "share": one.share}
        for arm, traced in found.items()
        for one in traced
    ]
    path = None if options.arm else RESULTS / f"{name}.json"
    content = {"prompt_tokens": PROMPT_TOKENS, "requests": rows}
    status = conclude([table_of(found)], verdicts, path, content)
    if not (options.arm or options.quick):
        plot({arm: traced[-1] for arm, traced in list(found.items())[:2]}, PICTURE)
    return status


if __name__ == "__main__":
    run_main(main, parse())
