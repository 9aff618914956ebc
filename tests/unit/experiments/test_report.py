# SPDX-License-Identifier: Apache-2.0
"""`experiments/common/report.py`: what results say about where they come from."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="comes with the tools of experiments/env.sh")
from experiments.common import report

RUN = Path(__file__).parents[3] / "tests" / "run.sh"


@pytest.mark.parametrize(("reached", "status"), [([True, True], 0), ([True, False], 1), ([], 0)])
def test_one_missed_target_is_the_exit_status(reached: list[bool], status: int, tmp_path: Path) -> None:
    path = tmp_path / "last.json"
    verdicts = [report.Verdict("less than 2 s", "1 s", one) for one in reached]
    assert report.conclude([], verdicts, path, {"began": "now"}) == status
    found = json.loads(path.read_text())
    assert found["targets"] == [{"target": "less than 2 s", "found": "1 s", "reached": one} for one in reached]
    assert found["began"] == "now"


def test_a_turn_without_history_asks_for_its_number() -> None:
    found = subprocess.run(["bash", str(RUN), "--turn", "x"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert "found x; expected a number behind --turn" in found.stderr
