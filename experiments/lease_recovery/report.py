# SPDX-License-Identifier: Apache-2.0
"""Runs the arms; a table of what clients got and of the recovery from each fault, and the targets."""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.common.report import Narrator, Verdict, begin, conclude, last_name, make_table
from experiments.common.servers import Running
from experiments.lease_recovery.arms import ARMS, HEARTBEAT_SECONDS, LEASE_SECONDS, PULL, PUSH, Arm, prompts
from experiments.lease_recovery.chaos import SHORTER, Chaos, Recovery, Told
from experiments.lease_recovery.traffic import OUT_OF_DATE, Ended, Traffic

RESULTS = Path(__file__).resolve().parent / "results"
LEAST_REQUESTS = 300
MEMORY_BACK_SECONDS = LEASE_SECONDS + 2 * HEARTBEAT_SECONDS
TOLD_SECONDS = 5.0
"""Generous: it takes a second or two with other load on the cores."""
VERDICTS = ("right", "wrong", "error", "no connection", "went away", "hangs")


@dataclass(frozen=True)
class Outcome:
    """Results of one arm. ``ours``: whether the targets apply to it."""

    arm: str
    ours: bool
    ended: Sequence[Ended]
    recoveries: Sequence[Recovery]
    told: Sequence[Told]


def judge(outcome: Outcome) -> list[Verdict]:
    verdicts = Counter(one.verdict for one in outcome.ended)
    right = max((_seconds(one.right_seconds) for one in outcome.recoveries), default=math.inf)
    memory = max((_seconds(one.memory_seconds) for one in outcome.recoveries), default=math.inf)
    outlived = [one for one in outcome.recoveries if one.fault.endswith(SHORTER)]
    ended = sum(one.leases_ended or 0 for one in outlived)
    told = max((one.seconds for one in outcome.told), default=math.inf)
    stale = Counter(one.verdict for one in outcome.ended if one.fault == OUT_OF_DATE)
    number = len(outcome.ended)
    back = f"memory is back to idle within {MEMORY_BACK_SECONDS:.1f} s (a lease and two heartbeats)"
    frozen = f"no lease ends while a server is frozen for {SHORTER}"
    found = (
        (f"at least {LEAST_REQUESTS} requests", f"{number}", number >= LEAST_REQUESTS),
        ("no wrong token with HTTP 200", f"{verdicts['wrong']}", not verdicts["wrong"]),
        (f"{OUT_OF_DATE}, none wrong", f"{stale['wrong']} of {stale.total()}", not stale["wrong"]),
        ("no request hangs", f"{verdicts['hangs']}", not verdicts["hangs"]),
        ("after every fault requests are answered correctly again", _said([right]), right < math.inf),
        (back, _said([memory]), memory <= MEMORY_BACK_SECONDS),
        (f"pauses and resets return within {TOLD_SECONDS:.0f} s", _said([told]), told <= TOLD_SECONDS),
        (frozen, f"{ended} in {len(outlived)}", bool(outlived) and not ended),
    )
    return [Verdict(f"{outcome.arm}: {target}", words, reached) for target, words, reached in found]


def table_of_faults(outcomes: Sequence[Outcome], title: str) -> Table:
    rows = []
    for outcome in outcomes:
        for fault in [*dict.fromkeys(one.fault for one in outcome.recoveries), OUT_OF_DATE, "none"]:
            times = [one for one in outcome.recoveries if one.fault == fault]
            verdicts = Counter(one.verdict for one in outcome.ended if one.fault == fault)
            counts = [len(times), *(verdicts[verdict] for verdict in VERDICTS)]
            counts.append(sum(one.leases_ended or 0 for one in times))
            found = ([one.right_seconds for one in times], [one.memory_seconds for one in times])
            seconds = (_said([*map(_seconds, some)]) for some in found)
            rows.append([outcome.arm, fault, *(str(number or "") for number in counts), *seconds])
    ends = ("leases ended", "until a correct answer (s)", "until memory is idle (s)")
    return make_table(title, ("servers", "fault", "times", *VERDICTS, *ends), rows)


def _seconds(measured: float | None) -> float:
    return math.inf if measured is None else measured


def _said(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    longest, median = max(seconds), statistics.median(seconds)
    word = "never" if longest == math.inf else f"{longest:.1f}"
    return word if len(seconds) == 1 else f"{'never' if median == math.inf else f'{median:.1f}'}, at most {word}"


# ---------------------------------------------------------------------------------------------------------- a whole run


def main(options: argparse.Namespace) -> int:
    arms = [arm for arm in ARMS if options.arm in arm.name]
    if options.quick and not options.arm:
        arms = [PULL, PUSH]
    if not arms:
        names = "; ".join(arm.name for arm in ARMS)
        sys.stderr.write(f"found no arm that fits --arm {options.arm!r}; there are: {names}.\n")
        return 2
    began, stamp = begin(options.vllm)
    title = f"faults and recovery, vLLM {options.vllm}"
    with Narrator(title) as narrator:
        outcomes = [_outcome(arm, options, stamp, narrator) for arm in arms]
    content = {"began": began, "policy": options.policy, "arms": [_as_json(one) for one in outcomes]}
    verdicts = [verdict for one in outcomes if one.ours for verdict in judge(one)]
    path = RESULTS / f"{stamp if options.arm or options.quick else last_name(options.vllm)}.json"
    return conclude([table_of_faults(outcomes, title)], verdicts, path, content)


def _as_json(one: Outcome) -> dict[str, Any]:
    counts = Counter((ended.fault, ended.verdict) for ended in one.ended)
    return {
        "arm": one.arm,
        "told": [asdict(told) for told in one.told],
        "recoveries": [asdict(recovery) for recovery in one.recoveries],
        "requests": [{"fault": fault, "verdict": verdict, "count": n} for (fault, verdict), n in counts.items()],
        "unlike a right answer": [e.detail for e in one.ended if e.verdict in ("wrong", "error", "hangs")],
    }


def _outcome(arm: Arm, options: argparse.Namespace, stamp: str, narrator: Narrator) -> Outcome:
    async def put_through_it(running: Running) -> Outcome:
        traffic = Traffic(running.servers, arm.mode, prompts(12))
        await traffic.learn()
        if arm.kvcached:
            await traffic.learn_other()
        chaos = Chaos(running, traffic, arm, narrator.update)
        await chaos.run(1 if options.quick else options.rounds, LEAST_REQUESTS)
        return Outcome(arm.name, arm.kvcached, traffic.ended, chaos.recoveries, chaos.told)

    with Running(arm.specs(options.policy), RESULTS / stamp, narrator.update) as running:
        narrator.say(f"{arm.name}: starting")
        running.ready()
        outcome = asyncio.run(put_through_it(running))
        narrator.say(f"{arm.name}: {len(outcome.ended)} requests")
        return outcome
