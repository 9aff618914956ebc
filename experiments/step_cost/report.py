# SPDX-License-Identifier: Apache-2.0
"""Runs the arms, and compares the costs with the targets."""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path

from experiments.bench.samples import Column, Samples
from experiments.common.report import Narrator, Verdict, conclude, last_name
from experiments.step_cost import hand_over, idle
from experiments.step_cost.__main__ import ARMS
from experiments.step_cost.hand_over import OURS
from experiments.step_cost.idle import EMPTY
from kvcached_nixl.wire.lease import MAX_HEARTBEAT_BYTES

RESULTS = Path(__file__).resolve().parent / "results"
WAITING = (0, 100, 1_000, 10_000)
MOST_WAITING = WAITING[-1]
STEP_MS, IDLE_TURN_MS = 1.0, 0.1
MOST_TIMES_STOCK, MOST_MORE_MS = 1.25, 0.2
MOST_IDLE = 0.05
"""CPU seconds per second that a server may use beyond one without requests."""
STOCK = "stock connector"
HAND_OVER_FORMS = ("{}", "{}", "{} waiting")
SCHEDULE_FORMS = ("{}", "more may run: {}", "{} waiting")


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status."""
    # Each request that is aborted logs a warning.
    logging.disable(logging.WARNING)
    status = 0
    measures = dict(zip(ARMS, (_schedule, _hand_over, _idle), strict=True))
    with Narrator("what waiting hand-overs cost an engine") as narrator:
        for arm in options.arm or ARMS:
            name = last_name(options.vllm + ("" if arm == "hand-over" else f"-{arm}"), quick=options.quick)
            samples, verdicts, title, columns = measures[arm](options.quick, narrator)
            table, content = samples.table(title, columns), {"costs": samples.as_json()}
            status = max(status, conclude([table], verdicts, RESULTS / f"{name}.json", content))
    return status


Measured = tuple[Samples, list[Verdict], str, list[Column]]


def _columns(**figures: str) -> list[Column]:
    """Figure -> heading."""
    return [Column(heading, figure, 1, 3) for figure, heading in figures.items()]


def _schedule(quick: bool, narrator: Narrator) -> Measured:
    # Imported here, not at the top: results are also judged where vLLM is not installed.
    from experiments.step_cost import real_scheduler

    repetitions, samples = (40 if quick else 300), Samples(SCHEDULE_FORMS)
    for waiting in WAITING:
        real_scheduler.measure(samples, waiting, repetitions, narrator.say)
    title = f"vLLM's own scheduler with waiting requests, {repetitions} steps each, milliseconds of its thread"
    columns = _columns(step_p50="step p50", step_p99="p99", arrival_p50="with an arrival")
    return samples, judge_schedule(samples), title, columns


def _hand_over(quick: bool, narrator: Narrator) -> Measured:
    repetitions, samples = (200 if quick else 3_000), Samples(HAND_OVER_FORMS)
    for waiting in WAITING:
        hand_over.measure(samples, waiting, repetitions, narrator.say)
    title = f"waiting hand-overs, this package alone, {repetitions:,} of each, milliseconds"
    columns = _columns(step_p50="step p50", step_p99="p99", idle_turn_p50="idle turn p50", idle_turn_p99="p99")
    return samples, judge(samples), title, columns


def _idle(quick: bool, narrator: Narrator) -> Measured:
    seconds, samples = (3.0 if quick else 8.0), Samples(("{}",))
    with tempfile.TemporaryDirectory(prefix="step_cost-") as logs:
        idle.measure(samples, seconds, Path(logs), narrator.say)
    title = f"CPU seconds per second, over {seconds:g} s, of servers with nothing to compute"
    return samples, judge_idle(samples), title, _columns(cpu="all processes")


def judge(samples: Samples) -> list[Verdict]:
    """Return the targets of the hand-over arm: medians with the most waiting, and the size of all heartbeats."""
    found = []
    for setting in samples.settings:
        for words, limit, figure in (
            ("a step", STEP_MS, "step_p50"),
            ("an idle turn", IDLE_TURN_MS, "idle_turn_p50"),
        ):
            if setting[-1] == MOST_WAITING:
                spent = samples.median(setting, OURS, figure)
                target = f"{samples.words(setting)}: {words} (< {limit:g} ms)"
                found.append(Verdict(target, f"{spent:.4f} ms", spent < limit))
    sizes = [samples.values(setting, OURS, "largest_beat_bytes") for setting in samples.settings]
    largest = int(max(sum(sizes, [])))
    # A heartbeat names as many requests as fit, so the largest is close to the limit wherever many wait.
    target = f"no heartbeat is larger than {MAX_HEARTBEAT_BYTES:,} bytes"
    return [*found, Verdict(target, f"{largest:,}", 0 < largest <= MAX_HEARTBEAT_BYTES)]


def judge_schedule(samples: Samples) -> list[Verdict]:
    """Return the targets of the schedule arm: medians with the most waiting, compared with the stock connector's."""
    found = []
    for setting, engine in samples.figures:
        if setting[-1] == MOST_WAITING and engine.startswith(OURS):
            spent, beside = (samples.median(setting, one, "step_p50") for one in (engine, STOCK))
            limit = MOST_TIMES_STOCK * beside + MOST_MORE_MS
            words = f"{engine}, {samples.words(setting)}: vLLM's step (< {limit:.2f} ms; stock {beside:.2f})"
            found.append(Verdict(words, f"{spent:.2f} ms", spent < limit))
    return found


def judge_idle(samples: Samples) -> list[Verdict]:
    """Return the targets of the idle arm: each state compared with the same server without requests."""
    found = []
    for setting, state in samples.figures:
        if state != EMPTY:
            more = samples.median(setting, state, "cpu") - samples.median(setting, EMPTY, "cpu")
            words = f"{samples.words(setting)}, {state}: CPU seconds per second beyond {EMPTY} (< {MOST_IDLE:g})"
            found.append(Verdict(words, f"{more:.3f}", more < MOST_IDLE))
    return found
