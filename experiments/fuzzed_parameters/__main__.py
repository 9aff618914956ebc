# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/fuzzed_parameters/run.sh``: send malformed parameters, judge the answers. ``--help`` explains."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.command_line import MODES, add_mode, add_policy, add_seed, make_parser, run_main
from experiments.common.targets import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from experiments.common.servers import ServerSpec
    from experiments.fuzzed_parameters.traffic import Found

RESULTS = Path(__file__).resolve().parent / "results"

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


def specs(mode: str, policy: str) -> list[ServerSpec]:
    """Return the configurations of P and D."""
    from experiments.common.device import layout
    from experiments.common.model import PADDED, make_model
    from experiments.common.servers import prefill_and_decode
    from experiments.common.transfer_config import nixl
    from experiments.fuzzed_parameters.endpoints import TEMPLATE

    extra = {"transfer_mode": mode, "handover_timeout": 5, "kv_lease_duration": 6}
    return prefill_and_decode(
        mode,
        nixl("", extra, kv_load_failure_policy=policy),
        model=make_model(PADDED),
        dtype="float32",
        environment={"ENABLE_KVCACHED": "true", **layout(), "KVCACHED_HOSTVMM_GIB": "2"},
        max_model_len=1024,
        arguments=("--chat-template", TEMPLATE),
        forks=True,
    )


def judge(mode: str, found: Found, alive: bool) -> list[Verdict]:
    """Return the targets of one mode."""
    return [
        Verdict(f"{mode}: no HTTP 200 with wrong tokens", f"{len(found.wrong)}", not found.wrong),
        Verdict(f"{mode}: no request hangs", f"{len(found.hangs)}", not found.hangs),
        Verdict(f"{mode}: both servers are alive and serve correctly", "yes" if alive else "no", alive),
    ]


def fuzz_mode(
    mode: str, options: argparse.Namespace, logs: Path, progress: Callable[[str], None]
) -> tuple[list[Verdict], dict[str, Any]]:
    """Run one mode; returns its verdicts and its part of the results file.

    Raises:
        ServerError: a server did not start.
    """
    from experiments.common.client import AnswerError
    from experiments.common.servers import ServerError, running
    from experiments.fuzzed_parameters.traffic import Fuzz

    with running(specs(mode, options.policy), logs) as servers:
        fuzz = Fuzz(servers, mode, options.seed, progress)
        alive, detail = True, ""
        try:
            asyncio.run(fuzz.run(options.count))
            for server in servers:
                server.check_alive()
        except (AssertionError, AnswerError, ServerError) as error:
            alive, detail = False, str(error)
        found = fuzz.found
    return judge(mode, found, alive), {
        "mode": mode,
        "requests": found.verdicts.total(),
        "verdicts": dict(found.verdicts),
        "by change": dict(sorted(found.by_change.items())),
        "by endpoint": dict(sorted(found.by_endpoint.items())),
        "wrong": found.wrong,
        "hangs": found.hangs,
        "not served": detail,
    }


def main(options: argparse.Namespace) -> int:
    """Run the modes and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.common.report import Narrator, begin, conclude, last_name

    began, stamp = begin(options.vllm)
    verdicts: list[Verdict] = []
    told = []
    with Narrator(f"malformed parameters, vLLM {options.vllm}") as narrator:
        for mode in (options.mode,) if options.mode else MODES:
            narrator.say(f"{mode}: starting")
            reached, found = fuzz_mode(mode, options, RESULTS / stamp, narrator.update)
            narrator.say(f"{mode}: {found['verdicts']}")
            verdicts += reached
            told.append(found)
    path = RESULTS / f"{stamp if options.mode else last_name(options.vllm)}.json"
    content = {"began": began, "policy": options.policy, "seed": options.seed, "modes": told}
    return conclude([], verdicts, path, content)


if __name__ == "__main__":
    run_main(main, parse())
