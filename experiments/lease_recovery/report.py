# SPDX-License-Identifier: Apache-2.0
"""Tables of what clients got and of the recovery from each fault, and the targets."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from experiments.common.targets import Verdict
from experiments.lease_recovery.arms import HEARTBEAT_SECONDS, LEASE_SECONDS
from experiments.lease_recovery.faults import SHORTER, Recovery, Told
from experiments.lease_recovery.traffic import OUT_OF_DATE, Ended

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
    """Return the targets of one arm."""
    verdicts = Counter(one.verdict for one in outcome.ended)
    right = max((_seconds(one.right_seconds) for one in outcome.recoveries), default=math.inf)
    memory = max((_seconds(one.memory_seconds) for one in outcome.recoveries), default=math.inf)
    outlived = [one for one in outcome.recoveries if one.fault.endswith(SHORTER)]
    ended = sum(one.leases_ended or 0 for one in outlived)
    told = max((one.seconds for one in outcome.told), default=math.inf)
    stale = Counter(one.verdict for one in outcome.ended if one.fault == OUT_OF_DATE)
    return [
        Verdict(
            f"{outcome.arm}: at least {LEAST_REQUESTS} requests",
            f"{len(outcome.ended)}",
            len(outcome.ended) >= LEAST_REQUESTS,
        ),
        Verdict(f"{outcome.arm}: no wrong token with HTTP 200", f"{verdicts['wrong']}", not verdicts["wrong"]),
        Verdict(
            f"{outcome.arm}: {OUT_OF_DATE}, none wrong", f"{stale['wrong']} of {stale.total()}", not stale["wrong"]
        ),
        Verdict(f"{outcome.arm}: no request hangs", f"{verdicts['hangs']}", not verdicts["hangs"]),
        Verdict(
            f"{outcome.arm}: after every fault requests are answered correctly again", _said([right]), right < math.inf
        ),
        Verdict(
            f"{outcome.arm}: memory is back to idle within {MEMORY_BACK_SECONDS:.1f} s (a lease and two heartbeats)",
            _said([memory]),
            memory <= MEMORY_BACK_SECONDS,
        ),
        Verdict(
            f"{outcome.arm}: pauses and resets return within {TOLD_SECONDS:.0f} s", _said([told]), told <= TOLD_SECONDS
        ),
        Verdict(
            f"{outcome.arm}: no lease ends while a server is frozen for {SHORTER}",
            f"{ended} in {len(outlived)}",
            bool(outlived) and not ended,
        ),
    ]


def table_of_faults(outcomes: Sequence[Outcome], title: str) -> Table:
    """Return a table with a row per arm and kind of fault; seconds are the median and the longest."""
    table = Table(title=title)
    for column in (
        "servers",
        "fault",
        "times",
        *VERDICTS,
        "leases ended",
        "until a correct answer (s)",
        "until memory is idle (s)",
    ):
        table.add_column(column, justify="left" if column in ("servers", "fault") else "right")
    for outcome in outcomes:
        for fault in [*dict.fromkeys(one.fault for one in outcome.recoveries), OUT_OF_DATE, "none"]:
            times = [one for one in outcome.recoveries if one.fault == fault]
            verdicts = Counter(one.verdict for one in outcome.ended if one.fault == fault)
            table.add_row(
                outcome.arm,
                fault,
                str(len(times)) if times else "",
                *(str(verdicts[verdict] or "") for verdict in VERDICTS),
                str(sum(one.leases_ended or 0 for one in times) or ""),
                _said([_seconds(one.right_seconds) for one in times]),
                _said([_seconds(one.memory_seconds) for one in times]),
            )
        table.add_section()
    return table


def _seconds(measured: float | None) -> float:
    return math.inf if measured is None else measured


def _said(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    longest, median = max(seconds), statistics.median(seconds)
    word = "never" if longest == math.inf else f"{longest:.1f}"
    return word if len(seconds) == 1 else f"{'never' if median == math.inf else f'{median:.1f}'}, at most {word}"
