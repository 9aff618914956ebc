# SPDX-License-Identifier: Apache-2.0
"""``python -m experiments NAME``: the command line of all experiments, and what ``--help`` says of each.

Imports only the standard library: ``--help`` has to work without an environment.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

DEFAULT_VLLM = (os.environ.get("KVCACHED_NIXL_VLLM") or "0.28.0").split()[-1]
"""Without ``--vllm``; must be the same as in experiments/run.sh."""
KEEPS_LAST = "does not write last-VERSION files"
KEEPS_ROWS = "last-VERSION.json keeps its rows of the other arms"
KEEPS_OTHERS = "the results file keeps the others"

Option = tuple[str, dict[str, Any]]


class Experiment(NamedTuple):
    """``module`` has ``main(options)``, which returns the exit status."""

    module: str
    description: str
    targets: str
    options: tuple[Option, ...]


def _at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of at least 1")
    return int(text)


def _number(option: str, what: str, default: int | None = None) -> Option:
    limits = "at least 1" if default is None else "at least 1; %(default)s"
    return option, {"type": _at_least_one, "default": default, "metavar": "N", "help": f"{what} ({limits})"}


def _word(option: str, things: str, files: str = KEEPS_LAST, **more: Any) -> Option:
    words = f"only {things} whose name contains WORD; {files}"
    return option, {"metavar": "WORD", "default": "", "help": words, **more}


def _quick(less: str, files: str = "writes last-VERSION-quick files") -> Option:
    return "--quick", {"action": "store_true", "help": f"{less}; {files}"}


def _mode(files: str = KEEPS_LAST) -> Option:
    return "--mode", {"choices": ("pull", "push"), "help": f"only this transfer mode; {files}"}


def _size(size: str, what: str) -> Option:
    return f"--{size}", {"dest": "size", "action": "store_const", "const": size, "default": "full", "help": what}


QUESTIONS = MappingProxyType(
    {
        "push_vs_pull": """\
How much sooner does a client get its first token when prefill pushes KV than when decode pulls it?
  Stock pull; stock push (vLLM 0.28); and over kvcached's contiguous memory: pull, push of whole requests, and push
  streamed chunk by chunk while prefill computes. Over shared memory; TCP; and, where a network namespace can be made,
  TCP over a link that carries KV 1.2 times as fast as prefill computes it here. --only names transports.""",
        "memory_path": """\
What does staging cost, and how much memory does it free sooner? The direct path, and a slab in host memory:
  memory       a server's resident memory besides kvcached's pages, with 1, 8 and 60 GiB reserved
  first-token  time to first token over TCP and shared memory; also for a pull whose every hand-over is verified
  pages        how long prefill's blocks stay in use after its last step, and their pages mapped; and how much of its
               pool is mapped under load, when decode gets a request half a second after prefill's answer
  --only names parts.""",
        "family_cost": """\
What does it cost to hand over a model that keeps KV in several KV-cache groups?
  Gemma 4 (full attention and windows), Nemotron-H (Mamba2 states and full attention), and a model with one group:
  stock pull, pull in both layouts, and streamed push. --only names models; --rounds is 10.""",
        "bench_serve": """\
What does vLLM's own load generator measure with prefill/decode, beside stock prefill/decode?
  `vllm bench serve` with random prompts, against one prefill and one decode server, pull and push: decode that asks
  prefill; the same behind vllm-router; vLLM's own connectors without kvcached, behind vllm-router; and one instance
  with as many threads as both servers together. --only names transfer modes; --rounds is 3.""",
        "asking": """\
Is a first token later when decode asks prefill than when a router does?
  The same servers and requests in turn: to decode, which asks prefill; and as a router sends them, to prefill and with
  its answer to decode (pull), or to both at once (push). --only names the transfer mode; --rounds is 20.""",
        "conversations": """\
How late are first tokens of further turns, where KV is kept, is on another server, or is asked for again?
  8 conversations of 6 turns, with time to think. One stock instance, which keeps all of it (stock); decode that keeps
  it (home); three servers that ask each other, each turn on another one (other); decode that asks prefill for whatever
  is missing (asks); and stock P/D behind vLLM's proxy. Each answer is compared with stock's. --only names arms;
  --rounds is 3.""",
        "traces": """\
Do the spans of a request account for its time to first token?
  A prefill and a decode server that asks it, and a collector of their spans: pull, push, and both staged through host
  memory. Decode's spans before the first token, and prefill's while decode asks, are added up. --only names arms. A
  whole run draws docs/trace.png.""",
    }
)
"""What each question of ``bench`` asks; the module of the same name answers it."""

EXPERIMENTS = MappingProxyType(
    {
        "byte_equivalence": Experiment(
            "byte_equivalence.run",
            """\
Is the output of prefill/decode disaggregation over kvcached identical to that of one stock vLLM instance?

Starts real servers, and compares token ids, log-probabilities and the SHA-256 of every transferred KV block, on the
sending and on the receiving side. Before anything is called equal, planted corruptions must be caught, and zeroing a KV
block must change the output. experiments/README.md tells which arms there are, and why the result can be trusted.

examples:
  bash experiments/byte_equivalence/run.sh                    all arms, one request at a time and 32 at a time
  bash experiments/byte_equivalence/run.sh --quick            the same in float32 only, ten minutes
  bash experiments/byte_equivalence/run.sh --brief            the same with one arm per transfer mode, three minutes
  bash experiments/byte_equivalence/run.sh --arm contiguous   only arms whose name contains this (and the reference)
  bash experiments/byte_equivalence/run.sh --model nemotron-h --quick     states beside attention""",
            """\
everything is equal, every corruption is caught, and kvcached unmaps and remaps pages during the run""",
            (
                _mode(KEEPS_ROWS),
                _size("quick", "float32 only, fewer zeroed blocks, forked engines"),
                _size("brief", "as --quick, with one arm per transfer mode; does not write last-VERSION.json"),
                _word("--arm", "arms", f"repeatable; {KEEPS_ROWS}", action="append", default=[]),
                (
                    "--model",
                    {
                        "metavar": "FAMILY",
                        "help": "a family of experiments/common/families.py (gemma4, nemotron-h, ...) in place of the "
                        "model with grouped-query attention; writes last-VERSION-FAMILY.json",
                    },
                ),
            ),
        ),
        "bench": Experiment(
            "bench.samples",
            """\
What does a hand-over cost? Each question compares arms, whose servers run at the same time and take turns.

"""
            + "\n\n".join(f"{name}: {text}" for name, text in QUESTIONS.items()),
            "printed, each with its limit. The results have the question's name, and a plot may lie beside them",
            (
                ("question", {"choices": QUESTIONS, "metavar": "QUESTION", "help": f"one of {', '.join(QUESTIONS)}"}),
                _quick("fewer settings and rounds"),
                _number("--rounds", "instead of the question's; not of all questions"),
                _word("--only", "settings or arms"),
            ),
        ),
        "lease_recovery": Experiment(
            "lease_recovery.report",
            """\
What do clients get when servers die, freeze or respond late, and how soon does the pair recover?

Starts a prefill and a decode server with a pool of 96 blocks and leases of 3 s, and sends requests without a pause
while faults are inflicted in random order: either server is killed, frozen for less and for more than a lease, paused
in every mode, reset with running requests, and given other weights; clients disconnect in every phase; a decode request
has the parameters of a lease that has ended. In arms that are short of memory, kvcached's limits change at random, a
neighbour takes memory and gives it back, and servers are shut down. Every answer is compared with one server's.""",
            """\
for the arms over kvcached:
  at least 300 requests; none answered with HTTP 200 and a wrong token; none that hangs
  after every fault requests are answered correctly again, without restarting anything else
  a pause or a reset of a serving engine returns within 5 s
  blocks and kvcached's mapped pages are back at their idle level within a lease and two heartbeats, on both sides""",
            (
                _number("--rounds", "how often each fault is inflicted", 2),
                _word("--arm", "arms", f'such as "staged push" or "hybrid"; {KEEPS_LAST}'),
                (
                    "--policy",
                    {
                        "choices": ("fail", "recompute"),
                        "default": "recompute",
                        "help": "kv_load_failure_policy (%(default)s)",
                    },
                ),
                _quick("each fault once, in the arms pull and push if no --arm is given", KEEPS_LAST),
            ),
        ),
        "shared_device": Experiment(
            "shared_device.report",
            """\
What is elastic memory with prefill/decode worth to an operator?

table      Two models on one device that is smaller than the sum of their peaks; their loads swell at opposite times.
           Every arm gets the same requests at the same times, whether earlier ones were answered or not. The arms: a
           static split with stock P/D, kvcached without P/D, kvcached's own Nixl patch, and this package: pull, push,
           staged, without revocation (give_way_after), and behind vllm-router as the arms of others are.
overload   One model, whose decode has little memory. Its capacity is measured; then twice as many requests come as it
           can answer, to decode that asks and to vllm-router.

Clients leave when they have no token after 15 s. Each answer is compared with that of one stock server.
Goodput is right answers within the latency bound, a second of load. Wasted is the share of prefilled tokens whose KV no
decode has received. Taken back counts offers that prefill revoked, again the requests that a server had to compute
again for want of blocks. Left: clients without a token after 15 s. Retry-After: refusals with that header.""",
            """\
no wrong answer and no request without an end with this package; its memory stays within the device; at twice the
capacity no prefill is wasted where decode asks, and every refusal says when to try again""",
            (
                _quick("less load, and two arms if no --arm is given", KEEPS_LAST),
                ("--seed", {"type": int, "default": 1, "help": "seed of all random choices (%(default)s)"}),
                ("--part", {"choices": ("table", "overload"), "help": f"only this part; {KEEPS_LAST}"}),
                _word("--arm", "arms of the table"),
            ),
        ),
        "fleet_change": Experiment(
            "fleet_change.measure",
            """\
What does it cost clients to restart, update or lose servers?

Two prefill and two decode servers with vLLM 0.26.0 over kvcached, pull and push. Each decode server asks both prefill
servers, and nginx is before decode. While clients ask, every server is restarted, then replaced by one with the other
vLLM; ten processes beside the servers compute for a minute; and a prefill server is killed, then both, then a decode
server. Nobody is told of any of this. Each answer is compared with one stock instance's.""",
            "no wrong answer; none without an end; no error, unless a decode server is killed",
            (_mode(KEEPS_OTHERS), _word("--change", "changes", KEEPS_OTHERS)),
        ),
        "dashboard": Experiment(
            "dashboard.queries",
            """\
Does every query of the dashboard and of the alert rules return data from a real Prometheus?

Starts Prometheus (apt-get install prometheus), and one after the other pairs of prefill and decode that it scrapes:
pull, whose requests also fail on purpose, and whose servers are killed at last; push; and staged through a small slab.
Each query of docs/deploy/prometheus/dashboard.json and of alerts.yaml (without its threshold) is run over the whole
time, and docs/deploy/prometheus/dashboard.png is drawn from the answers.""",
            """\
every query returns a finite value, and one for a metric that does not exist returns none; decode answers most of the
requests of each pair; when a pair is idle again, its memory is back""",
            (),
        ),
        "stacks": Experiment(
            "stacks.measure",
            """\
Do other projects' stacks get right answers from a prefill and a decode server with kvcached, and errors when prefill
dies?

Starts one prefill and one decode engine in each stack's own way, with its own router, unchanged. Asks for completions
and chats, streamed and not, and for calls of a tool, eight at a time, through the official OpenAI client. Every answer
is compared with that of one stock instance, and vLLM's own counter says how many requests got their KV from prefill.
Then prefill is killed under load, comes back, and as many other prompts are asked.
Ray and Dynamo are run with vLLM 0.28.0. production-stack is on no package index: set PRODUCTION_STACK to a checkout.
What else they need is installed on first use: up to 470 MB.""",
            """\
for each stack and transfer mode:
  every answer is that of one stock instance; KV is handed over for each request
  no wrong answer and none without an end while prefill dies and comes back; errors are allowed, also on streams, but a
  stream does not just break off
  right answers again within 60 s of prefill's return""",
            (
                _quick("30 requests instead of 90"),
                _mode(),
                _word("--stack", "stacks"),
                _number("--engines", f"of each role; of several, each is restarted under load; {KEEPS_LAST}", 1),
            ),
        ),
    }
)


def parse(arguments: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """Return the module of the experiment that is named first, and its options; exits as argparse does."""
    if not arguments or arguments[0] not in EXPERIMENTS:
        sys.exit(f"usage: python -m experiments {'|'.join(EXPERIMENTS)} [OPTION...]")
    one = EXPERIMENTS[arguments[0]]
    epilog = f"targets: {one.targets}.\n\nexit status: 0 all targets reached; 1 a target was missed; 2 setup failed\n"
    epilog += f"Results: tables; JSON with versions and hardware in experiments/{arguments[0]}/results/"
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("run.sh", description=one.description, epilog=epilog, formatter_class=raw)
    parser.add_argument(
        "--vllm", metavar="VERSION", default=DEFAULT_VLLM, help="vLLM whose environment is used (%(default)s)"
    )
    for name, how in one.options:
        parser.add_argument(name, **how)
    return one.module, parser.parse_args(arguments[1:])


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: that of the experiment, or 2 if a server failed, so that nothing can be judged."""
    module, options = parse(arguments)
    import httpx

    from experiments.common.client import AnswerError
    from experiments.common.servers import ServerError

    try:
        status: int = importlib.import_module(f"experiments.{module}").main(options)
    except (ServerError, AnswerError, httpx.HTTPError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        status = 2
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
