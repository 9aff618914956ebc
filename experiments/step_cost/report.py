# SPDX-License-Identifier: Apache-2.0
"""Targets, columns and a plot of the measured costs. No side effects except the plot's file."""

from __future__ import annotations

from pathlib import Path

from experiments.bench.samples import Column, Samples
from experiments.common.plots import finish, line, make_panels, save
from experiments.common.targets import Verdict
from experiments.step_cost.measure import OURS
from experiments.step_cost.schedule_cost import STOCK
from kvcached_nixl.wire.lease import MAX_HEARTBEAT_BYTES

MOST_WAITING = 10_000
STEP_MS, IDLE_TURN_MS = 1.0, 0.1
MOST_TIMES_STOCK, MOST_MORE_MS = 1.25, 0.2
HAND_OVER_FORMS = ("{}", "{}", "{} waiting")
SCHEDULE_FORMS = ("{}", "more may run: {}", "{} waiting")


def _columns(**figures: str) -> list[Column]:
    """Figure -> heading."""
    return [Column(heading, figure, 1, 3) for figure, heading in figures.items()]


HAND_OVER_COLUMNS = (
    *_columns(step_p50="step", step_p99="p99", scheduler_p50="engine", pickled_p50="pickle", worker_p50="worker"),
    *_columns(idle_turn_p50="idle", idle_turn_p99="p99", arrival_p50="arrival", arrival_p99="p99"),
    *_columns(beat_turn_p50="beats", beat_turn_p99="p99"),
    Column("number", "most_beats", 1),
)
SCHEDULE_COLUMNS = (
    *_columns(step_p50="step p50", step_p99="p99", schedule_p50="schedule", connector_p50="connector"),
    *_columns(update_p50="update", arrival_p50="with an arrival"),
)


def judge(samples: Samples) -> list[Verdict]:
    """Return the targets of the hand-over arm: medians with the most waiting, and the size of all heartbeats."""
    found = []
    for setting in samples.settings:
        if setting[-1] == MOST_WAITING:
            for words, limit, figure in (
                ("a step", STEP_MS, "step_p50"),
                ("an idle turn", IDLE_TURN_MS, "idle_turn_p50"),
            ):
                spent = samples.median(setting, OURS, figure)
                target = f"{samples.words(setting)}: {words} (< {limit:g} ms)"
                found.append(Verdict(target, f"{spent:.4f} ms", spent < limit))
    largest = int(max(samples.median(setting, OURS, "largest_beat_bytes") for setting in samples.settings))
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


def plot(samples: Samples, title: str, path: Path) -> None:
    """Plot a step and an idle turn over the number of waiting hand-overs, with their limits."""
    figure, panels = make_panels(2, 10, 3.8)
    for panel, what, limit in zip(panels, ("step", "idle_turn"), (STEP_MS, IDLE_TURN_MS), strict=True):
        for where in dict.fromkeys(setting[:2] for setting in samples.settings):
            settings = [setting for setting in samples.settings if setting[:2] == where]
            middle, upper = (
                [samples.median(setting, OURS, f"{what}_p{share}") for setting in settings] for share in (50, 99)
            )
            line(panel, [setting[-1] for setting in settings], middle, ", ".join(where), upper)
        panel.axhline(limit, color="black", linestyle=":", linewidth=1)
        panel.set_xscale("symlog", linthresh=100)
        finish(panel, yscale="log", xlabel="waiting hand-overs", title=what.replace("_", " "))
    panels[0].set_ylabel("ms (p50, shaded to p99)")
    save(figure, title, path)
