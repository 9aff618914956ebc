# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/fuzzed_parameters/run.sh``: wrong parameters, and what servers make of them. ``--help``."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.default_vllm import DEFAULT_VLLM
from experiments.common.targets import Verdict, as_json, exit_status, table_of_targets

if TYPE_CHECKING:
    from experiments.common.servers import ServerSpec
    from experiments.fuzzed_parameters.traffic import Found

RESULTS = Path(__file__).resolve().parent / "results"
MODES = ("pull", "push")

DESCRIPTION = """\
What do servers do with kv_transfer_params, and with requests around them, that nobody should send?

Starts a prefill and a decode server over kvcached, pulling and then pushing, and sends thousands of requests to every
endpoint that can carry such parameters: completions, chat and batches of it, responses, messages, generate,
invocations; streamed and not. Drawn from a seed, one to three things of each are wrong.

The parameters: keys dropped, set to values of another type or out of all range, taken from other requests; other block
ids; other hosts and ports, where nobody listens or nobody answers; both roles; nothing but a role; what a router leaves
that rebuilds them field by field; nested a hundred deep; used twice; with another prompt.

The body and the headers: ids of requests that prefill keeps, of any type and length; requests that vLLM rejects under
such ids; models, adapters, priorities, n, streams, cache salts, forms of prompts and limits; beam search,
log-probabilities; parameters of any type; fields without and of any value; other ranks of data parallelism.

In between, honest requests are handed over."""

EPILOG = """\
targets, each mode:
  no answer with HTTP 200 and a token that a server alone would not have given, or with none
  no request without an end within 60 s (handover_timeout is 5 s), and afterwards none in a server
  both servers live, and hand an honest request of every prompt over rightly, before, every 50 requests and afterwards

exit status: 0 all targets reached; 1 one was missed; 2 something could not be set up
Results: a table; results/last-VERSION.json."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.sh", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", metavar="VERSION", default=DEFAULT_VLLM, help="vLLM to serve with (%(default)s)")
    parser.add_argument("--count", type=int, default=10_000, help="wrong requests in each mode (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn from (%(default)s)")
    parser.add_argument("--mode", choices=MODES, help="only this one; no last-VERSION file")
    parser.add_argument(
        "--policy", choices=("fail", "recompute"), default="recompute", help="kv_load_failure_policy (%(default)s)"
    )
    return parser.parse_args(arguments)


def specs(mode: str, policy: str) -> list[ServerSpec]:
    """P and D."""
    from experiments.common.model import PADDED, make_model
    from experiments.common.servers import ServerSpec
    from experiments.fuzzed_parameters.endpoints import TEMPLATE

    return [
        ServerSpec(
            name=f"{mode}-{side}",
            model=make_model(PADDED),
            dtype="float32",
            kv_transfer={
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {
                    "num_threads": 0,
                    "transfer_mode": mode,
                    "handover_timeout": 5,
                    "kv_lease_duration": 6,
                },
            },
            environment={
                "ENABLE_KVCACHED": "true",
                "KVCACHED_CONTIGUOUS_LAYOUT": "true",
                "KVCACHED_HOSTVMM_GIB": "2",
            },
            max_model_len=1024,
            arguments=("--chat-template", TEMPLATE),
            forks=True,
        )
        for side in ("prefill", "decode")
    ]


def judge(mode: str, found: Found, alive: bool) -> list[Verdict]:
    """The targets of one mode."""
    return [
        Verdict(f"{mode}: no HTTP 200 with wrong tokens", f"{len(found.wrong)}", not found.wrong),
        Verdict(f"{mode}: no request without an end", f"{len(found.hangs)}", not found.hangs),
        Verdict(f"{mode}: both servers live and serve rightly", "yes" if alive else "no", alive),
    ]


def main(options: argparse.Namespace) -> int:
    """Run the modes and return the exit status."""
    # Only here: --help has to work without the environment that these need.
    from experiments.common.client import AnswerError
    from experiments.common.report import Narrator, stdout_console, write_json
    from experiments.common.servers import ServerError, running
    from experiments.fuzzed_parameters.traffic import Fuzz

    began = datetime.datetime.now(datetime.timezone.utc)
    stamp = f"{began:%Y%m%dT%H%M%SZ}-{options.vllm}"
    narrator = Narrator(f"wrong parameters, vLLM {options.vllm}")
    verdicts: list[Verdict] = []
    modes = []
    try:
        for mode in MODES if options.mode is None else (options.mode,):
            narrator.say(f"{mode}: starting")
            with running(specs(mode, options.policy), RESULTS / stamp) as servers:
                fuzz = Fuzz(servers, mode, options.seed, narrator.update)
                alive, detail = True, ""
                try:
                    asyncio.run(fuzz.run(options.count))
                    for server in servers:
                        server.check_alive()
                except (AssertionError, AnswerError, ServerError) as error:
                    alive, detail = False, str(error)
                found = fuzz.found
            narrator.say(f"{mode}: {dict(found.verdicts)}")
            verdicts += judge(mode, found, alive)
            modes.append(
                {
                    "mode": mode,
                    "requests": found.verdicts.total(),
                    "verdicts": dict(found.verdicts),
                    "by change": dict(sorted(found.by_change.items())),
                    "by endpoint": dict(sorted(found.by_endpoint.items())),
                    "wrong": found.wrong,
                    "hangs": found.hangs,
                    "not served": detail,
                }
            )
    except ServerError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    finally:
        narrator.close()
    stdout_console().print(table_of_targets(verdicts))
    write_json(
        RESULTS / f"{stamp if options.mode else f'last-{options.vllm}'}.json",
        {
            "began": began.isoformat(timespec="seconds"),
            "policy": options.policy,
            "seed": options.seed,
            "targets": as_json(verdicts),
            "modes": modes,
        },
    )
    return exit_status(verdicts)


if __name__ == "__main__":
    sys.exit(main(parse()))
