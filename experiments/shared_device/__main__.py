# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/shared_device/run.sh``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse

from experiments.common.command_line import KEEPS_LAST, add_quick, add_word, make_parser, run_main

PARTS = ("table", "overload")

DESCRIPTION = """\
What is elastic memory with prefill/decode worth to an operator?

table      Two models on one device (the emulated one, of host memory) that is smaller than the sum of their peaks.
           Their loads swell at opposite times. Every arm gets the same requests at the same times, whether earlier ones
           were answered or not (open loop), with prompts of 256 to 1,536 tokens:
             static split, stock P/D    half of the device for each model; vLLM's own connector and memory
             static split, stock push   the same with NixlPushConnector
             kvcached without P/D       one server for each model computes prompts and answers
             kvcached's own Nixl patch  as kvcached 0.1.6 ships it, without this package
             this package               decode asks prefill: pull, push, and pull staged through a slab
             ..., without revocation    nothing is taken back for want of memory (give_way_after): not by prefill, nor,
                                        in push, by decode
             ..., behind vllm-router    prefill computes whatever decode can take
           All but this package's are behind vllm-router, too.
overload   One model, whose decode has little memory. Its capacity is measured; then twice as many requests come as it
           can answer, to decode that asks and to vllm-router.

Clients leave when they have no token after 15 s. Each answer is compared with that of one stock server."""

EPILOG = """\
columns: goodput is right answers within the latency bound, a second of load. Wasted is the share of prefilled tokens
whose KV no decode has received. Taken back counts offers that prefill revoked, again the requests that a server had to
compute again for want of blocks. Left: clients without a token after 15 s. Retry-After: refusals with that header.

targets: no wrong answer and no request without an end with this package; its memory stays within the device; at twice
the capacity no prefill is wasted where decode asks, and every refusal says when to try again.
Which arm is fastest is reported without a target.

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: tables; results/last-VERSION.json with every request, versions and hardware; results/last-VERSION.png: the
table's memory over time."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_quick(parser, "less load, and two arms if no --arm is given", KEEPS_LAST)
    parser.add_argument("--seed", type=int, default=1, help="seed of all random choices (%(default)s)")
    parser.add_argument("--part", choices=PARTS, help=f"only this part; {KEEPS_LAST}")
    add_word(parser, "--arm", "arms of the table", KEEPS_LAST, default="")
    return parser.parse_args()


if __name__ == "__main__":
    run_main("shared_device.report", parse())
