# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/lease_recovery/run.sh``: inflict faults, judge answers, time recovery. ``--help`` explains."""

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
What do clients get when servers die, freeze or respond late, and how soon does the pair recover?

Starts a prefill and a decode server with a pool of 96 blocks and leases of 3 s, and sends requests without a pause,
while faults are inflicted in random order: either server is killed at a random moment and a new one is started on its
ports; either is frozen (SIGSTOP) for less and for more than a lease; prefill stays away until decode has freed its
memory; clients disconnect in every phase, also while their requests wait for blocks of decode; a decode request has the
parameters of a lease that has ended and whose blocks other requests have used; an operator pauses one or both servers,
in every mode, resets caches with running requests, and changes the weights of one server after the other.
Arms: kvcached with pull and push, direct and staged, with registrations that follow its pages and that do not; and the
stock connector for comparison. Every answer is compared with the answer of one server alone."""

EPILOG = """\
targets, for the arms over kvcached:
  at least 300 requests; none answered with HTTP 200 and a wrong token; none that hangs
  after every fault requests are answered correctly again, without restarting anything else
  a pause or a reset of a serving engine returns within 5 s
  blocks and kvcached's mapped pages are back at their idle level within a lease and two heartbeats, on both sides

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: tables; results/last-VERSION.json, with the text of every wrong answer and every error."""


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
    # Imported here, not at the top: --help has to work without an environment.
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
        # Not for stock: its answers after a change of weights, or from caches of other weights, would only be wrong.
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
