# SPDX-License-Identifier: Apache-2.0
"""Computes targets, tables and a plot from the measured costs. No side effects except the plot's file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.plots import finish, line, make_panels, save
from experiments.common.tables import make_table
from experiments.common.targets import Verdict
from kvcached_nixl.wire.lease import MAX_HEARTBEAT_BYTES

if TYPE_CHECKING:
    from rich.table import Table

    from experiments.step_cost.idle import IdleCost
    from experiments.step_cost.measure import Cost
    from experiments.step_cost.schedule_cost import ScheduleCost

MOST_WAITING = 10_000
STEP_MS, IDLE_TURN_MS = 1.0, 0.1
MOST_TIMES_STOCK, MOST_MORE_MS = 1.25, 0.2
STOCK, OURS = "stock connector", "this package"


def judge(costs: Sequence[Cost]) -> list[Verdict]:
    """Return the targets of the hand-over arm: medians with the most waiting, and the size of all heartbeats."""
    found = []
    for one in costs:
        if one.waiting == MOST_WAITING:
            where = f"{one.direction}, {one.side}, {one.waiting:,} waiting"
            for what, limit, spent in (("a step", STEP_MS, one.step), ("an idle turn", IDLE_TURN_MS, one.idle_turn)):
                found.append(Verdict(f"{where}: {what} (< {limit:g} ms)", f"{spent.p50:.4f} ms", spent.p50 < limit))
    largest = max((one.largest_beat_bytes for one in costs), default=0)
    # A heartbeat names as many requests as fit, so the largest is close to the limit wherever many wait.
    found.append(
        Verdict(
            f"no heartbeat is larger than {MAX_HEARTBEAT_BYTES:,} bytes",
            f"{largest:,}",
            0 < largest <= MAX_HEARTBEAT_BYTES,
        )
    )
    return found


def table_of(costs: Sequence[Cost], title: str) -> Table:
    """Return a table with one row per transfer mode, side and number of waiting hand-overs."""
    rows = []
    for one in costs:
        beat = ("", "") if one.beat_turn is None else (one.beat_turn.p50, one.beat_turn.p99)
        parts = (one.scheduler.p50, one.pickled.p50, one.worker.p50)
        times = (one.step.p50, one.step.p99, *parts, one.idle_turn.p50, one.idle_turn.p99)
        cells = (*times, one.arrival.p50, one.arrival.p99, *beat)
        rows.append([one.direction, one.side, f"{one.waiting:,}", *map(_cell, cells), str(one.most_beats)])
    columns = (
        *("direction", "side", "waiting", "step p50", "p99", "engine", "pickle", "worker"),
        *("idle turn", "p99", "arrival", "p99", "heartbeats sent or read", "p99", "number"),
    )
    return make_table(title, columns, rows)


def _cell(spent: float | str) -> str:
    return spent if isinstance(spent, str) else f"{spent:.3f}"


def plot(costs: Sequence[Cost], title: str, path: Path) -> None:
    """Plot a step and an idle turn over the number of waiting hand-overs, with their limits."""
    figure, panels = make_panels(2, 10, 3.8)
    for panel, what, limit in zip(panels, ("step", "idle_turn"), (STEP_MS, IDLE_TURN_MS), strict=True):
        for direction, side in dict.fromkeys((one.direction, one.side) for one in costs):
            those = [one for one in costs if (one.direction, one.side) == (direction, side)]
            spent = [getattr(one, what) for one in those]
            waiting, middle = [one.waiting for one in those], [one.p50 for one in spent]
            line(panel, waiting, middle, f"{direction}, {side}", [one.p99 for one in spent])
        panel.axhline(limit, color="black", linestyle=":", linewidth=1)
        panel.set_xscale("symlog", linthresh=100)
        finish(panel, yscale="log", xlabel="waiting hand-overs", title=what.replace("_", " "))
    panels[0].set_ylabel("ms (p50, shaded to p99)")
    save(figure, title, path)


def judge_schedule(costs: Sequence[ScheduleCost]) -> list[Verdict]:
    """Return the targets of the schedule arm: medians with the most waiting, compared with the stock connector's."""
    most = [one for one in costs if one.waiting == MOST_WAITING]
    stock = {(one.kind, one.has_room): one.step.p50 for one in most if one.engine == STOCK}
    found = []
    for one in most:
        if one.engine == OURS:
            beside = stock[one.kind, one.has_room]
            limit = MOST_TIMES_STOCK * beside + MOST_MORE_MS
            where = f"{one.mode}, {one.kind}, {'room for more' if one.has_room else 'as many run as may'}"
            words = f"{where}, {one.waiting:,} waiting: vLLM's step (< {limit:.2f} ms; stock {beside:.2f})"
            found.append(Verdict(words, f"{one.step.p50:.2f} ms", one.step.p50 < limit))
    return found


def table_of_schedule(costs: Sequence[ScheduleCost], title: str) -> Table:
    """Return a table with one row per kind of waiting request, engine and number."""
    rows = []
    for one in costs:
        arrival = "" if one.arrival is None else one.arrival.p50
        spent = (one.step.p50, one.step.p99, one.schedule.p50, one.connector.p50, one.update.p50, arrival)
        words = (one.kind, "yes" if one.has_room else "no", one.engine, one.mode, f"{one.waiting:,}")
        rows.append([*words, *map(_cell, spent)])
    columns = ("what waits", "more may run", "engine", "mode", "waiting", "step p50", "p99", "schedule", "connector")
    return make_table(title, (*columns, "update", "step with an arrival"), rows)


def table_of_idle(costs: Sequence[IdleCost], title: str) -> Table:
    """Return a table with one row per server and state."""
    rows = [(one.server, one.state, f"{one.cpu:.3f}", f"{one.engines:.3f}") for one in costs]
    return make_table(title, ("server", "state", "all processes", "engines"), rows)
