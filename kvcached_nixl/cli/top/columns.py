# SPDX-License-Identifier: Apache-2.0
"""Which metric is which column. A metric that no server has costs no column, so a new one is one line here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

__all__ = ["ENGINE_COLUMNS", "ROUTER_COLUMNS", "Column", "Figure", "Unit", "wanted_lines"]

KV = "kvcached_nixl:"
ROUTER = "kvcached_nixl_router_"


class Figure(Enum):
    """What is shown of a column's metrics."""

    GAUGE = "the value"
    RATE = "growth a second"
    COUNT = "the total, and what it has grown by since the last look"
    BAR = "the share that is used; the metrics are used and free"
    TOKENS = "used of all, and what is queued; the metrics are used, free and queued"
    BY_LABEL = "the values by a label"
    RATE_BY_LABEL = "growth a second by a label, largest first"
    COUNT_BY_LABEL = "totals by a label, largest first"
    MEAN_BY_LABEL = "the mean of a histogram's observations since the last look by a label, largest first"
    QUANTILE = "a quantile of a histogram's observations since the last look"


class Unit(Enum):
    NUMBER = "number"
    BYTES = "bytes"
    SECONDS = "seconds"


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        key: its name in JSON, with the unit.
        title: its head on the screen.
        metrics: names of samples, or of histograms. The first one that a server has is shown; `Figure.BAR` and
            `Figure.TOKENS` need all.
        width: characters.
        rank: columns with a higher rank are left out first where the terminal is narrow.
        label: for the figures by label, and for `Figure.GAUGE` and `Figure.RATE` with ``value``.
        value: only series whose label has this value.
        share: for `Figure.QUANTILE`.
    """

    key: str
    title: str
    figure: Figure
    metrics: tuple[str, ...]
    width: int
    rank: int
    unit: Unit = Unit.NUMBER
    label: str = ""
    value: str = ""
    share: float = 0.0

    @property
    def samples(self) -> tuple[str, ...]:
        """Names of the samples that it shows."""
        suffixes = {Figure.QUANTILE: ("_bucket",), Figure.MEAN_BY_LABEL: ("_sum", "_count")}.get(self.figure, ("",))
        return tuple(name + suffix for name in self.metrics for suffix in suffixes)


_TOKENS = tuple(f"{KV}{what}_tokens" for what in ("used", "free", "queued"))
_FAILURES, _REVOKED = f"{KV}handover_failures_total", f"{KV}revoked_offers_total"
_MOVED = f"{KV}moved_bytes_total"
_TTFT = f"{ROUTER}time_to_first_token_seconds"
_OUTCOMES = f"{ROUTER}requests_total"

ENGINE_COLUMNS = (
    Column("running_requests", "run", Figure.GAUGE, ("vllm:num_requests_running",), 5, 2),
    Column("waiting_requests", "wait", Figure.GAUGE, ("vllm:num_requests_waiting",), 5, 2),
    Column("used_share", "KV used", Figure.BAR, _TOKENS[:2], 8, 3),
    Column("tokens", "tokens/all +queued", Figure.TOKENS, _TOKENS, 18, 1),
    Column("failed_handovers", "failed", Figure.COUNT, (_FAILURES,), 9, 4),
    Column("handovers_per_second", "handov/s", Figure.RATE, ("vllm:nixl_xfer_time_seconds_count",), 8, 5),
    Column("bytes_per_second", "bytes/s", Figure.RATE, (_MOVED, "vllm:nixl_bytes_transferred_sum"), 9, 6, Unit.BYTES),
    Column("mapped_bytes", "mapped", Figure.GAUGE, (f"{KV}mapped_bytes",), 9, 6, Unit.BYTES),
    Column("kept_offers", "kept", Figure.GAUGE, (f"{KV}kept_offers",), 5, 7),
    Column("quarantined_blocks", "quarant.", Figure.GAUGE, (f"{KV}quarantined_blocks",), 8, 7),
    Column("revoked_offers", "revoked", Figure.COUNT, (_REVOKED,), 9, 8),
    Column("waiting_fetches", "fetches", Figure.GAUGE, (f"{KV}waiting_fetches",), 7, 9),
    Column("oldest_fetch_seconds", "oldest", Figure.GAUGE, (f"{KV}oldest_fetch_seconds",), 8, 12, Unit.SECONDS),
    Column("free_bytes", "free mem", Figure.GAUGE, (f"{KV}free_bytes",), 9, 11, Unit.BYTES),
    Column("slab_used_slots", "slab used", Figure.GAUGE, (f"{KV}slab_used_slots",), 9, 13),
    Column("slab_waiting_handovers", "slab wait", Figure.GAUGE, (f"{KV}slab_waiting",), 9, 13),
    Column(
        *("bytes_per_second_by_direction", "bytes/s by direction", Figure.RATE_BY_LABEL, (_MOVED,), 20, 10, Unit.BYTES),
        label="direction",
    ),
    Column(
        *("bytes_per_second_by_path", "bytes/s by path", Figure.RATE_BY_LABEL, (_MOVED,), 18, 15, Unit.BYTES),
        label="path",
    ),
    Column("failed_handovers_by_cause", "failed by cause", Figure.COUNT_BY_LABEL, (_FAILURES,), 22, 9, label="cause"),
    Column(
        *("seconds_by_state", "mean time by state", Figure.MEAN_BY_LABEL, (f"{KV}handover_state_seconds",), 34, 14),
        Unit.SECONDS,
        label="state",
    ),
)
ROUTER_COLUMNS = (
    Column("ok_per_second", "ok/s", Figure.RATE, (_OUTCOMES,), 6, 1, label="outcome", value="ok"),
    Column("in_flight_legs", "in flight", Figure.BY_LABEL, (f"{ROUTER}in_flight",), 23, 2, label="role"),
    Column("waiting_requests", "wait", Figure.GAUGE, (f"{ROUTER}waiting_requests",), 5, 1),
    Column("ttft_p50_seconds", "TTFT p50", Figure.QUANTILE, (_TTFT,), 9, 3, Unit.SECONDS, share=0.5),
    Column("ttft_p99_seconds", "TTFT p99", Figure.QUANTILE, (_TTFT,), 9, 3, Unit.SECONDS, share=0.99),
    Column("ejections", "ejected", Figure.COUNT, (f"{ROUTER}ejections_total",), 9, 4),
    Column("retries", "retried", Figure.COUNT, (f"{ROUTER}retries_total",), 9, 6),
    Column(
        *("requests_per_second_by_outcome", "requests/s by outcome", Figure.RATE_BY_LABEL, (_OUTCOMES,), 34, 5),
        label="outcome",
    ),
    Column(
        *("handovers_per_second_by_direction", "hand-overs/s", Figure.RATE_BY_LABEL, (f"{ROUTER}handovers_total",)),
        *(22, 7),
        label="direction",
    ),
)
UP = f"{ROUTER}up"
ALONE = f"{ROUTER}decode_alone_total"
KINDS = tuple(f"{KV}{what}_id" for what in ("compatibility", "checkpoint", "weights"))


def wanted_lines() -> re.Pattern[bytes]:
    """Matches a line of the text format, without its end: a sample that something here shows, or the type of one."""
    columns = (*ENGINE_COLUMNS, *ROUTER_COLUMNS)
    names = {name for one in columns for name in one.samples}
    names |= {UP, ALONE, *KINDS}
    types = {re.sub("_(?:bucket|count|sum)$", "", name) for name in names}
    samples, heads = ("|".join(sorted(some)).encode() for some in (names, types))
    return re.compile(rb"^(?:(?:%b)(?=[{ \t])|# TYPE (?:%b) )[^\n]*" % (samples, heads), re.MULTILINE)
