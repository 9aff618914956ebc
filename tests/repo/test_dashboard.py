# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts of docs/deploy/prometheus ask for what there is. `experiments/dashboard` runs them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import markdown_pages as pages

from experiments.dashboard.queries import (
    FOLDER,
    metrics_of,
    panels_of,
    read_alerts,
    read_dashboard,
    without_threshold,
)
from kvcached_nixl.vllm.adapter import metrics
from kvcached_nixl.wire.causes import FailureCause, RevocationCause
from kvcached_nixl.wire.headroom import Ended

ROOT = Path(__file__).parents[2]
FILE = FOLDER / "dashboard.json"
OF_VLLM = {
    *("vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"),
}
"""Not in docs/metrics.md, since this package does not feed them."""


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(FILE.read_text())
    return read


def documented() -> set[str]:
    text = (ROOT / "docs" / "metrics.md").read_text()
    names = pages.rows(pages.section(text, "Engines"))
    return {name.removesuffix("_total") for name in names if name.startswith(("kvcached_nixl", "vllm:"))}


def variables_of(board: dict[str, Any]) -> set[str]:
    return {one["name"] for one in board["templating"]["list"]}


def test_queries_use_the_variables_that_there_are() -> None:
    """Each of them is used, too."""
    board = dashboard()
    used = set(re.findall(r"\$\{?([a-z_]+)\}?", json.dumps(board["panels"])))
    assert used - {"__range", "__rate_interval"} == variables_of(board)
    assert {"datasource", "job", "model_name", "instance", "engine"} <= used


def test_links_lead_to_headings() -> None:
    links = {link["url"] for _, panel in panels_of(dashboard()) for link in panel.get("links", ())}
    assert len(links) > 5
    for link in links:
        path, _, anchor = link.removeprefix("${docs}/").partition("#")
        assert anchor in pages.anchors((ROOT / "docs" / path).read_text()), link


def test_it_shows_every_metric_of_this_package_and_no_unknown_one() -> None:
    shown = {name for query in read_dashboard(FILE) for name in metrics_of(query.expression)}
    assert len(documented()) > 30
    assert shown - documented() - OF_VLLM == set()
    assert {name for name in documented() if name.startswith("kvcached_nixl")} - shown == set()


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a > 0", "a > bool 0"),
        ('rate(a{b!="c", d=~"e>f"}[5m]) >= 0', 'rate(a{b!="c", d=~"e>f"}[5m]) >= bool 0'),
        ("a > 0 and (b + c) == 0", "a > bool 0 and (b + c) == bool 0"),
    ],
)
def test_an_alert_without_its_threshold_has_a_value_for_each_series(expression: str, expected: str) -> None:
    assert without_threshold(expression) == expected


@pytest.mark.parametrize("expression", ["a", 'a{b!="c"}'])
def test_an_alert_without_a_comparison_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="no comparison"):
        without_threshold(expression)


def test_names_are_those_of_metrics_and_not_of_their_series() -> None:
    expression = (
        'histogram_quantile(0.5, sum by (le) (rate(vllm:a_seconds_bucket{b="kvcached"}[1m]))) / kvcached_nixl:c_total'
    )
    assert metrics_of(expression) == {"vllm:a_seconds", "kvcached_nixl:c"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)")
def test_promtool_reads_the_configuration_and_all_queries_and_agrees_with_the_alerts(tmp_path: Path) -> None:
    def promtool(*arguments: str, folder: Path = FOLDER) -> str:
        done = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    promtool("check", "config", "prometheus.yaml")
    promtool("test", "rules", "alerts_test.yaml")
    queries = [*read_dashboard(FILE), *read_alerts(FOLDER / "alerts.yaml")]
    recorded = [{"record": f"query_{place}", "expr": one.over(60)} for place, one in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": recorded}]}))
    assert f"{len(queries)} rules" in promtool("check", "rules", "rules.yaml", folder=tmp_path)


def rules() -> dict[str, Any]:
    read = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    return {rule["alert"]: rule for group in read["groups"] for rule in group["rules"]}


@pytest.mark.parametrize("name", rules())
def test_an_alert_asks_for_what_is_exported_and_for_causes_that_exist(name: str) -> None:
    asked = re.findall(r"kvcached_nixl[:_][a-z_]+", rules()[name]["expr"])
    exported = {f"kvcached_nixl:{name}" for name in (*metrics.GAUGES, *metrics.COUNTERS)}
    assert asked and {one.removesuffix("_total") for one in asked} <= exported
    known = {one.label for one in (*FailureCause, *RevocationCause)} | {one.value for one in Ended}
    found = re.findall(r'(?:cause|outcome)[=!]~?"([^"]*)"', rules()[name]["expr"])
    assert {one for causes in found for one in causes.split("|")} <= known


def test_each_alert_is_shown_to_fire_and_to_be_silent() -> None:
    tests = [
        test
        for one in yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
        for test in one["alert_rule_test"]
    ]
    assert {one["alertname"] for one in tests if one["exp_alerts"]} == set(rules())
    assert {one["alertname"] for one in tests if not one["exp_alerts"]} == set(rules())
