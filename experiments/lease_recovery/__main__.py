# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/lease_recovery/run.sh``: faults, what clients got, how soon it was over. ``--help`` explains."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.default_vllm import DEFAULT_VLLM
from experiments.common.targets import as_json, exit_status, table_of_targets

if TYPE_CHECKING:
    from experiments.common.report import Narrator
    from experiments.lease_recovery.arms import Arm
    from experiments.lease_recovery.report import Outcome

RESULTS = Path(__file__).resolve().parent / "results"

DESCRIPTION = """\
What do clients get when servers die, stand still or come late, and how soon is everything as before?

Starts a prefill and a decode server with a pool of 96 blocks and leases of 3 s, and asks them without a pause while, in
an order that is drawn: either is killed at a random moment and another started on its ports; either stands still
(SIGSTOP) for less and for more than a lease; prefill stays away until decode has its memory back; clients go away in
every phase, among them while decode has no room for them; decode comes with the parameters of a lease that has ended
and whose blocks others have had; an operator pauses either or both, in every mode, resets caches with running requests,
and changes the weights of one after the other. Over kvcached pulling
and pushing, directly and staged, over registrations that follow its pages and that do not, and the stock connector
beside it. Every answer is compared with what a server gives alone."""

EPILOG = """\
targets, for the arms over kvcached:
  at least 300 requests; none answered HTTP 200 with a wrong token; none without an end
  after every fault requests are answered rightly again, without anything else being restarted
  a pause or a reset of an engine that serves returns within 5 s
  blocks and kvcached's mapped pages are back at their idle level within a lease and two heartbeats, on both sides

exit status: 0 all targets reached; 1 one was missed; 2 something could not be set up
Results: tables; results/last-VERSION.json, with what every wrong answer and every error said."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.sh", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", metavar="VERSION", default=DEFAULT_VLLM, help="vLLM to serve with (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="how often each fault is inflicted (%(default)s)")
    parser.add_argument(
        "--arm",
        metavar="NAME",
        help='only arms whose name holds this, as in "pull", "staged", "staged push", "stock"; no last-VERSION file',
    )
    parser.add_argument(
        "--policy", choices=("fail", "recompute"), default="recompute", help="kv_load_failure_policy (%(default)s)"
    )
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Run all arms and return the exit status."""
    # Only here: --help has to work without the environment that these need.
    import httpx

    from experiments.common.client import AnswerError
    from experiments.common.report import Narrator, stdout_console, write_json
    from experiments.common.servers import ServerError
    from experiments.lease_recovery.arms import ARMS
    from experiments.lease_recovery.report import judge, table_of_faults

    arms = [arm for arm in ARMS if (options.arm or "") in arm.name]
    if not arms:
        sys.stderr.write(
            f"found no arm that fits --arm {options.arm!r}; there are: {'; '.join(a.name for a in ARMS)}.\n"
        )
        return 2
    began = datetime.datetime.now(datetime.timezone.utc)
    stamp = f"{began:%Y%m%dT%H%M%SZ}-{options.vllm}"
    narrator = Narrator(f"faults and recovery, vLLM {options.vllm}")
    try:
        outcomes = [_outcome(arm, options, stamp, narrator) for arm in arms]
    except (ServerError, AnswerError, httpx.HTTPError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    finally:
        narrator.close()

    verdicts = [verdict for one in outcomes if one.ours for verdict in judge(one)]
    console = stdout_console()
    console.print(table_of_faults(outcomes, f"faults and recovery, vLLM {options.vllm}"))
    console.print(table_of_targets(verdicts))
    write_json(
        RESULTS / f"{stamp if options.arm else f'last-{options.vllm}'}.json",
        {
            "began": began.isoformat(timespec="seconds"),
            "policy": options.policy,
            "targets": as_json(verdicts),
            "arms": [
                {
                    "arm": one.arm,
                    "told": [dataclasses.asdict(told) for told in one.told],
                    "recoveries": [dataclasses.asdict(recovery) for recovery in one.recoveries],
                    "requests": [
                        {"fault": fault, "verdict": verdict, "count": count}
                        for (fault, verdict), count in Counter((e.fault, e.verdict) for e in one.ended).items()
                    ],
                    "unlike a right answer": [e.detail for e in one.ended if e.verdict in ("wrong", "error", "hangs")],
                }
                for one in outcomes
            ],
        },
    )
    return exit_status(verdicts)


def _outcome(arm: Arm, options: argparse.Namespace, stamp: str, narrator: Narrator) -> Outcome:
    from experiments.common.servers import Running
    from experiments.lease_recovery.arms import prompts
    from experiments.lease_recovery.chaos import Chaos
    from experiments.lease_recovery.report import LEAST_REQUESTS, Outcome
    from experiments.lease_recovery.traffic import Traffic

    async def put_through_it(running: Running) -> Outcome:
        traffic = Traffic(running.servers, arm.mode, prompts(12))
        await traffic.learn()
        if arm.kvcached:
            await traffic.learn_other()
        # What others compute with other weights, or have cached of them, would only be shown to be wrong.
        chaos = Chaos(running, traffic, narrator.update, is_operated=arm.kvcached)
        await chaos.run(options.rounds, LEAST_REQUESTS)
        return Outcome(arm.name, arm.kvcached, traffic.ended, chaos.recoveries, chaos.told)

    with Running(arm.specs(options.policy), RESULTS / stamp, narrator.update) as running:
        narrator.say(f"{arm.name}: starting")
        running.ready()
        outcome = asyncio.run(put_through_it(running))
        narrator.say(f"{arm.name}: {len(outcome.ended)} requests")
        return outcome


if __name__ == "__main__":
    sys.exit(main(parse()))
