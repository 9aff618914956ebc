# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/fleet_change/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
from pathlib import Path

from experiments.common.command_line import MODES, add_mode, add_word, make_parser, run_main

RESULTS = Path(__file__).resolve().parent / "results"
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


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.common.report import REPOSITORY, Narrator, begin, conclude, last_name
    from experiments.fleet_change.measure import CHANGES, Phase, expected_of, measure
    from experiments.fleet_change.report import judge, table_of

    began, stamp = begin(options.vllm)
    logs = RESULTS / stamp
    made = subprocess.run(["bash", "experiments/env.sh", BEFORE], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    if made.returncode:
        return 2
    before = Path(made.stdout.splitlines()[-1]) / "bin" / "vllm"
    with Narrator(f"changes of a fleet, vLLM {BEFORE} to {options.vllm}") as narrator:
        expected = expected_of(before, logs, narrator.say)
        modes = (options.mode,) if options.mode else MODES
        changes = [change for change in CHANGES if (options.change or "") in change]
        found = [measure(mode, before, expected, changes, logs / mode, narrator.say) for mode in modes]
    path = RESULTS / f"{last_name(options.vllm)}.json"
    known = json.loads(path.read_text())["phases"] if (options.change or options.mode) and path.is_file() else []
    measured = {(one.mode, one.change): one for one in (*(Phase(**phase) for phase in known), *sum(found, []))}
    order = [(mode, change) for mode in MODES for change in CHANGES]
    phases = [measured[one] for one in order if one in measured]
    content = {"began": began, "before": BEFORE, "phases": [dataclasses.asdict(one) for one in phases]}
    return conclude([table_of(phases)], judge(phases), path, content)


if __name__ == "__main__":
    run_main(main, parse())
