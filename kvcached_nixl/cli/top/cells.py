# SPDX-License-Identifier: Apache-2.0
"""The figure of a column: as text of a known width, and as what JSON gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from kvcached_nixl.cli.top.columns import Column, Figure, Unit
from kvcached_nixl.cli.top.look import Span
from kvcached_nixl.cli.top.target import printable

__all__ = ["Cell", "cell", "short"]

Value: TypeAlias = "float | None | Mapping[str, float | None] | Mapping[str, float]"
NOTHING = "-"
_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Cell(NamedTuple):
    """What a column shows of one server.

    Attributes:
        text: `NOTHING` where it has no such metric, or where one look does not tell.
        value: for programs; numbers have the unit that the column's key names.
    """

    text: str
    value: Value = None


def cell(column: Column, span: Span) -> Cell:
    """The figure of a column over two answers of one server."""
    name = next((one for one in column.metrics if one in span.now.series), column.metrics[0])
    return _OF[column.figure](column, span, name)


def short(value: float | None, unit: Unit = Unit.NUMBER) -> str:
    """A number in at most 6 characters (bytes: 9; seconds: 8)."""
    if value is None:
        return NOTHING
    if unit is Unit.BYTES:
        return _bytes(value)
    if unit is Unit.SECONDS:
        return f"{value:.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 10 else f"{value:.3f} s"
    for step, suffix in _STEPS:
        if abs(value) >= 0.99995 * step and abs(value) >= 9999.5:
            return f"{value / step:.3g}{suffix}" if abs(value) < 999.5 * step else f"{value / step:.0f}{suffix}"[:6]
    return f"{value:.0f}" if value == int(value) or abs(value) >= 99.95 else f"{value:.1f}"


def _bytes(value: float) -> str:
    place = 0
    while abs(value) >= 1023.95 and place < len(_BINARY) - 1:
        value, place = value / 1024, place + 1
    return f"{value:.0f} {_BINARY[place]}" if place == 0 or abs(value) >= 999.5 else f"{value:.1f} {_BINARY[place]}"


def _gauge(column: Column, span: Span, name: str) -> Cell:
    value = span.totals_by(name, column.label).get(column.value) if column.value else span.total(name)
    return Cell(short(value, column.unit), value)


def _rate(column: Column, span: Span, name: str) -> Cell:
    if not span.seconds or name not in span.now.series:
        return Cell(NOTHING)
    growths = span.growth_by(name, column.label)
    growth = growths.get(column.value, 0.0) if column.value else sum(growths.values())
    return Cell(short(growth / span.seconds, column.unit), growth / span.seconds)


def _count(column: Column, span: Span, name: str) -> Cell:
    if name not in span.now.series:
        return Cell(NOTHING, {"total": None, "growth": None})
    total = span.total(name) or 0.0
    growth = sum(span.growth_by(name, "").values()) if span.seconds else None
    more = f" +{short(growth)}" if growth else ""
    return Cell(f"{short(total, column.unit)}{more}", {"total": total, "growth": growth})


def _by_label(column: Column, span: Span, name: str) -> Cell:
    values = span.totals_by(name, column.label)
    return Cell(_listed(sorted(values.items(), reverse=True), column.unit), values)


def _count_by_label(column: Column, span: Span, name: str) -> Cell:
    values = {key: value for key, value in span.totals_by(name, column.label).items() if value}
    return Cell(_listed(_largest(values), column.unit), values)


def _rate_by_label(column: Column, span: Span, name: str) -> Cell:
    seconds = span.seconds
    if not seconds:
        return Cell(NOTHING, {})
    rates = {key: growth / seconds for key, growth in span.growth_by(name, column.label).items() if growth}
    return Cell(_listed(_largest(rates), column.unit), rates)


def _mean_by_label(column: Column, span: Span, _: str) -> Cell:
    sums, counts = (span.growth_by(name, column.label) for name in column.samples)
    means = {key: sums.get(key, 0.0) / count for key, count in counts.items() if count > 0}
    return Cell(_listed(_largest(means), column.unit), means)


def _quantile(column: Column, span: Span, name: str) -> Cell:
    found = span.quantile_seconds(column.metrics[0], column.share)
    if found is None:
        return Cell(NOTHING)
    seconds, is_more = found
    return Cell(f"{'>' if is_more else ''}{short(seconds, column.unit)}", seconds)


def _bar(column: Column, span: Span, _: str) -> Cell:
    used, free = (span.total(one) for one in column.metrics)
    if used is None or free is None or max(0.0, used) + max(0.0, free) <= 0:
        return Cell(NOTHING)
    share = max(0.0, used) / (max(0.0, used) + max(0.0, free))
    return Cell("", share)


def _tokens(column: Column, span: Span, _: str) -> Cell:
    used, free, queued = (span.total(one) for one in column.metrics)
    value = {"used": used, "free": free, "queued": queued}
    if used is None or free is None:
        return Cell(NOTHING, value)
    waits = f" +{short(queued)}" if queued else ""
    return Cell(f"{short(used)}/{short(used + free)}{waits}", value)


def _listed(pairs: list[tuple[str, float]], unit: Unit) -> str:
    return ", ".join(f"{printable(key) or 'none'} {short(value, unit)}" for key, value in pairs) or NOTHING


def _largest(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda pair: (-pair[1], pair[0]))


_OF: Mapping[Figure, Callable[[Column, Span, str], Cell]] = MappingProxyType(
    {
        Figure.GAUGE: _gauge,
        Figure.RATE: _rate,
        Figure.COUNT: _count,
        Figure.BAR: _bar,
        Figure.TOKENS: _tokens,
        Figure.BY_LABEL: _by_label,
        Figure.RATE_BY_LABEL: _rate_by_label,
        Figure.COUNT_BY_LABEL: _count_by_label,
        Figure.MEAN_BY_LABEL: _mean_by_label,
        Figure.QUANTILE: _quantile,
    }
)
