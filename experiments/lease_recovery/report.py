# SPDX-License-Identifier: Apache-2.0
"""What do clients get when servers die, freeze or respond late, and how soon does the pair recover?

Starts a prefill and a decode server with a pool of 96 blocks and leases of 3 s, and sends requests without a pause
while faults are inflicted in random order: either server is killed, frozen for less and for more than a lease, paused
in every mode, reset with running requests, and given other weights; clients disconnect in every phase; a decode request
has the parameters of a lease that has ended. In arms that are short of memory, kvcached's limits change at random, a
neighbour takes memory and gives it back, and servers are shut down. Every answer is compared with one server's.

Targets: for the arms over kvcached:
  at least 300 requests; none answered with HTTP 200 and a wrong token; none that hangs
  after every fault requests are answered correctly again, without restarting anything else
  a pause or a reset of a serving engine returns within 5 s
  blocks and kvcached's mapped pages are back at their idle level within a lease and two heartbeats, on both sides.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from experiments.common.report import Run, Verdict, make_table
from experiments.common.servers import Running
from experiments.lease_recovery.arms import ARMS, OUT_OF_DATE, PULL, PUSH, Arm, Traffic, prompts
from experiments.lease_recovery.chaos import FREED_SECONDS, SHORTER, Chaos, Recovery

LEAST_REQUESTS = 300
TOLD_SECONDS = 5.0
"""Generous: it takes a second or two with other load on the cores."""
VERDICTS = ("right", "wrong", "error", "no connection", "went away", "hangs")


def judge(outcome: Chaos) -> list[Verdict]:
    requests = outcome.traffic.ended
    verdicts = Counter(one.verdict for one in requests)
    right, memory = (max(some, default=math.inf) for some in _seconds(outcome.recoveries))
    outlived = [one for one in outcome.recoveries if one.fault.endswith(SHORTER)]
    ended = sum(one.leases_ended or 0 for one in outlived)
    told = max((one.seconds for one in outcome.told), default=math.inf)
    stale = Counter(one.verdict for one in requests if one.fault == OUT_OF_DATE)
    number = len(requests)
    back = f"memory is back to idle within {FREED_SECONDS:.1f} s (a lease and two heartbeats)"
    frozen = f"no lease ends while a server is frozen for {SHORTER}"
    found = (
        (f"at least {LEAST_REQUESTS} requests", f"{number}", number >= LEAST_REQUESTS),
        ("no wrong token with HTTP 200", f"{verdicts['wrong']}", not verdicts["wrong"]),
        (f"{OUT_OF_DATE}, none wrong", f"{stale['wrong']} of {stale.total()}", not stale["wrong"]),
        ("no request hangs", f"{verdicts['hangs']}", not verdicts["hangs"]),
        ("after every fault requests are answered correctly again", _said([right]), right < math.inf),
        (back, _said([memory]), memory <= FREED_SECONDS),
        (f"pauses and resets return within {TOLD_SECONDS:.0f} s", _said([told]), told <= TOLD_SECONDS),
        (frozen, f"{ended} in {len(outlived)}", bool(outlived) and not ended),
    )
    return [Verdict(f"{outcome.arm.name}: {target}", words, reached) for target, words, reached in found]


def table_of_faults(outcomes: Sequence[Chaos], title: str) -> Table:
    rows = []
    for outcome in outcomes:
        for fault in [*dict.fromkeys(one.fault for one in outcome.recoveries), OUT_OF_DATE, "none"]:
            times = [one for one in outcome.recoveries if one.fault == fault]
            verdicts = Counter(one.verdict for one in outcome.traffic.ended if one.fault == fault)
            counts = [len(times), *(verdicts[verdict] for verdict in VERDICTS)]
            counts.append(sum(one.leases_ended or 0 for one in times))
            rows.append(
                [outcome.arm.name, fault, *(str(number or "") for number in counts), *map(_said, _seconds(times))]
            )
    ends = ("leases ended", "until a correct answer (s)", "until memory is idle (s)")
    return make_table(title, ("servers", "fault", "times", *VERDICTS, *ends), rows)


def _seconds(recoveries: Sequence[Recovery]) -> list[list[float]]:
    """Return the seconds until a right answer, and until memory was idle, of each recovery."""
    both = ([one.right_seconds for one in recoveries], [one.memory_seconds for one in recoveries])
    return [[math.inf if one is None else one for one in some] for some in both]


def _said(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    median, longest = (
        "never" if one == math.inf else f"{one:.1f}" for one in (statistics.median(seconds), max(seconds))
    )
    return longest if len(seconds) == 1 else f"{median}, at most {longest}"


# ---------------------------------------------------------------------------------------------------------- a whole run


def main(run: Run) -> int:
    arms = (PULL, PUSH) if run.quick and not run.options.only else run.chosen(ARMS)
    outcomes = [_outcome(arm, run) for arm in arms]
    of_arms = [
        {
            "arm": one.arm.name,
            "told": [asdict(told) for told in one.told],
            "recoveries": [asdict(recovery) for recovery in one.recoveries],
            "requests": [
                {"fault": fault, "verdict": verdict, "count": count}
                for (fault, verdict), count in Counter((each.fault, each.verdict) for each in one.traffic.ended).items()
            ],
            "unlike a right answer": [e.detail for e in one.traffic.ended if e.verdict in ("wrong", "error", "hangs")],
        }
        for one in outcomes
    ]
    verdicts = [verdict for one in outcomes if one.arm.kvcached for verdict in judge(one)]
    content = {"policy": run.options.policy, "arms": of_arms}
    return run.conclude([table_of_faults(outcomes, run.title)], verdicts, content)


def _outcome(arm: Arm, run: Run) -> Chaos:
    async def put_through_it(running: Running) -> Chaos:
        traffic = Traffic(running.servers, prompts(12))
        await traffic.learn(other=arm.kvcached)
        chaos = Chaos(running, traffic, arm, run.update)
        await chaos.run(run.times(2, 1), LEAST_REQUESTS)
        return chaos

    run.say(f"{arm.name}: starting")
    with Running(arm.specs(run.options.policy), run.logs, run.update) as running:
        running.ready()
        return asyncio.run(put_through_it(running))
