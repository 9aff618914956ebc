# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/bench/run.sh QUESTION``: measure, compare with the targets, report. ``--help`` explains."""

from __future__ import annotations

import argparse
from types import MappingProxyType

from experiments.common.command_line import (
    KEEPS_LAST,
    add_count,
    add_quick,
    add_rounds,
    add_word,
    make_parser,
    run_main,
)

QUESTIONS = MappingProxyType(
    {
        "push_vs_pull": """\
How much sooner does a client get its first token when prefill pushes KV than when decode pulls it?
  Stock pull; stock push (vLLM 0.28); and over kvcached's contiguous memory: pull, push of whole requests, and push
  streamed chunk by chunk while prefill computes. Over shared memory; TCP; and, where a network namespace can be made,
  TCP over a link that carries KV 1.2 times as fast as prefill computes it here. Prompts of 128 to 8,192 tokens, 1, 2, 4
  and 8 at a time. Time to first token, time per output token, and how long the transfer goes on after prefill's last
  step. --only names transports.
targets, medians:
  over TCP, time to first token, pull / streamed push: >= 1.5 from 1,024 tokens up, never below 1
  streamed push: the transfer time left after the last step is <= 1.1 x that of a prompt of one chunk
  time to first token, stock push / streamed push: >= 1.2 from 2,048 tokens up""",
        "memory_path": """\
What does staging cost, and how much memory does it free sooner? The direct path, and a slab in host memory:
  memory       a server's resident memory besides kvcached's pages, with 1, 8 and 60 GiB reserved; and the size that
               vLLM's own host buffer would have
  first-token  time to first token over TCP and shared memory; also for a pull whose every hand-over is verified
  pages        how long prefill's blocks stay in use after its last step, and their pages mapped; and how much of its
               pool is mapped under load, when decode gets a request half a second after prefill's answer
  --only names parts.
targets:
  resident memory beyond the direct path's: at most 1.05 x the slab, whatever the reserved size
  time to first token over TCP: at most 1.15 x the direct path's (over shared memory it has no target)
  prefill's blocks stay in use for at most 1.2 x the time of the copy""",
        "family_cost": """\
What does it cost to hand over a model that keeps KV in several KV-cache groups?
  Gemma 4 (full attention and sliding windows, with blocks of their own size), Nemotron-H (Mamba2 states and full
  attention), and a model with one group. Stock pull (with the layout of states that it wants), and this package's pull
  in both layouts and streamed push. Time to first token, and descriptors and bytes a prompt, which both servers count
  (vllm:nixl_*). --only names models; --rounds is 10.
targets, for each model, medians:
  time to first token, pull contiguous / stock pull       <= 1.15
  a prompt's descriptors, contiguous / non-contiguous     <= 0.5""",
        "bench_serve": """\
What does vLLM's own load generator measure with prefill/decode, beside stock prefill/decode?
  `vllm bench serve` with random prompts of 512 to 1,536 tokens and answers of 32 to 96, against one prefill and one
  decode server, pull and push: decode that asks prefill, over kvcached; the same behind vllm-router; vLLM's own
  connectors without kvcached, behind vllm-router; and one instance with as many threads as both servers together.
  --only names transfer modes; --rounds is 3.
targets: every request is answered, with KV from prefill. Decode that asks, beside stock: at least as many requests a
  second; first and further tokens as soon, and for as little CPU time of all servers and the router (medians of the
  ratios of the rounds). The speed beside one instance has no target: where all share cores, P/D cannot be faster.""",
        "asking": """\
Is a first token later when decode asks prefill than when a router does?
  One prefill and one decode server. The same requests in turn: to decode, which asks prefill; and as a router sends
  them, to prefill and with its answer to decode (pull), or to both at once (push). Prompts of 1,024 and 4,096 tokens, 1
  and 8 at a time. --only names the transfer mode; --rounds is 20.
targets: the median first token comes no later than with a router""",
        "conversations": """\
How late are first tokens of further turns, where KV is kept, is on another server, or is asked for again?
  8 conversations of 6 turns, with time to think, and histories of up to 8,192 tokens. One stock instance, which keeps
  all of it (stock); decode that keeps it (home); three servers that ask each other, each turn on another one (other);
  decode that asks prefill for whatever is missing (asks); and stock P/D behind vLLM's proxy, which keeps it on both
  sides. Each answer is compared with stock's. --only names arms; --rounds is 3.
  --faults: instead of times, answers while servers are killed, shut down, get other weights and are short of memory.
targets, medians, from turn 2 on:
  time to first token, home / stock <= 1.15; other / stock <= 1.3; asks / home and stock P/D / home >= 2
  bytes moved: at most those of the blocks that are missing where the turn is asked
  no answer is wrong, and none an error; with --faults, errors only where the request's own server died""",
        "traces": """\
Do the spans of a request account for its time to first token?
  A prefill and a decode server that asks it, both with --otlp-traces-endpoint, and a collector. Requests are streamed,
  one after the other, each with a W3C trace context of its own. Pull, push, and both where KV is staged through host
  memory. Decode's spans before the first token, and prefill's while decode asks, are added up. --only names arms. A
  whole run draws docs/trace.png from a request of the first two arms.
targets, for each arm:
  the spans of prefill and decode have the client's trace, and every state of the hand-over is there
  they add up to the time to first token: within 5 % for the median request, within 10 % for any""",
    }
)
"""What each question asks, and its targets; the module of the same name answers it."""

DESCRIPTION = """\
What does a hand-over cost? Each question compares arms, whose servers run at the same time and take turns.

""" + "\n\n".join(f"{name}: {text}" for name, text in QUESTIONS.items())

EPILOG = """\
exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: tables; results/last-VERSION-QUESTION.json with every sample, versions and hardware, and a plot beside it."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    parser.add_argument("question", choices=QUESTIONS, metavar="QUESTION", help=f"one of {', '.join(QUESTIONS)}")
    add_quick(parser, "fewer settings and rounds")
    add_rounds(parser, None, "instead of the question's; not of all questions")
    add_word(parser, "--only", "settings or arms", KEEPS_LAST, default="")
    for what in ("conversations", "turns", "history-tokens"):
        add_count(parser, f"--{what}", None, f"of the question conversations; {KEEPS_LAST}")
    parser.add_argument("--faults", action="store_true", help="of the question conversations, in files of its own")
    options = parser.parse_args()
    if options.turns == 1:
        parser.error("found --turns 1, expected at least 2")
    return options


if __name__ == "__main__":
    run_main("bench.samples", parse())
