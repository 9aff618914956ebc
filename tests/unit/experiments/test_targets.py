# SPDX-License-Identifier: Apache-2.0
"""The experiments' targets, each on both sides of its limit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

pytest.importorskip("openai", reason="needs an environment: bash experiments/env.sh")
pytest.importorskip("yaml", reason="comes with vLLM")

from experiments.bench import bench_serve, conversations, memory_path, traces
from experiments.bench.comparison import Samples
from experiments.bench.conversations import ASKS, FIRST, FURTHER, HOME, OTHER, STOCK_PD, Got
from experiments.common.report import Verdict
from experiments.dashboard import queries
from experiments.dashboard.pairs import OK, Load
from experiments.fleet_change import measure as fleet_change
from experiments.lease_recovery import report as lease_recovery
from experiments.lease_recovery.arms import PULL as FAULTS_ARM
from experiments.lease_recovery.arms import Ended, Traffic
from experiments.lease_recovery.chaos import FREED_SECONDS, SHORTER, Chaos, Recovery, Told
from experiments.shared_device import report as shared_device
from experiments.shared_device.arms import DEVICE_BYTES, PULL, STATIC
from experiments.shared_device.clients import Outcome, Received
from experiments.shared_device.measure import ASKS as DECODE_ASKS
from experiments.shared_device.measure import BEHIND, Ran
from experiments.stacks import measure as stacks

MIB = 2**20
Case = tuple[Sequence[Verdict], tuple[str, ...]]
"""Verdicts, and words of each target that is missed."""

# ---------------------------------------------------------------------------------------------------------------- bench

RUN = {"failed": 0, "requests_per_second": 1.0, "first_token_p50_ms": 100.0, "token_p50_ms": 10.0, "cpu_token_ms": 12.0}


def serve(moved: int = 9, **changes: float) -> list[Verdict]:
    samples = Samples(("{} at a time",))
    samples.add((8,), bench_serve.PULL.name, **RUN | changes)
    samples.add((8,), bench_serve.STOCK_PULL.name, **RUN)
    return bench_serve.judge(samples, {bench_serve.PULL.name: (9, moved)})


def memory(more: Mapping[float, int]) -> list[Verdict]:
    """At most a twentieth more than the slab, and a twentieth apart."""
    samples = Samples(("{}", "{} GiB reserved"))
    for gib, mib in more.items():
        for arm, found in (("pull", 500), ("pull, staged", 500 + mib)):
            samples.add(("prefill", gib), arm, anonymous=found * MIB, buffer=gib * 2**30)
    return memory_path.judge_memory(samples, slab_gib=100 / 1024)


def pages(occupied: float) -> list[Verdict]:
    """A fifth longer than the copy at most; of the direct path nothing is promised."""
    samples = Samples(("{} tokens",))
    samples.add((2048,), "pull, staged", occupied=occupied, copied=0.01)
    samples.add((2048,), "pull", occupied=0.5, copied=0.0)
    return memory_path.judge_pages(samples)


def talk(problems: Sequence[str] = (), **changes: tuple[float, int]) -> list[Verdict]:
    """Seconds until the first token, and bytes moved of 10 that are missing."""
    figures = {"stock": (1.0, 0), "home": (1.0, 0), "other": (1.3, 10), "asks": (3.0, 10), "stock P/D": (3.0, 10)}
    samples = Samples(("{}",))
    for arm, (seconds, moved) in {**figures, **changes}.items():
        samples.add((FIRST,), arm, **Got(9.0).figures)
        samples.add((FURTHER,), arm, **Got(seconds).figures, moved=float(moved), missing=10.0)
    return conversations.judge(samples, problems, 10)


def trace(arm: int, *first_tokens: float, without: str = "") -> list[Verdict]:
    """Spans of 1.5 s: a second of prefill, a half of decode."""
    ends = {"decode_asking": 1.0, "decode_moving": 1.4, "server_answering": 1.5}
    spans = [traces.Span("t", "p", "c", "prefill_computing", "", 0.0, 1.0, "prefill")] if without != "prefill" else []
    for name in traces.states_of(traces.ARMS[0]) | set(ends):
        if name != "prefill_computing":
            end = ends.get(name, 1.5)
            begin = {"decode_asking": 0.0, "decode_moving": 1.0, "server_answering": 1.4}.get(name, end)
            spans.append(traces.Span("t", name, "c", name, "", begin, end, "decode"))
    return traces.judge(traces.ARMS[arm], [traces.Traced("t", spans, seconds) for seconds in first_tokens])


BENCH: list[Case] = [
    (serve(), ()),
    (serve(failed=1.0), ("without an answer",)),
    (serve(moved=8), ("with KV from prefill",)),
    (serve(requests_per_second=0.99), ("requests/s",)),
    (serve(first_token_p50_ms=100.1), ("first token",)),
    (serve(token_p50_ms=10.1), ("further tokens",)),
    (serve(cpu_token_ms=12.1), ("CPU",)),
    (memory({1: 105, 60: 105}), ()),
    (memory({1: 106, 60: 105}), ("prefill, 1 GiB",)),
    (memory({1: 95, 60: 105}), ("the same for all",)),
    (memory({1: 100, 60: 6000}), ("prefill, 60 GiB", "the same for all")),
    (pages(0.012), ()),
    (pages(0.0121), ("stay in use",)),
    (talk(), ()),
    (talk(**{HOME.name: (1.16, 10)}), ("home / stock",)),
    (talk(**{OTHER.name: (1.31, 10)}), ("other / stock",)),
    (talk(**{ASKS.name: (1.9, 10)}), ("asks / home",)),
    (talk(**{STOCK_PD.name: (1.9, 10)}), ("stock P/D / home",)),
    (talk(**{OTHER.name: (1.3, 11)}), ("other, bytes moved",)),
    (talk(["wrong"]), ("wrong answers",)),
    (trace(0, 1.5, 1.5, 1.6), ()),
    (trace(1, 1.5), ("every state",)),
    (trace(0, 1.5, 1.6, 1.6), ("spans / time to first token",)),
    (trace(0, 1.5, 1.5, 1.7), ("spans / time to first token",)),
    (trace(0, 1.5, without="prefill"), ("spans / time", "every state", "two processes")),
]

# ------------------------------------------------------------------------------------------- faults, changes and stacks

RIGHT = Ended("right", "none", 0.0, 1.0)
ALL = [RIGHT] * lease_recovery.LEAST_REQUESTS
STOOD = f"prefill stands still, {SHORTER}"
TOLD = Told("pause keep", lease_recovery.TOLD_SECONDS)


def lease(ended: Sequence[Ended], *recoveries: Recovery, told: Sequence[Told] = (TOLD,)) -> list[Verdict]:
    killed, outlived = Recovery("decode is killed", 20.0, 1.0, FREED_SECONDS), Recovery(STOOD, 1.0, 1.0, 0.1, 0)
    traffic, nothing = Traffic([], [], ended=list(ended)), cast("Any", None)
    found = Chaos(nothing, traffic, FAULTS_ARM, print, recoveries=[killed, outlived, *recoveries], told=list(told))
    return lease_recovery.judge(found)


def fleet(change: str, outcomes: Mapping[str, int], failed_hand_overs: int = 0) -> list[Verdict]:
    assert {change, fleet_change.KILL_DECODE} <= {*fleet_change.CHANGES}
    good = fleet_change.Phase("pull", "restart", 1.0, {"right": 9}, 0)
    return fleet_change.judge(
        [good, fleet_change.Phase("pull", change, 1.0, {"right": 9, **outcomes}, failed_hand_overs)]
    )


def stack(**changed: Any) -> list[Verdict]:
    ten, troubled = {"right": 10}, {"right": 3, "error before the first token": 5}
    good = {"asked": 10, "calm": ten, "hand_overs": 10, "cached_tokens": 0, "troubled": troubled, "rolling": {}}
    good |= {"recovered_seconds": 1.5, "after": ten, "hand_overs_after": 10, "wrong": []}
    return stacks.targets(stacks.Outcome("a router", "1", "pull", 1, **{**good, **changed}))


OPERATION: list[Case] = [
    (lease(ALL), ()),
    (lease(ALL[1:]), ("at least",)),
    (lease([*ALL, Ended("wrong", "none", 0.0, 1.0)]), ("no wrong token",)),
    (lease([*ALL, Ended("hangs", "none", 0.0, 1.0)]), ("no request hangs",)),
    (lease(ALL, Recovery("x", 1.0, None, 1.0)), ("answered correctly again",)),
    (lease(ALL, Recovery("x", 1.0, 1.0, FREED_SECONDS + 0.01)), ("back to idle",)),
    (lease(ALL, Recovery("x", 1.0, 1.0, None)), ("back to idle",)),
    (lease(ALL, Recovery(STOOD, 1.0, 1.0, 0.1, 1)), ("no lease ends",)),
    (lease(ALL, told=()), ("pauses and resets",)),
    (lease(ALL, told=(TOLD, Told("pause wait", lease_recovery.TOLD_SECONDS + 0.01))), ("pauses and resets",)),
    (fleet("restart", {}), ()),
    (fleet("kill a decode", {"error in a stream that had begun": 1}, 1), ()),
    (fleet("kill a decode", {"wrong": 1}), ("wrong",)),
    (fleet("version", {"no end": 1}), ("without an end",)),
    (fleet("kill a prefill", {"error before the first token": 1}), ("errors",)),
    (fleet("busy", {"error in a stream that had begun": 1}), ("errors",)),
    (fleet("kill all prefills", {}, 9), ()),
    (stack(), ()),
    (stack(calm={"right": 9, "wrong": 1}), ("that of one instance", "no wrong answer")),
    (stack(calm={"right": 9, "error": 1}), ("that of one instance",)),
    (stack(hand_overs=9), ("handed over",)),
    (stack(hand_overs=20), ("handed over",)),
    (stack(cached_tokens=1), ("usage",)),
    (stack(troubled={"right": 3, "wrong": 1}), ("no wrong answer",)),
    (stack(troubled={"right": 3, "no end": 1}), ("no wrong answer",)),
    (stack(troubled={"error before the first token": 5, "cut short": 1}), ("a stream whose hand-over fails",)),
    (stack(rolling={"right": 3, "wrong": 1}), ("no wrong answer",)),
    (stack(rolling={"right": 3, "no end": 1}), ("no wrong answer",)),
    (stack(recovered_seconds=None), ("of prefill's return",)),
    (stack(after={"right": 9, "error": 1}), ("of prefill's return",)),
    (stack(hand_overs_after=0), ("of prefill's return",)),
]

# ----------------------------------------------------------------------------------------- a shared device, a dashboard

GOOD = Received("a", 0.0, 256, Outcome.RIGHT, 1.0, "100 100")
WRONG, NO_END, REFUSED = (
    dataclasses.replace(GOOD, outcome=one) for one in (Outcome.WRONG, Outcome.NO_END, Outcome.REFUSED)
)


def table(arm: str = PULL.name, received: Received = GOOD, used: int = 20 * MIB, not_run: str = "") -> list[Verdict]:
    samples = [(0.0, {"a, prefill": 0, "a, decode": used, "b, prefill": 0, "b, decode": 0})]
    return shared_device.judge([Ran(arm, 10.0, [received], {}, samples, not_run)])


def overload(way: str, moved: float, received: Received = GOOD) -> list[Verdict]:
    return shared_device.judge_overload([Ran(way, 10.0, [received], {"prefilled": 1000.0, "moved": moved})])


def dashboard(*found: queries.Answer, load: tuple[int, int, bool] = (9, 3, True)) -> list[Verdict]:
    right, refused, is_idle_again = load
    loads = [Load("pull", 0.0, Counter({OK: right, "503": refused}), is_idle_again)]
    return queries.judge([*found, queries.Answer(queries.PLANTED)], loads)


FULL = queries.Answer(queries.Query("row", "good", "sum(up)"), [({}, [(0.0, 0.0)])])
OTHERS: list[Case] = [
    (table(), ()),
    (table(received=WRONG), ("wrong answers",)),
    (table(received=NO_END), ("wrong answers",)),
    (table(used=DEVICE_BYTES + 1), ("within the device",)),
    (table(STATIC.name, WRONG), ()),
    (table(not_run="it does not start"), ("serves throughout",)),
    (table(STATIC.name, not_run="it does not start"), ()),
    (overload(DECODE_ASKS, 1000), ()),
    (overload(BEHIND, 500), ()),
    (overload(DECODE_ASKS, 999), ("prefill wasted",)),
    (overload(DECODE_ASKS, 1000, REFUSED), ("when to try again",)),
    (overload(DECODE_ASKS, 1000, dataclasses.replace(REFUSED, retry_after=True)), ()),
    (overload(BEHIND, 500, WRONG), ("wrong answers",)),
    (dashboard(FULL), ()),
    (dashboard(FULL, queries.Answer(queries.Query("row", "other", "sum(up)"))), ("queries that return no value",)),
    (dashboard(load=(3, 9, True)), ("answered (most)",)),
    (dashboard(load=(0, 0, True)), ("answered (most)",)),
    (dashboard(load=(9, 0, False)), ("no KV in use",)),
]


@pytest.mark.parametrize(("verdicts", "words"), [*BENCH, *OPERATION, *OTHERS])
def test_a_target_is_missed_beyond_its_limit_alone(verdicts: Sequence[Verdict], words: tuple[str, ...]) -> None:
    missed = [one.target for one in verdicts if not one.reached]
    assert len(missed) == len(words) and all(word in one for word, one in zip(words, missed, strict=True)), missed
