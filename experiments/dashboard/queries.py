# SPDX-License-Identifier: Apache-2.0
"""Does every query of the dashboard and of the alert rules return data from a real Prometheus?

Starts Prometheus (apt-get install prometheus), and one after the other pairs of prefill and decode that it scrapes:
pull, whose requests also fail on purpose, and whose servers are killed at last; push; and staged through a small slab.
Each query of docs/deploy/prometheus/dashboard.json and of alerts.yaml (without its threshold) is run over the whole
time, and docs/deploy/prometheus/dashboard.png is drawn from the answers.

Targets: every query returns a finite value, and one for a metric that does not exist returns none; decode answers most
of the requests of each pair; when a pair is idle again, its memory is back.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from experiments.common.report import Run, Verdict, make_panels, make_table, save
from experiments.common.servers import ServerError
from experiments.dashboard.pairs import FOLDER, OK, PAIRS, Load, load_pair, scraping

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
    rules = [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
    return [Query("alerts", rule["alert"], without_threshold(rule["expr"])) for rule in rules]


def without_threshold(expression: str) -> str:
    """Return an expression whose comparisons say 0 or 1 for each series, instead of leaving series out. Raises
    ValueError if there is no comparison."""
    found, count = _COMPARISON.subn(lambda one: f"{one[0]} bool" if one["operator"] else one[0], expression)
    if not count or found == expression:
        raise ValueError(f"found no comparison in {expression!r}; expected one, as in any alert")
    return found


# ---------------------------------------------------------------------------------------------------------- a whole run


PLANTED = Query("planted", "a metric that does not exist", "sum(rate(kvcached_nixl:no_such_metric_total[10s]))")
COLOURS = 96
MOST_NAMES = 6
"""Series that a panel's legend names: those with the largest values."""


def main(run: Run) -> int:
    program = shutil.which("prometheus")
    if program is None:
        raise ServerError("found no prometheus on the PATH. No query can be run. apt-get install prometheus")
    with scraping(program, run.logs) as prometheus:
        loads = [load_pair(one, prometheus, run.logs, run.say) for one in PAIRS]
        run.say("asking Prometheus")
        queries = [*read_dashboard(FOLDER / "dashboard.json"), *read_alerts(FOLDER / "alerts.yaml")]
        seconds = max(1, int(prometheus.over_time("time()")[0]["values"][-1][0] - prometheus.began_at))
        found = []
        for query in (*queries, PLANTED):
            answer = Answer(query)
            for one in prometheus.over_time(query.over(seconds)):
                pairs = [(float(at) - prometheus.began_at, float(value)) for at, value in one["values"]]
                if finite := [pair for pair in pairs if math.isfinite(pair[1])]:
                    answer.series.append((one["metric"], finite))
            found.append(answer)
        fired = prometheus.over_time('ALERTS{alertstate="firing"}')
        content = {
            "prometheus": prometheus.version(),
            "alerts_fired": sorted({one["metric"]["alertname"] for one in fired}),
            "loads": [vars(one) for one in loads],
            "queries": [one.as_json() for one in found],
        }
    draw(found, loads, FOLDER / "dashboard.png")
    rows = [(one.query.row, one.query.panel, str(len(one.series)), str(one.num_values)) for one in found]
    table = make_table("what each query returned", ("row", "panel", "series", "values"), rows)
    return run.conclude([table], judge(found, loads), content)


@dataclass(frozen=True)
class Answer:
    """What a query returned: each series' labels, and its (seconds since the start, value) pairs that are finite."""

    query: Query
    series: list[tuple[dict[str, str], list[tuple[float, float]]]] = field(default_factory=list)

    @property
    def num_values(self) -> int:
        return sum(len(values) for _, values in self.series)

    def as_json(self) -> dict[str, Any]:
        """Return the query with its size and its largest value."""
        largest = max((value for _, values in self.series for _, value in values), default=None)
        place = {"row": self.query.row, "panel": self.query.panel, "query": self.query.expression}
        return {**place, "series": len(self.series), "values": self.num_values, "largest": largest}


def judge(found: Sequence[Answer], loads: Sequence[Load]) -> list[Verdict]:
    asked = [one for one in found if one.query is not PLANTED]
    empty = [f"{one.query.row}: {one.query.panel}" for one in asked if not one.num_values]
    (planted,) = [one for one in found if one.query is PLANTED]
    verdicts = [
        Verdict("queries that return no value (0)", "; ".join(empty) or f"0 of {len(asked)}", not empty),
        Verdict("values of a metric that does not exist (0)", str(planted.num_values), not planted.num_values),
    ]
    for load in loads:
        right, number = load.outcomes.get(OK, 0), sum(load.outcomes.values())
        outcomes = f"{right} of {number}: {dict(load.outcomes)}"
        again = "yes" if load.is_idle_again else "no"
        verdicts.append(Verdict(f"{load.pair}: answered (most)", outcomes, 2 * right > number))
        verdicts.append(Verdict(f"{load.pair}: no KV in use when idle again (yes)", again, load.is_idle_again))
    return verdicts


def draw(found: Sequence[Answer], loads: Sequence[Load], path: Path) -> None:
    from PIL import Image

    panels: dict[str, list[Answer]] = {}
    for one in found:
        if one.query is not PLANTED and one.query.row != "alerts":
            panels.setdefault(f"{one.query.row}\n{one.query.panel}", []).append(one)
    figure, places = make_panels(len(panels), 18, 2.1 * -(-len(panels) // 4), a_row=4)
    for axes, (title, answers) in zip(places, panels.items(), strict=True):
        axes.set_title(title, fontsize=7, loc="left")
        series = [(one.query.label(metric), values) for one in answers for metric, values in one.series]
        series.sort(key=lambda one: -max(value for _, value in one[1]))
        for place, (name, values) in enumerate(series):
            label = (name or "all") if place < MOST_NAMES else None
            axes.plot(*zip(*values, strict=True), ".", markersize=2, label=label)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=6)
        axes.grid(alpha=0.3)
        if series:
            axes.legend(fontsize=5)
    began = ", ".join(f"{load.pair} from {load.began_seconds:.0f} s" for load in loads)
    figure.supxlabel(f"seconds since the start: {began}", fontsize=9)
    save(figure, "", path)
    # A quarter of the size.
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)
