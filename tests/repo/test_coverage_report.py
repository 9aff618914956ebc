# SPDX-License-Identifier: Apache-2.0
"""tests/coverage_report.py: branches are summed up by folder, and too few of them are an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.script_loading import load_script

program = load_script("coverage_report", Path(__file__).resolve().parents[1] / "coverage_report.py")


def report(**taken_of: tuple[int, int]) -> dict[str, Any]:
    files = {f"kvcached_nixl/{name.replace('__', '/')}.py": pair for name, pair in taken_of.items()}
    return {
        "files": {
            file: {"summary": {"covered_branches": taken, "num_branches": branches}}
            for file, (taken, branches) in files.items()
        }
    }


def test_branches_are_summed_up_by_folder() -> None:
    """Of a folder without branches nothing is said."""
    found = program.by_folder(report(worker__decode__a=(3, 4), worker__decode__b=(2, 4), clock=(1, 1), wire__c=(0, 0)))
    assert found == {".": (1, 1), "worker/decode": (5, 8)}


@pytest.mark.parametrize(("taken", "status"), [(90, 0), (89, 1), (None, 1)])
def test_too_few_branches_are_an_error(
    taken: int | None, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And so is a measurement of nothing."""
    written = tmp_path / "report.json"
    written.write_text(json.dumps(report() if taken is None else report(wire__a=(taken, 100))))
    assert program.main([str(written)]) == status
    assert bool(capsys.readouterr().err) == bool(status)
