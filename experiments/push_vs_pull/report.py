# SPDX-License-Identifier: Apache-2.0
"""Computes cells, targets, a table and a plot from samples. No side effects except the plot's file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.common.plots import make_panels, save
from experiments.common.targets import Verdict
from experiments.push_vs_pull.arms import CHUNK_TOKENS, PULL, PUSH_STREAMED, STOCK_PUSH, TRANSPORTS
from experiments.push_vs_pull.measure import Sample

TCP_NAMES = frozenset(one.name for one in TRANSPORTS if one.is_tcp)


@dataclass(frozen=True)
class Cell:
    """Summary of one arm, transport, prompt length and number at a time. Seconds; p99 of few is their maximum."""

    arm: str
    transport: str
    prompt_tokens: int
    at_a_time: int
    samples: int
    first_token_p50: float
    first_token_p90: float
    first_token_p99: float
    token_p50: float
    token_p90: float
    token_p99: float
    exposed_p50: float | None


def percentile(values: Sequence[float], hundredths: int) -> float:
    """Return the smallest value that at least ``hundredths`` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-hundredths * len(ordered) // 100) - 1)]


def cells(samples: Sequence[Sample]) -> list[Cell]:
    """Summarise samples per cell, in the order in which they were measured."""
    found = []
    for arm, transport, length, at_a_time in dict.fromkeys(
        (one.arm, one.transport, one.prompt_tokens, one.at_a_time) for one in samples
    ):
        these = [
            one
            for one in samples
            if (one.arm, one.transport, one.prompt_tokens, one.at_a_time) == (arm, transport, length, at_a_time)
        ]
        first = [one.first_token_seconds for one in these]
        each = [one.token_seconds for one in these]
        exposed = [one.exposed_seconds for one in these if one.exposed_seconds is not None]
        found.append(
            Cell(
                arm,
                transport,
                length,
                at_a_time,
                len(these),
                *(percentile(first, hundredths) for hundredths in (50, 90, 99)),
                *(percentile(each, hundredths) for hundredths in (50, 90, 99)),
                statistics.median(exposed) if exposed else None,
            )
        )
    return found


def judge(found: Sequence[Cell]) -> list[Verdict]:
    """Return the targets of all cells."""
    table = {(one.arm, one.transport, one.prompt_tokens, one.at_a_time): one for one in found}
    rows: list[Verdict] = []
    for (arm, transport, length, at_a_time), pull in table.items():
        streamed = table.get((PUSH_STREAMED.name, transport, length, at_a_time))
        if arm != PULL.name or transport not in TCP_NAMES or streamed is None:
            continue
        gain = pull.first_token_p50 / streamed.first_token_p50
        least = 1.5 if length >= 1024 else 1.0
        rows.append(
            Verdict(
                f"{transport}, {length} tokens, {at_a_time} at a time: first token, pull / streamed push (>= {least})",
                f"{gain:.2f} x",
                gain >= least,
            )
        )
    for transport in dict.fromkeys(one.transport for one in found):
        rows += _hidden(table, transport)
    for (arm, transport, length, at_a_time), stock in table.items():
        streamed = table.get((PUSH_STREAMED.name, transport, length, at_a_time))
        if arm == STOCK_PUSH.name and streamed is not None and length >= 2048:
            gain = stock.first_token_p50 / streamed.first_token_p50
            rows.append(
                Verdict(
                    f"{transport}, {length} tokens, {at_a_time} at a time: stock push / streamed push (>= 1.2)",
                    f"{gain:.2f} x",
                    gain >= 1.2,
                )
            )
    return rows


def _hidden(table: dict[tuple[str, str, int, int], Cell], transport: str) -> list[Verdict]:
    """Return the targets for a streamed push's transfer time after the last step, relative to a one-chunk prompt."""
    rows = []
    chunk = table.get((PUSH_STREAMED.name, transport, CHUNK_TOKENS, 1))
    for (arm, where, length, at_a_time), streamed in table.items():
        if (arm, where, at_a_time) != (PUSH_STREAMED.name, transport, 1) or length <= CHUNK_TOKENS or chunk is None:
            continue
        assert streamed.exposed_p50 is not None and chunk.exposed_p50 is not None
        rows.append(
            Verdict(
                f"{transport}, {length} tokens: transfer left after the last step, / a prompt of one chunk (<= 1.1 x)",
                f"{streamed.exposed_p50 * 1e3:.0f} ms of {chunk.exposed_p50 * 1e3:.0f} ms",
                streamed.exposed_p50 <= 1.1 * chunk.exposed_p50,
            )
        )
    return rows


def table_of_cells(found: Sequence[Cell], title: str) -> Table:
    """Return a table with one row per cell; the arms of one load are in adjacent rows."""
    table = Table(title=title)
    for column in ("over", "prompt", "at once", "arm", "n", "TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99", "left"):
        table.add_column(column, justify="left" if column in ("over", "arm") else "right", no_wrap=True)
    order = {arm: place for place, arm in enumerate(dict.fromkeys(one.arm for one in found))}
    for one in sorted(found, key=lambda c: (c.transport, c.prompt_tokens, c.at_a_time, order[c.arm])):
        times = (one.first_token_p50, one.first_token_p90, one.first_token_p99)
        each = (one.token_p50, one.token_p90, one.token_p99)
        table.add_row(
            one.transport,
            str(one.prompt_tokens),
            str(one.at_a_time),
            one.arm,
            str(one.samples),
            *(f"{seconds * 1e3:.0f}" for seconds in times),
            *(f"{seconds * 1e3:.1f}" for seconds in each),
            "" if one.exposed_p50 is None else f"{one.exposed_p50 * 1e3:.0f}",
        )
    return table


def plot(found: Sequence[Cell], title: str, path: Path) -> None:
    """Plot time to first token over prompt length for one request at a time: a panel per transport, p50 to p90."""
    transports = list(dict.fromkeys(one.transport for one in found))
    figure, panels = make_panels(len(transports), 5.2 * len(transports), 4, sharey=True)
    for panel, transport in zip(panels, transports, strict=True):
        for arm in dict.fromkeys(one.arm for one in found):
            line = [one for one in found if (one.arm, one.transport, one.at_a_time) == (arm, transport, 1)]
            lengths = [one.prompt_tokens for one in line]
            middle: Any = [one.first_token_p50 for one in line]
            panel.plot(lengths, middle, marker="o", markersize=3, label=arm)
            panel.fill_between(lengths, middle, [one.first_token_p90 for one in line], alpha=0.15)
        panel.set(xscale="log", yscale="log", title=transport, xlabel="prompt, tokens")
        panel.set_xticks(lengths, [str(length) for length in lengths])
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("time to first token, s (p50, shaded to p90)")
    panels[0].legend(fontsize=8)
    save(figure, title, path)
