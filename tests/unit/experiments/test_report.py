# SPDX-License-Identifier: Apache-2.0
"""`experiments/common/report.py`: what results say about where they come from."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="comes with the tools of experiments/env.sh")
from experiments.common import report

RUN = Path(__file__).parents[3] / "tests" / "run.sh"


def test_an_unpacked_archive_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it lies in another project's repository, or there is no git."""
    archive = tmp_path / "archive"
    archive.mkdir()
    monkeypatch.setattr(report, "REPOSITORY", archive)
    if shutil.which("git"):
        subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
        subprocess.run(
            [
                "git",
                "-C",
                str(tmp_path),
                "-c",
                "user.name=a",
                "-c",
                "user.email=a@b",
                "commit",
                "-qm",
                "a",
                "--allow-empty",
            ],
            check=True,
        )
    assert report.commit() is None
    monkeypatch.setenv("PATH", str(archive))
    assert report.commit() is None


def test_a_turn_without_history_asks_for_its_number() -> None:
    found = subprocess.run(["bash", str(RUN), "--turn", "x"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert "found x; expected a number behind --turn" in found.stderr
