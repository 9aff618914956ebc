# SPDX-License-Identifier: Apache-2.0
"""The changes in ``upstream/``: each mends what its reproduction shows, and applies to the installed kvcached."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

UPSTREAM = Path(__file__).parents[2] / "upstream"
OF_SOURCE = "page-flags"
"""C++, which is not installed: ``python upstream/reproduce.py page-flags`` fetches kvcached's source archive."""


@pytest.mark.long
@pytest.mark.parametrize("name", [path.stem for path in sorted(UPSTREAM.glob("*.diff")) if path.stem != OF_SOURCE])
def test_the_reproduction_fails_without_the_change_and_passes_with_it(name: str) -> None:
    command = [sys.executable, str(UPSTREAM / "reproduce.py"), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_change_has_a_reproduction() -> None:
    names = {path.stem for path in UPSTREAM.glob("*.diff")}
    assert names == {path.stem for path in (UPSTREAM / "reproductions").glob("*.py")}


@pytest.mark.parametrize("name", [path.stem for path in sorted(UPSTREAM.glob("*.diff"))])
def test_every_change_is_a_pull_request(name: str, tmp_path: Path) -> None:
    """Its text says what it applies to; and it does, to what is installed."""
    text = (UPSTREAM / f"{name}.md").read_text()
    assert text.startswith("# ") and f"Applies to: kvcached {metadata.version('kvcached')}," in text
    assert f"reproductions/{name}.py" in text
    if name != OF_SOURCE:
        spec = find_spec("kvcached")
        assert spec is not None and spec.origin is not None
        # Without its compiled parts.
        shutil.copytree(Path(spec.origin).parent, tmp_path / "kvcached", ignore=shutil.ignore_patterns("*.so"))
        subprocess.run(["git", "apply", "--check", str(UPSTREAM / f"{name}.diff")], cwd=tmp_path, check=True)
