# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/fuzzed_parameters/run.sh``: send malformed parameters, judge the answers. ``--help`` explains."""

from __future__ import annotations

import argparse

from experiments.common.command_line import add_mode, add_policy, add_seed, make_parser, run_main

DESCRIPTION = """\
How do servers handle malformed kv_transfer_params, and malformed requests around them?

Starts a prefill and a decode server over kvcached, with pull and then with push, and sends thousands of requests to
every endpoint that can carry such parameters: completions, chat and batches of chats, responses, messages, generate,
invocations; streamed and not. Each request has faults, drawn from a seed: one to three in its parameters, one to three
in the rest of the request, or both.

Faults of the parameters: keys dropped, set to values of another type or out of range, or taken from other requests;
other block ids; other hosts and ports, where no process listens or the listener never answers; both roles; only a role;
the fields that are left by a router that rebuilds them one by one; nested a hundred levels deep; used twice; another
prompt.

Faults of the body and the headers: ids of requests that prefill keeps; ids of any type and length; requests that vLLM
rejects under such ids; models, adapters, priorities, n, streams, cache salts, forms of prompts, and limits; beam
search, log-probabilities; parameters of any type; fields removed or set to any value; other ranks of data parallelism.

Between these, valid requests are handed over."""

EPILOG = """\
targets, each mode:
  no answer with HTTP 200 that has no tokens, or a token that one server alone would not generate
  every request ends within 60 s (handover_timeout is 5 s), and no request is left in a server afterwards
  both servers stay alive, and hand over a valid request of every prompt correctly: before, every 50 requests, and after

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: a table; results/last-VERSION.json."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    parser.add_argument("--count", type=int, default=10_000, help="malformed requests in each mode (%(default)s)")
    add_seed(parser)
    add_mode(parser)
    add_policy(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run_main("fuzzed_parameters.traffic", parse())
