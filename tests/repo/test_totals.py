# SPDX-License-Identifier: Apache-2.0
"""tests/totals.py: the last line of a run of all tiers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOTALS = Path(__file__).parents[1] / "totals.py"
SUITE = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}" time="{}"/></testsuites>'


@pytest.mark.parametrize(
    ("suites", "line", "status"),
    [
        ([(3, 0, 0, 1, 1.5), (4, 1, 1, 0, 2.0)], "1 failed, 4 passed, 1 skipped, 1 errors in 3.50s", 0),
        ([(3, 0, 0, 3, 1.5)], "no test was run: 3 were skipped", 1),
        ([], "no test was run: 0 were skipped", 1),
    ],
)
def test_the_last_line(suites: list[tuple[object, ...]], line: str, status: int, tmp_path: Path) -> None:
    for number, suite in enumerate(suites):
        (tmp_path / f"{number}.xml").write_text(SUITE.format(*suite))
    ended = subprocess.run([sys.executable, TOTALS, tmp_path], capture_output=True, text=True, check=False)
    assert line in ended.stdout + ended.stderr
    assert ended.returncode == status
