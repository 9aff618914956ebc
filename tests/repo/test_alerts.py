# SPDX-License-Identifier: Apache-2.0
"""docs/deploy/prometheus: each alert asks for metrics that exist, and is shown to fire and to be silent."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcached_nixl.wire.causes import FailureCause, RevocationCause
from kvcached_nixl.wire.headroom import Ended

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "deploy" / "prometheus"
EXPORTED = re.compile(r'"(kvcached_nixl:[a-z_]+)"')


def rules() -> dict[str, Any]:
    read = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    return {rule["alert"]: rule for group in read["groups"] for rule in group["rules"]}


def exported() -> set[str]:
    adapter = (path.read_text() for path in (ROOT / "kvcached_nixl/vllm/adapter").glob("*metrics.py"))
    engine = {name for text in adapter for name in EXPORTED.findall(text)}
    assert len(engine) > 8
    return engine


@pytest.mark.parametrize("name", rules())
def test_an_alert_asks_for_what_is_exported(name: str) -> None:
    asked = re.findall(r"kvcached_nixl[:_][a-z_]+", rules()[name]["expr"])
    assert asked and {one.removesuffix("_total") for one in asked} <= exported()


@pytest.mark.parametrize("name", rules())
def test_the_causes_of_an_alert_exist(name: str) -> None:
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


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)")
def test_promtool_agrees() -> None:
    done = subprocess.run(["promtool", "test", "rules", "alerts_test.yaml"], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
