# SPDX-License-Identifier: Apache-2.0
"""Computes tables, targets and the plot from runs. No side effects except the plot's file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from rich.table import Table

from experiments.common.plots import make_panels, save
from experiments.common.targets import Verdict
from experiments.shared_device.arms import DECODE_FILL, DEVICE_BYTES, MODELS
from experiments.shared_device.clients import Outcome, Received
from experiments.shared_device.counts import Counts
from experiments.shared_device.figures import FIRST_TOKEN_SECONDS, TOKEN_SECONDS, figures_of
from experiments.shared_device.measure import Ran
from experiments.shared_device.overload import TIMES_CAPACITY, Overloaded
from experiments.shared_device.stored import Measured

PANELS_A_ROW = 4
COLORS = {
    "a, alone": "#4c78a8",
    "a, prefill": "#9ecae9",
    "a, decode": "#4c78a8",
    "b, alone": "#f58518",
    "b, prefill": "#ffbf79",
    "b, decode": "#f58518",
}
_MIB = 2**20
_OUTCOMES = [kind.value.upper() if kind is Outcome.WRONG else kind.value for kind in Outcome]


def peaks(ran: Ran) -> tuple[int, dict[str, int]]:
    """Return the most bytes of the device that were in use at once, and the most of each model."""
    total = max((one.total_bytes for one in ran.samples), default=0)
    of_models = {
        model: max((_of_model(one.used_bytes.items(), model) for one in ran.samples), default=0) for model in MODELS
    }
    return total, of_models


def _of_model(used: Iterable[tuple[str, int]], model: str) -> int:
    return sum(count for name, count in used if name.startswith(f"{model},"))


def tables_of(runs: Sequence[Ran]) -> list[Table]:
    """Return the tables that an operator decides by: how fast each arm was, and what came of requests and memory."""
    words = f"first token <= {FIRST_TOKEN_SECONDS:g} s, further ones <= {TOKEN_SECONDS * 1e3:g} ms on average"
    speed = Table(title=f"two models on one device; goodput: right answers a second with {words}")
    for column in ("arm", "goodput/s", "first token, s: p50", "p99", "between tokens, ms: p50", "p99"):
        speed.add_column(column, justify="left" if column == "arm" else "right")
    fate = Table(title="what came of the requests, of prefill and of the memory")
    columns = ["arm", *_OUTCOMES, "wasted", "taken back", "again", "peak, MiB"]
    for column in columns:
        fate.add_column(column, justify="left" if column == "arm" else "right")
    for ran in runs:
        if ran.not_run:
            speed.add_row(ran.arm, "not run")
            fate.add_row(ran.arm, "not run")
            continue
        found = figures_of(ran.received, ran.load_seconds)
        wasted = ran.counts.wasted_share
        speed.add_row(
            ran.arm,
            f"{found.goodput:.2f}",
            _shown(found.first_p50, 1, 2),
            _shown(found.first_p99, 1, 2),
            _shown(found.token_p50, 1e3, 0),
            _shown(found.token_p99, 1e3, 0),
        )
        fate.add_row(
            ran.arm,
            *(str(found.outcomes[kind.value]) for kind in Outcome),
            "-" if wasted is None else f"{wasted:.1%}",
            f"{ran.counts.revoked:.0f}",
            f"{ran.counts.preempted:.0f}",
            f"{peaks(ran)[0] / _MIB:.0f}" if ran.samples else "split",
        )
    reasons = [f"{ran.arm} was not run: {ran.not_run}" for ran in runs if ran.not_run]
    if reasons:
        fate.caption = "\n".join(reasons)
    return [speed, fate]


def _shown(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


def judge(runs: Sequence[Ran]) -> list[Verdict]:
    """Return the targets: right tokens and an end for every request of this package; peaks that do not fit together."""
    verdicts = []
    for ran in runs:
        if not ran.arm.startswith("this package"):
            continue
        if ran.not_run:
            verdicts.append(Verdict(f"{ran.arm}: serves throughout", ran.not_run, False))
            continue
        outcomes = figures_of(ran.received, ran.load_seconds).outcomes
        bad = outcomes[Outcome.WRONG.value] + outcomes[Outcome.NO_END.value]
        total, of_models = peaks(ran)
        words = " and ".join(f"{count / _MIB:.0f}" for count in of_models.values())
        verdicts += [
            Verdict(
                f"{ran.arm}: wrong answers, and requests without an end (0)",
                f"{bad} of {len(ran.received)}",
                bad == 0,
            ),
            Verdict(
                f"{ran.arm}: the models' peaks, {words} MiB, within the device",
                f"{total / _MIB:.0f} of {DEVICE_BYTES / _MIB:.0f} MiB",
                total <= DEVICE_BYTES,
            ),
        ]
    return verdicts


def plot(runs: Sequence[Ran], title: str, path: Path) -> None:
    """Plot the memory of each engine over time, a panel for each elastic arm."""
    shown = [ran for ran in runs if ran.samples]
    if not shown:
        return
    figure, panels = make_panels(len(shown), 11, 2.6 * math.ceil(len(shown) / PANELS_A_ROW), a_row=PANELS_A_ROW)
    for place, (panel, ran) in enumerate(zip(panels, shown, strict=True)):
        seconds = [one.at_seconds for one in ran.samples]
        engines = [name for name in COLORS if name in ran.samples[0].used_bytes]
        levels = [[one.used_bytes[engine] / _MIB for one in ran.samples] for engine in engines]
        panel.stackplot(seconds, *levels, labels=engines, colors=[COLORS[engine] for engine in engines])
        panel.axhline(DEVICE_BYTES / _MIB, color="black", linewidth=1, linestyle="--")
        panel.set_title(ran.arm.removeprefix("this package, "), fontsize=9)
        panel.set(xlabel="seconds", ylim=(0, 1.3 * DEVICE_BYTES / _MIB))
        if place % PANELS_A_ROW == 0:
            panel.set(ylabel="MiB of the device")
        panel.legend(fontsize=6, loc="upper left", ncols=2)
    save(figure, title, path)


def table_of_overload(found: Sequence[Overloaded]) -> Table:
    """Return a table of the runs at a multiple of decode's capacity, together for each ``--decode-fill``."""
    words = "waste: prefilled tokens that no decode received"
    table = Table(title=f"{TIMES_CAPACITY:g} x as many requests as decode can answer; {words}")
    columns = ["fill", "capacity/s", "asked/s", "goodput/s", *_OUTCOMES]
    columns += ["Retry-After", "wasted", "first token, s: p50", "p99"]
    for column in columns:
        table.add_column(column, justify="right")
    for fill, runs in _by_fill(found).items():
        received, seconds, counts = _together(runs)
        figures = figures_of(received, seconds)
        wasted = counts.wasted_share
        table.add_row(
            f"{fill:g}",
            f"{runs[0].capacity:.2f}",
            f"{len(received) / seconds:.2f}",
            f"{figures.goodput:.2f}",
            *(str(figures.outcomes[kind.value]) for kind in Outcome),
            str(sum(one.retry_after for one in received)),
            "-" if wasted is None else f"{wasted:.1%}",
            _shown(figures.first_p50, 1, 2),
            _shown(figures.first_p99, 1, 2),
        )
    return table


def judge_overload(found: Sequence[Overloaded]) -> list[Verdict]:
    """Return the targets at a multiple of decode's capacity."""
    by_fill = _by_fill(found)
    verdicts = []
    for fill, runs in by_fill.items():
        received, seconds, _ = _together(runs)
        outcomes = figures_of(received, seconds).outcomes
        bad = outcomes[Outcome.WRONG.value] + outcomes[Outcome.NO_END.value]
        words = f"overload, --decode-fill {fill:g}"
        verdicts.append(Verdict(f"{words}: wrong answers, and requests without an end (0)", f"{bad}", bad == 0))
        refused = [one for one in received if one.outcome is Outcome.REFUSED]
        told = sum(one.retry_after for one in refused)
        verdicts.append(
            Verdict(f"{words}: refusals that say when to try again", f"{told} of {len(refused)}", told == len(refused))
        )
    if {0.0, DECODE_FILL} <= by_fill.keys():
        shares = [_together(by_fill[fill])[2].wasted_share or 0.0 for fill in (0.0, DECODE_FILL)]
        verdicts.append(
            Verdict(
                f"overload: less prefill wasted with --decode-fill {DECODE_FILL:g} than without",
                f"{shares[1]:.1%}, without {shares[0]:.1%}",
                shares[1] < shares[0],
            )
        )
    return verdicts


def _by_fill(found: Sequence[Overloaded]) -> dict[float, list[Overloaded]]:
    fills = dict.fromkeys(one.decode_fill for one in sorted(found, key=lambda one: one.decode_fill))
    return {fill: [one for one in found if one.decode_fill == fill] for fill in fills}


def _together(runs: Sequence[Overloaded]) -> tuple[list[Received], float, Counts]:
    """Return the requests, the seconds of load and the counts of several runs."""
    counts = Counts(*(sum(getattr(one.counts, each.name) for one in runs) for each in fields(Counts)))
    return [each for one in runs for each in one.received], sum(one.load_seconds for one in runs), counts


def summary(found: Measured) -> tuple[list[Table], list[Verdict]]:
    """Return the tables of what was measured, and its targets."""
    tables = [table_of_overload(found.overload)] if found.overload else []
    return [*tables, *(tables_of(found.runs) if found.runs else [])], [
        *judge_overload(found.overload),
        *judge(found.runs),
    ]
