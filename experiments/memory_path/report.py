# SPDX-License-Identifier: Apache-2.0
"""Computes tables, targets and a plot of the cost and gain of staging. No side effects except the plot's file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from experiments.common.plots import make_panels, save
from experiments.common.targets import Verdict
from experiments.memory_path.arms import PAIRS, SLAB_GIB
from experiments.memory_path.occupied import Loaded, Occupied
from experiments.memory_path.resident import Resident
from experiments.push_vs_pull.report import TCP_NAMES, Cell

MOST_OF_SLAB = 1.05
MOST_OF_DIRECT = 1.15
MOST_OF_COPY = 1.2
_MIB = 2**20


def judge_resident(found: Sequence[Resident], slab_gib: float = SLAB_GIB) -> list[Verdict]:
    """Return the targets of resident memory: the slab and little more, whatever the reserved size."""
    slab_mib = slab_gib * 1024
    rows = []
    for side in dict.fromkeys(one.side for one in found):
        more = {
            gib: sum((1 if "staged" in one.arm else -1) * one.anonymous_bytes for one in found if _is(one, side, gib))
            / _MIB
            for gib in dict.fromkeys(one.reserved_gib for one in found)
        }
        for gib, mib in more.items():
            stock = next(one.stock_buffer_bytes for one in found if _is(one, side, gib)) / _MIB
            rows.append(
                Verdict(
                    f"{side}, {gib:g} GiB reserved: resident beyond the direct path (<= {MOST_OF_SLAB} x the slab)",
                    f"{mib:.0f} MiB, slab {slab_mib:.0f} MiB; stock host buffer {stock:.0f} MiB",
                    mib <= MOST_OF_SLAB * slab_mib,
                )
            )
        spread = max(more.values()) - min(more.values())
        rows.append(
            Verdict(
                f"{side}: the same for all reserved sizes (within {MOST_OF_SLAB - 1:.0%} of the slab)",
                f"{spread:.0f} MiB apart",
                spread <= (MOST_OF_SLAB - 1) * slab_mib,
            )
        )
    return rows


def _is(one: Resident, side: str, gib: float) -> bool:
    return (one.side, one.reserved_gib) == (side, gib)


def judge_first_token(found: Sequence[Cell]) -> list[Verdict]:
    """Return the targets of staged arms over TCP, compared with the same arm on the direct path."""
    table = {(one.arm, one.transport, one.prompt_tokens, one.at_a_time): one for one in found}
    rows = []
    for direct, staged in PAIRS:
        for (arm, *where), cell in table.items():
            beside = table.get((staged.name, *where))
            if arm == direct.name and cell.transport in TCP_NAMES and beside is not None:
                ratio = beside.first_token_p50 / cell.first_token_p50
                rows.append(
                    Verdict(
                        f"{cell.transport}, {arm}, {cell.prompt_tokens} tokens, {cell.at_a_time} at a time: first "
                        f"token, staged / direct (<= {MOST_OF_DIRECT})",
                        f"{ratio:.2f} x",
                        ratio <= MOST_OF_DIRECT,
                    )
                )
    return rows


def judge_occupied(found: Sequence[Occupied]) -> list[Verdict]:
    """Return the targets of staged arms: blocks stay in use for the time of the copy and little more."""
    rows = []
    for arm, length in dict.fromkeys((one.arm, one.prompt_tokens) for one in found if one.copied_seconds):
        these = [one for one in found if (one.arm, one.prompt_tokens) == (arm, length)]
        occupied, copied = _median(these, "occupied_seconds"), _median(these, "copied_seconds")
        rows.append(
            Verdict(
                f"{arm}, {length} tokens: prefill's blocks stay in use (<= {MOST_OF_COPY} x the copy)",
                f"{occupied * 1e3:.0f} ms, the copy {copied * 1e3:.0f} ms",
                occupied <= MOST_OF_COPY * copied,
            )
        )
    return rows


def _median(these: Sequence[Occupied], name: str) -> float:
    return float(statistics.median(getattr(one, name) for one in these))


def table_of_occupied(found: Sequence[Occupied]) -> Table:
    """Medians."""
    table = Table(title="after prefill's last step, ms")
    for column in ("arm", "prompt", "blocks in use for", "pages mapped for", "copied for", "first token after"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, length in dict.fromkeys((one.arm, one.prompt_tokens) for one in found):
        these = [one for one in found if (one.arm, one.prompt_tokens) == (arm, length)]
        names = ("occupied_seconds", "mapped_seconds", "copied_seconds", "whole_seconds")
        times = (_median(these, name) for name in names)
        table.add_row(arm, str(length), *(f"{seconds * 1e3:.0f}" for seconds in times))
    return table


def table_of_loaded(found: Sequence[Loaded], page_group_bytes: int) -> Table:
    """Return a table of how much of prefill's pool is free for another model."""
    table = Table(title="under load, with late requests to decode: prefill's pool on average")
    for column in ("arm", "requests/s", "mapped, MiB", "of the pool", "page groups free for a second model"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for one in found:
        table.add_row(
            one.arm,
            f"{one.requests / one.seconds:.1f}",
            f"{one.mean_mapped_bytes / _MIB:.0f}",
            f"{one.mean_mapped_bytes / one.pool_bytes:.0%}",
            f"{(one.pool_bytes - one.mean_mapped_bytes) / page_group_bytes:.1f}",
        )
    return table


def plot(occupied: Sequence[Occupied], loaded: Sequence[Loaded], title: str, path: Path) -> None:
    """Plot how long blocks stay in use by prompt length, and the mapped bytes under load, for all arms."""
    figure, (times, pool) = make_panels(2, 10.4, 4)
    for arm in dict.fromkeys(one.arm for one in occupied):
        lengths = sorted({one.prompt_tokens for one in occupied if one.arm == arm})
        middle = [
            _median([one for one in occupied if (one.arm, one.prompt_tokens) == (arm, length)], "occupied_seconds")
            for length in lengths
        ]
        times.plot(lengths, middle, marker="o", markersize=3, label=arm)
    times.set(xscale="log", yscale="log", xlabel="prompt, tokens", ylabel="blocks in use after the last step, s")
    times.grid(alpha=0.3)
    times.legend(fontsize=8)
    pool.bar([one.arm for one in loaded], [one.mean_mapped_bytes / _MIB for one in loaded])
    pool.set(ylabel="MiB of the pool mapped, under load")
    pool.tick_params(axis="x", labelrotation=20)
    save(figure, title, path)
