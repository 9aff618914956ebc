# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/stacks/run.sh``: serve through each stack, kill prefill, report. ``--help`` explains."""

from __future__ import annotations

import argparse

from experiments.common.command_line import KEEPS_LAST, add_mode, add_quick, add_word, make_parser, run_main

DESCRIPTION = """\
Do other projects' stacks get right answers from a prefill and a decode server with kvcached, and errors when prefill
dies?

Starts one prefill and one decode engine in each stack's own way, with its own router, unchanged. Asks for completions
and chats, streamed and not, and for calls of a tool, eight at a time, through the official OpenAI client; each request
has a prompt of its own. Every answer, with its log-probabilities, is compared with that of one stock instance, and
vLLM's own counter says how many requests got their KV from prefill. Then prefill is killed under load, stays away for
two seconds and comes back, and as many other prompts are asked.
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

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: tables; results/last-VERSION.json."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_quick(parser, "30 requests instead of 90")
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


if __name__ == "__main__":
    run_main("stacks.report", parse())
