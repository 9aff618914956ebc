# SPDX-License-Identifier: Apache-2.0
"""Reads the queries of the dashboard and of the alert rules. Pure functions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common.servers import REPOSITORY

FOLDER = REPOSITORY / "docs" / "deploy" / "prometheus"
RATE_INTERVAL = "10s"
"""Stands for Grafana's ``$__rate_interval``: several scrapes of a second each."""
_METRIC = re.compile(r"\b(?:kvcached_nixl[:_]|vllm:)[a-z_]+")
_SUFFIX = re.compile(r"_(?:total|bucket|sum|count)\Z")
_COMPARISON = re.compile(r'"[^"]*"|\{[^}]*\}|(?P<operator>==|!=|>=|<=|>|<)')


@dataclass(frozen=True)
class Query:
    """A query with nothing left to substitute but ``$__range``.

    Attributes:
        row, panel: where the dashboard has it; "alerts" and the alert's name for a rule.
        legend: Grafana's format for the names of its series.
    """

    row: str
    panel: str
    expression: str
    legend: str = ""

    def over(self, seconds: int) -> str:
        return self.expression.replace("$__range", f"{seconds}s")

    def label(self, metric: Mapping[str, str]) -> str:
        """Return a series' name in the legend's format: a label that it does not have is left empty."""
        return re.sub(r"\{\{(\w+)\}\}", lambda one: metric.get(one[1], ""), self.legend)


def metrics_of(expression: str) -> set[str]:
    """Return the metrics that a query names, without what Prometheus adds to a counter's or histogram's name."""
    return {_SUFFIX.sub("", name) for name in _METRIC.findall(expression)}


def panels_of(dashboard: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each panel with the title of its row."""
    row = ""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        else:
            yield row, panel


def read_dashboard(path: Path) -> list[Query]:
    """Return all queries, with each variable chosen as "All"."""
    dashboard = json.loads(path.read_text())
    chosen = {one["name"]: one["allValue"] for one in dashboard["templating"]["list"] if one.get("includeAll")}
    found = []
    for row, panel in panels_of(dashboard):
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
            for name, value in chosen.items():
                expression = re.sub(rf"\${name}\b", lambda _, value=value: value, expression)  # type: ignore[misc]
            found.append(Query(row, panel["title"], expression, target["legendFormat"]))
    return found


def read_alerts(path: Path) -> list[Query]:
    """Return each rule's expression without its threshold: it has data whether the alert fires or not."""
    import yaml

    rules = [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
    return [Query("alerts", rule["alert"], without_threshold(rule["expr"])) for rule in rules]


def without_threshold(expression: str) -> str:
    """Return an expression whose comparisons say 0 or 1 for each series, instead of leaving series out.

    Raises:
        ValueError: there is no comparison.
    """
    found, count = _COMPARISON.subn(lambda one: f"{one[0]} bool" if one["operator"] else one[0], expression)
    if not count or found == expression:
        raise ValueError(f"found no comparison in {expression!r}; expected one, as in any alert")
    return found
