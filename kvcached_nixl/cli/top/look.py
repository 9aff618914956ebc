# SPDX-License-Identifier: Apache-2.0
"""What one answer of ``/metrics`` said, and what changed between two answers of one server."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Look", "Span", "read_series"]

Labels = tuple[tuple[str, str], ...]
"""Names and values, sorted."""
Series = Mapping[str, Mapping[Labels, float]]
"""Name of a sample -> its labels -> its value, of at most `MOST_VALUE`.

A name without values is of a metric that the server has, and that has no series yet: such as a counter with labels
before its first event.
"""

MOST_VALUE = 1e30
"""A larger one is no figure of a server. Sums and rates of smaller ones stay finite."""
MOST_ENGINES = 64
"""Of one server that are shown."""
_TYPE = re.compile(r"# TYPE ([A-Za-z0-9_:]+) ([a-z]+)\s*")
_OF_HISTOGRAM = ("_bucket", "_count", "_sum")
_UNREADABLE = (ValueError, IndexError, KeyError, OverflowError)


def read_series(lines: Sequence[str]) -> tuple[Series, int]:
    """Parse lines of the text format.

    Values that are not numbers, or above `MOST_VALUE`, are left out.

    Returns: the series, and how many lines could not be read.
    """
    series: dict[str, dict[Labels, float]] = {}
    samples = []
    for line in lines:
        if not line.startswith("#"):
            samples.append(line)
        elif is_type := _TYPE.fullmatch(line):
            for suffix in _OF_HISTOGRAM if is_type[2] == "histogram" else ("",):
                series.setdefault(is_type[1] + suffix, {})
    try:
        pieces, unread = [_read(samples)], 0
    except _UNREADABLE:
        pieces, unread = [], 0
        for line in samples:
            try:
                pieces.append(_read([line]))
            except _UNREADABLE:
                unread += 1
    for piece in pieces:
        for name, values in piece.items():
            series.setdefault(name, {}).update(values)
    return series, unread


def _read(lines: Iterable[str]) -> dict[str, dict[Labels, float]]:
    series: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families("\n".join(lines)):
        for sample in family.samples:
            value = float(sample.value)
            if abs(value) <= MOST_VALUE:
                series.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = value
    return series


class Look(NamedTuple):
    """One answer.

    Attributes:
        at_seconds: ``time.monotonic`` when it had arrived.
        is_router: it is of a router, otherwise of an engine.
        unread_lines: lines with metrics of interest that could not be read.
    """

    at_seconds: float
    series: Series
    is_router: bool = False
    unread_lines: int = 0

    def by_engine(self) -> dict[str, Look]:
        """What was said of each engine, by vLLM's label ``engine``; numbers first, in order. At most `MOST_ENGINES`.

        The key is "" if no series has the label.
        """
        found = {dict(labels).get("engine", "") for values in self.series.values() for labels in values} - {""}
        named = sorted(found, key=lambda engine: (not engine.isdecimal(), len(engine), engine))[:MOST_ENGINES]
        # What one engine counts, the others count, too.
        split: dict[str, dict[str, dict[Labels, float]]]
        split = {engine: {name: {} for name in self.series} for engine in named or [""]}
        for name, values in self.series.items():
            for labels, value in values.items():
                engine = dict(labels).get("engine", "")
                if engine in split:
                    split[engine][name][labels] = value
        return {engine: self._replace(series=series) for engine, series in split.items()}


class Span(NamedTuple):
    """Two answers of one server, or only the first one.

    Every figure is None where the server does not have the metric, or where one answer does not tell.
    """

    before: Look | None
    now: Look

    @property
    def seconds(self) -> float | None:
        if self.before is None:
            return None
        seconds = self.now.at_seconds - self.before.at_seconds
        return seconds if seconds > 0 else None

    def total(self, name: str) -> float | None:
        """The sum of a metric's series."""
        values = self.now.series.get(name)
        return sum(values.values()) if values else None

    def totals_by(self, name: str, label: str) -> dict[str, float]:
        """The same by one label."""
        return _by(label, self.now.series.get(name, {}), lambda labels, value: value)

    def growth(self, name: str) -> float | None:
        """What a counter has grown by since the look before; never negative."""
        if self.seconds is None or name not in self.now.series:
            return None
        return sum(self.growth_by(name, "").values())

    def growth_by(self, name: str, label: str) -> dict[str, float]:
        """The same by one label; "" where a series does not have it. Empty without a look before."""
        if self.before is None:
            return {}
        earlier = self.before.series.get(name, {})

        def grown(labels: Labels, value: float) -> float:
            # A restarted server counts from 0 again, so all that it has is new.
            past = earlier.get(labels, 0.0)
            return value - past if value >= past else max(value, 0.0)

        return _by(label, self.now.series.get(name, {}), grown)

    def quantile_seconds(self, name: str, share: float) -> tuple[float, bool] | None:
        """A quantile of what a histogram has observed since the look before.

        Args:
            name: of the histogram, without ``_bucket``.

        Returns: the value, interpolated in its bucket; and whether it lies above that, in the last bucket. None if
            nothing was observed.
        """
        buckets = sorted(
            (bound, count)
            for text, count in self.growth_by(f"{name}_bucket", "le").items()
            if not math.isnan(bound := _number(text))
        )
        total = max((count for _, count in buckets), default=0.0)
        if total <= 0:
            return None
        lower, below = 0.0, 0.0
        for bound, count in buckets:
            if count >= share * total:
                if math.isinf(bound):
                    return lower, True
                inside = count - below
                return lower + (bound - lower) * ((share * total - below) / inside if inside > 0 else 1.0), False
            lower, below = bound, count
        return lower, True


def _by(label: str, values: Mapping[Labels, float], of: Callable[[Labels, float], float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for labels, value in values.items():
        key = dict(labels).get(label, "")
        found[key] = found.get(key, 0.0) + of(labels, value)
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
