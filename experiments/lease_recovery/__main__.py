# SPDX-License-Identifier: Apache-2.0
"""``bash experiments/lease_recovery/run.sh``: inflict faults, judge answers, time recovery. ``--help`` explains."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.command_line import (
    KEEPS_LAST,
    MODES,
    add_policy,
    add_quick,
    add_rounds,
    add_word,
    make_parser,
    run_main,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from experiments.common.report import Narrator
    from experiments.common.servers import Running
    from experiments.lease_recovery.arms import Arm
    from experiments.lease_recovery.report import Outcome
    from experiments.lease_recovery.soak import Soaked

RESULTS = Path(__file__).resolve().parent / "results"

DESCRIPTION = """\
What do clients get when servers die, freeze or respond late, and how soon does the pair recover?

Starts a prefill and a decode server with a pool of 96 blocks and leases of 3 s, and sends requests without a pause,
while faults are inflicted in random order: either server is killed at a random moment and a new one is started on its
ports; either is frozen (SIGSTOP) for less and for more than a lease; prefill stays away until decode has freed its
memory; clients disconnect in every phase, also while their requests wait for blocks of decode; a decode request has the
parameters of a lease that has ended and whose blocks other requests have used; an operator pauses one or both servers,
in every mode, resets caches with running requests, and changes the weights of one server after the other. In arms
that are short of memory, kvcached's limits change at random, a neighbour on a server's device takes memory, gives it
back and waits for more, and servers are shut down (SIGTERM).
Arms: kvcached with pull and push, direct and staged, with registrations that follow its pages and that do not, and with
a model whose layers keep states (Nemotron-H); and the stock connector for comparison. Every answer is compared with the
answer of one server alone.

--soak instead: 10,000 hand-overs of mixed lengths, half of them pull and half push, between two servers each, with
prefix caches on both sides. One of the two is killed or stopped and restarted on its address 25 times in each
direction; the other one lives on, and is read every 50 hand-overs: memory, open files, threads, mappings, NIXL peers
and agents, kvcached's pages. A linear regression gives their rise with hand-overs and with restarts. Answers are
compared with those of one stock server. The same is measured for NIXL alone, without vLLM."""

EPILOG = """\
targets, for the arms over kvcached:
  at least 300 requests; none answered with HTTP 200 and a wrong token; none that hangs
  after every fault requests are answered correctly again, without restarting anything else
  a pause or a reset of a serving engine returns within 5 s
  blocks and kvcached's mapped pages are back at their idle level within a lease and two heartbeats, on both sides

targets of --soak:
  10,000 hand-overs and 50 restarts; none wrong, none that hangs, no error but around a restart
  nothing that lives on grows: rise and two standard errors beyond a stock server's are below the bounds in soak.py

exit status: 0 all targets reached; 1 a target was missed; 2 setup failed
Results: tables; results/last-VERSION.json, with the text of every wrong answer and every error; with --soak
results/soak-VERSION.json, with all readings."""


def parse() -> argparse.Namespace:
    parser = make_parser(DESCRIPTION, EPILOG)
    add_rounds(parser, 2, "how often each fault is inflicted")
    add_word(parser, "--arm", "arms", f'for example "pull", "staged", "staged push", "hybrid" or "stock"; {KEEPS_LAST}')
    add_policy(parser)
    parser.add_argument("--soak", action="store_true", help="many hand-overs and restarts, in place of the faults")
    add_quick(parser, "with --soak: 300 hand-overs, 4 restarts, growth not judged", "writes quick-soak-VERSION.json")
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    """Run all arms and return the exit status."""
    # Imported here, not at the top: --help has to work without an environment.
    from experiments.common.report import Narrator, begin, conclude, last_name
    from experiments.lease_recovery.arms import ARMS
    from experiments.lease_recovery.report import judge, table_of_faults

    if options.soak:
        return soak(options)
    arms = [arm for arm in ARMS if (options.arm or "") in arm.name]
    if not arms:
        sys.stderr.write(
            f"found no arm that fits --arm {options.arm!r}; there are: {'; '.join(a.name for a in ARMS)}.\n"
        )
        return 2
    began, stamp = begin(options.vllm)
    title = f"faults and recovery, vLLM {options.vllm}"
    with Narrator(title) as narrator:
        outcomes = [_outcome(arm, options, stamp, narrator) for arm in arms]

    content = {
        "began": began,
        "policy": options.policy,
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
    }
    verdicts = [verdict for one in outcomes if one.ours for verdict in judge(one)]
    path = RESULTS / f"{stamp if options.arm else last_name(options.vllm)}.json"
    return conclude([table_of_faults(outcomes, title)], verdicts, path, content)


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
        chaos = Chaos(running, traffic, narrator.update, is_operated=arm.kvcached, is_short=arm.is_short)
        await chaos.run(options.rounds, LEAST_REQUESTS)
        return Outcome(arm.name, arm.kvcached, traffic.ended, chaos.recoveries, chaos.told)

    with Running(arm.specs(options.policy), RESULTS / stamp, narrator.update) as running:
        narrator.say(f"{arm.name}: starting")
        running.ready()
        outcome = asyncio.run(put_through_it(running))
        narrator.say(f"{arm.name}: {len(outcome.ended)} requests")
        return outcome


def soak(options: argparse.Namespace) -> int:
    """Run the soak and return the exit status."""
    from experiments.common.report import Narrator, begin, conclude, write_json
    from experiments.common.servers import Running, running
    from experiments.lease_recovery import nixl_alone
    from experiments.lease_recovery.growth import table_of
    from experiments.lease_recovery.soak import FULL, QUICK, Soak, alone, judge, learn, prompts, reference, specs

    size, name = (QUICK, f"quick-soak-{options.vllm}") if options.quick else (FULL, f"soak-{options.vllm}")
    began, stamp = begin(options.vllm)
    logs = RESULTS / stamp

    async def all_at_once(pairs: Sequence[Running]) -> list[Soaked]:
        soaks = [Soak(pair, mode, known, size, narrator.say) for pair, mode in zip(pairs, MODES, strict=True)]
        return await asyncio.gather(*(one.run() for one in soaks))

    with Narrator(f"a soak, vLLM {options.vllm}") as narrator:
        nixl = nixl_alone.run(2 * size.restarts)
        narrator.say("NIXL alone is measured")
        with running([reference()], logs, narrator.update) as servers:
            known = asyncio.run(learn(servers[0], prompts(240)))
            narrator.say(f"{len(known)} answers of one stock server")
            stock = asyncio.run(alone(servers[0], known, size))
        pull, push = (Running(pair, logs, narrator.update) for pair in specs())
        with pull, push:
            for pair in (pull, push):
                pair.ready()
            soaked = asyncio.run(all_at_once([pull, push]))

    series = {**{name: some for one in soaked for name, some in one.series.items()}, **stock, **nixl}
    content = {
        "began": began,
        "verdicts": {one.mode: Counter(ended.verdict for ended in one.ended) for one in soaked},
        "unlike a right answer": [e.detail for one in soaked for e in one.ended if e.verdict in ("wrong", "hangs")]
        + [e.detail for one in soaked for e in one.failed],
        "readings": {process: [dataclasses.asdict(one) for one in some] for process, some in series.items()},
    }
    path = RESULTS / f"{name}.json"
    # At once: what took so long is not to be lost if judging it fails.
    write_json(path, content)
    verdicts = [verdict for one in soaked for verdict in judge(one, size, None if options.quick else stock)]
    return conclude([table_of(series, f"a soak, vLLM {options.vllm}")], verdicts, path, content)


if __name__ == "__main__":
    run_main(main, parse())
