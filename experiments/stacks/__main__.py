# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/stacks/run.sh``: serve through each stack, kill prefill, report. ``--help`` explains."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.command_line import KEEPS_LAST, MODES, add_mode, add_quick, add_word, make_parser, run_main

if TYPE_CHECKING:
    from rich.table import Table

    from experiments.stacks.measure import Outcome
    from experiments.stacks.overhead import Overhead

RESULTS = Path(__file__).resolve().parent / "results"

DESCRIPTION = """\
Do other projects' stacks get right answers from a prefill and a decode server with kvcached, and errors when prefill
dies?

Starts one prefill and one decode engine in each stack's own way, with its own router, unchanged. Asks for completions
and chats, streamed and not, and for calls of a tool, eight at a time, through the official OpenAI client; each request
has a prompt of its own. Every answer, with its log-probabilities, is compared with that of one stock instance, and
vLLM's own counter says how many requests got their KV from prefill. Then prefill is killed under load, stays away for
two seconds and comes back, and as many other prompts are asked. At last the stack runs twice at the same time, with and
without kvcached, and both are timed by turns.
Stacks: none (decode asks prefill), vllm-router, Ray Serve LLM, Dynamo, vLLM's toy proxy and push demo,
production-stack.
Ray and Dynamo are run with vLLM 0.28.0. production-stack is on no package index: set PRODUCTION_STACK to a checkout.
What else they need is installed on first use: up to 470 MB."""

EPILOG = """\
targets, for each stack and transfer mode:
  every answer is that of one stock instance; KV is handed over for each request
  no wrong answer and none without an end while prefill dies and comes back; errors are allowed, also on streams, but a
  stream does not just break off
  right answers again within 60 s of prefill's return
  first token, and 24 requests, take at most 1.1 times as long as with the stock connector

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: tables; results/last-VERSION.json."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_quick(parser, "30 requests instead of 90, and no stock connector")
    add_mode(parser)
    add_word(parser, "--stack", "stacks", KEEPS_LAST)
    parser.add_argument(
        "--engines",
        metavar="N",
        type=int,
        default=1,
        help=f"of each role (%(default)s); with more than one, each is restarted under load; {KEEPS_LAST}",
    )
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    """Run all stacks and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    import openai

    from experiments.common.report import Narrator, begin, conclude, last_name
    from experiments.common.servers import ServerError
    from experiments.stacks.measure import expected_of, measure, targets
    from experiments.stacks.overhead import measure_overhead, targets_of_overhead
    from experiments.stacks.stacks import STACKS

    chosen = [one for one in STACKS if not options.stack or options.stack in one.name]
    if not chosen:
        names = "; ".join(one.name for one in STACKS)
        sys.stderr.write(f"found no stack that fits --stack {options.stack!r}; there are: {names}.\n")
        return 2
    modes = [options.mode] if options.mode else MODES
    began, run = begin(options.vllm)
    logs = RESULTS / run
    outcomes: list[Outcome] = []
    overheads: list[Overhead] = []
    skipped: list[str] = []
    with Narrator(f"behind {len(chosen)} stacks, vLLM {options.vllm}") as narrator:
        expected = expected_of(range(12 if options.quick else 36), logs)
        for stack in chosen:
            if reason := stack.reason_to_skip(options.vllm, options.engines):
                skipped.append(f"{stack.name}: {reason}")
                narrator.say(f"not run: {skipped[-1]}")
                continue
            for mode in modes:
                if mode in stack.modes:
                    outcomes.append(measure(stack, mode, expected, logs, narrator.say, options.engines))
                    if mode in stack.stock_modes and not options.quick and options.engines == 1:
                        try:
                            overheads.append(measure_overhead(stack, mode, logs, narrator.say))
                        except (ServerError, openai.OpenAIError) as error:
                            skipped.append(f"{stack.name}, {mode}, beside the stock connector: {str(error)[:200]}")
                            narrator.say(f"not run: {skipped[-1]}")
    if not outcomes:
        sys.stderr.write(f"found nothing to run; {'; '.join(skipped) or 'no stack has that mode'}.\n")
        return 2
    is_part = bool(options.stack or options.mode or options.engines > 1)
    path = logs.with_suffix(".json") if is_part else RESULTS / f"{last_name(options.vllm, quick=options.quick)}.json"
    content = {
        "began": began,
        "outcomes": [dataclasses.asdict(one) for one in outcomes],
        "overheads": [dataclasses.asdict(one) for one in overheads],
        "not run": skipped,
    }
    verdicts = [one for found in outcomes for one in targets(found)]
    verdicts += [one for found in overheads for one in targets_of_overhead(found)]
    return conclude(
        [table_of(outcomes), *([table_of_overheads(overheads)] if overheads else [])], verdicts, path, content
    )


def table_of(outcomes: list[Outcome]) -> Table:
    """Return a row for each stack and mode."""
    from experiments.common.tables import make_table

    rows = []
    for one in outcomes:
        recovered = "never" if one.recovered_seconds is None else f"after {one.recovered_seconds:.1f} s"
        counts = (_counts(one.calm), str(one.hand_overs), _counts(one.troubled))
        rows.append([f"{one.stack} {one.version}", one.mode, *counts, recovered, _counts(one.rolling) or "not run"])
    columns = ("stack", "mode", "all up", "hand-overs", "prefill killed", "right again", "each restarted")
    return make_table("what clients got", columns, rows)


def table_of_overheads(overheads: list[Overhead]) -> Table:
    """Return a row for each stack and mode."""
    from experiments.common.tables import make_table

    rows = []
    for one in overheads:
        first = (f"{one.first_token_ms:.0f} ms", f"{one.stock_first_token_ms:.0f} ms", f"{one.first_token_ratio:.2f}")
        batch = (f"{one.batch_ms:.0f} ms", f"{one.stock_batch_ms:.0f} ms", f"{one.batch_ratio:.2f}")
        rows.append([one.stack, one.mode, *first, *batch])
    columns = ("stack", "mode", "first token", "stock", "ratio", "24 requests", "stock", "ratio")
    return make_table("beside the stock connector, without kvcached", columns, rows)


def _counts(verdicts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in verdicts.items())


if __name__ == "__main__":
    run_main(main, parse())
