# SPDX-License-Identifier: Apache-2.0
"""Computes tables, targets and the plot from runs. No side effects except the plot's file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from rich.table import Table

from experiments.bench.samples import percentile
from experiments.common.report import Verdict, make_panels, make_table, save
from experiments.shared_device.arms import Device
from experiments.shared_device.clients import Outcome, Received
from experiments.shared_device.counts import Counts
from experiments.shared_device.measure import ASKS, TIMES_CAPACITY, WAYS, Overloaded, Ran

FIRST_TOKEN_SECONDS = 5.0
TOKEN_SECONDS = 0.2
"""The latency bound: a request counts if its first token came in time, and its further ones on average."""


@dataclass(frozen=True)
class Figures:
    """What an operator compares. Times in seconds; None where there is nothing to take them from.

    Attributes:
        goodput: right answers within the latency bound, a second of load.
        outcomes: how many requests came to each.
    """

    goodput: float
    first_p50: float | None
    first_p99: float | None
    token_p50: float | None
    token_p99: float | None
    outcomes: Mapping[str, int]


def _percentile(values: Sequence[float], hundredths: int) -> float | None:
    return percentile(hundredths)(values) if values else None


def is_good(one: Received) -> bool:
    """Whether an answer is right and came within the latency bound."""
    if one.outcome is not Outcome.RIGHT or one.first_token_seconds is None:
        return False
    gaps = one.gaps_seconds
    return one.first_token_seconds <= FIRST_TOKEN_SECONDS and (not gaps or sum(gaps) / len(gaps) <= TOKEN_SECONDS)


def figures_of(received: Sequence[Received], load_seconds: float) -> Figures:
    """Return the figures of a run. First tokens of requests that got none do not count; they are in ``outcomes``."""
    firsts = [one.first_token_seconds for one in received if one.first_token_seconds is not None]
    gaps = [gap for one in received for gap in one.gaps_seconds]
    return Figures(
        goodput=sum(map(is_good, received)) / load_seconds,
        first_p50=_percentile(firsts, 50),
        first_p99=_percentile(firsts, 99),
        token_p50=_percentile(gaps, 50),
        token_p99=_percentile(gaps, 99),
        outcomes={kind.value: sum(one.outcome is kind for one in received) for kind in Outcome},
    )


def peaks(ran: Ran) -> tuple[int, dict[str, int]]:
    """Return the most bytes of the device that were in use at once, and the most of each model."""
    models = dict.fromkeys(name.partition(",")[0] for one in ran.samples for name in one.used_bytes)
    total = max((one.total_bytes for one in ran.samples), default=0)

    def of_model(used: Mapping[str, int], model: str) -> int:
        return sum(count for name, count in used.items() if name.startswith(f"{model},"))

    return total, {model: max(of_model(one.used_bytes, model) for one in ran.samples) for model in models}


# --------------------------------------------------------------------------------------------------- tables and targets


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
_SPEED = ("goodput/s", "first token, s: p50", "p99", "between tokens, ms: p50", "p99")
_FATE = (*_OUTCOMES, "wasted", "taken back", "again", "peak, MiB")


def tables_of(runs: Sequence[Ran], title: str) -> list[Table]:
    """Return the tables that an operator decides by: how fast each arm was, and what came of requests and memory.

    Args:
        title: what is served.
    """
    words = f"first token <= {FIRST_TOKEN_SECONDS:g} s, further ones <= {TOKEN_SECONDS * 1e3:g} ms on average"
    speed, fate = [], []
    for ran in runs:
        if ran.not_run:
            speed.append([ran.arm, "not run", *[""] * (len(_SPEED) - 1)])
            fate.append([ran.arm, "not run", *[""] * (len(_FATE) - 1)])
            continue
        found, wasted = figures_of(ran.received, ran.load_seconds), ran.counts.wasted_share
        firsts, gaps = (found.first_p50, found.first_p99), (found.token_p50, found.token_p99)
        times = (*(_shown(one, 1, 2) for one in firsts), *(_shown(one, 1e3, 0) for one in gaps))
        speed.append([ran.arm, f"{found.goodput:.2f}", *times])
        fate.append(
            [
                ran.arm,
                *(str(found.outcomes[kind.value]) for kind in Outcome),
                "-" if wasted is None else f"{wasted:.1%}",
                f"{ran.counts.revoked:g}",
                f"{ran.counts.preempted:g}",
                f"{peaks(ran)[0] / _MIB:.0f}" if ran.samples else "split",
            ]
        )
    reasons = [f"{ran.arm} was not run: {ran.not_run}" for ran in runs if ran.not_run]
    tables = [
        make_table(f"{title}; goodput: right answers a second with {words}", ("arm", *_SPEED), speed),
        make_table("what came of the requests, of prefill and of the memory", ("arm", *_FATE), fate),
    ]
    tables[1].caption = "\n".join(reasons) or None
    return tables


def _shown(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


def judge(runs: Sequence[Ran], device: Device, prefix: str = "") -> list[Verdict]:
    """Return the targets: right tokens and an end for every request of this package; peaks that do not fit together.

    Args:
        prefix: of the targets' names.
    """
    verdicts = []
    for ran in runs:
        words = f"{prefix}{ran.arm}"
        if not ran.arm.startswith("this package"):
            continue
        if ran.not_run:
            verdicts.append(Verdict(f"{words}: serves throughout", ran.not_run, False))
            continue
        bad = sum(one.outcome in (Outcome.WRONG, Outcome.NO_END) for one in ran.received)
        total, of_models = peaks(ran)
        mib = " and ".join(f"{count / _MIB:.0f}" for count in of_models.values())
        within = f"{total / _MIB:.0f} of {device.num_bytes / _MIB:.0f} MiB"
        verdicts += [
            Verdict(
                f"{words}: wrong answers, and requests without an end (0)", f"{bad} of {len(ran.received)}", not bad
            ),
            Verdict(f"{words}: the models' peaks, {mib} MiB, within the device", within, total <= device.num_bytes),
        ]
    return verdicts


def plot(runs: Sequence[Ran], device: Device, title: str, path: Path) -> None:
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
        panel.axhline(device.num_bytes / _MIB, color="black", linewidth=1, linestyle="--")
        panel.set_title(ran.arm.removeprefix("this package, "), fontsize=9)
        panel.set(xlabel="seconds", ylim=(0, 1.3 * device.num_bytes / _MIB))
        if place % PANELS_A_ROW == 0:
            panel.set(ylabel="MiB of the device")
        panel.legend(fontsize=6, loc="upper left", ncols=2)
    save(figure, title, path)


def table_of_overload(found: Sequence[Overloaded]) -> Table:
    """Return a table of the runs at a multiple of decode's capacity, together for each way."""
    words = "waste: prefilled tokens that no decode received"
    rows = []
    for way, runs in _by_way(found).items():
        received, seconds, counts = _together(runs)
        figures = figures_of(received, seconds)
        wasted = counts.wasted_share
        rows.append(
            [
                way,
                f"{runs[0].capacity:.2f}",
                f"{len(received) / seconds:.2f}",
                f"{figures.goodput:.2f}",
                *(str(figures.outcomes[kind.value]) for kind in Outcome),
                str(sum(one.retry_after for one in received)),
                "-" if wasted is None else f"{wasted:.1%}",
                _shown(figures.first_p50, 1, 2),
                _shown(figures.first_p99, 1, 2),
            ]
        )
    columns = ("", "capacity/s", "asked/s", "goodput/s", *_OUTCOMES, "Retry-After", "wasted", "first token, s: p50")
    title = f"{TIMES_CAPACITY:g} x as many requests as decode can answer; {words}"
    return make_table(title, (*columns, "p99"), rows)


def judge_overload(found: Sequence[Overloaded]) -> list[Verdict]:
    """Return the targets at a multiple of decode's capacity."""
    verdicts = []
    for way, runs in _by_way(found).items():
        received, seconds, counts = _together(runs)
        outcomes = figures_of(received, seconds).outcomes
        bad = outcomes[Outcome.WRONG.value] + outcomes[Outcome.NO_END.value]
        words = f"overload, {way}"
        verdicts.append(Verdict(f"{words}: wrong answers, and requests without an end (0)", f"{bad}", bad == 0))
        refused = [one for one in received if one.outcome is Outcome.REFUSED]
        told = sum(one.retry_after for one in refused)
        verdicts.append(
            Verdict(f"{words}: refusals that say when to try again", f"{told} of {len(refused)}", told == len(refused))
        )
        if way == ASKS:
            share = counts.wasted_share or 0.0
            verdicts.append(Verdict(f"{words}: prefill wasted (0.0 %)", f"{share:.1%}", share < 0.0005))
    return verdicts


def _by_way(found: Sequence[Overloaded]) -> dict[str, list[Overloaded]]:
    return {way: some for way in WAYS if (some := [one for one in found if one.way == way])}


def _together(runs: Sequence[Overloaded]) -> tuple[list[Received], float, Counts]:
    """Return the requests, the seconds of load and the counts of several runs."""
    counts = Counts(*(sum(getattr(one.counts, each.name) for one in runs) for each in fields(Counts)))
    return [each for one in runs for each in one.received], sum(one.load_seconds for one in runs), counts
