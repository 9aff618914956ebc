# SPDX-License-Identifier: Apache-2.0
"""The Python files of a vLLM over what is compiled of another one."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from experiments.common import vllm_python as script

NEW = {"vllm/__init__.py": "version = 2\n", "vllm/v1/core.py": "new = True\n"}


def source(folder: Path, files: dict[str, str]) -> script.Source:
    with zipfile.ZipFile(folder / "wheel.zip", "w") as wheel:
        for name, text in {**files, "vllm/_C.abi3.so": "of a GPU"}.items():
            wheel.writestr(name, text)
    return script.Source("2.0.0", zipfile.ZipFile(folder / "wheel.zip"))


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Of another version, linked from an installer's cache."""
    cache, site_packages = tmp_path / "cache", tmp_path / "site-packages"
    for name, text in {"__init__.py": "version = 1\n", "old.py": "", "_C.abi3.so": "of a CPU"}.items():
        for folder in (cache, site_packages / "vllm"):
            folder.mkdir(parents=True, exist_ok=True)
        (cache / name).write_text(text)
        os.link(cache / name, site_packages / "vllm" / name)
    return site_packages


def test_other_files_than_those_that_are_locked_change_nothing(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm-2.0.0-python.sha256").write_text("0" * 64)
    monkeypatch.setattr(script, "LOCKS", tmp_path)
    monkeypatch.setattr(script, "open_source", lambda version: source(tmp_path, NEW))
    monkeypatch.setattr(script.sysconfig, "get_paths", lambda: {"purelib": str(installed)})
    assert script.main(["2.0.0"]) == 2
    said = capsys.readouterr().err
    assert "expected that of vllm-2.0.0-python.sha256" in said and "Nothing was changed" in said
    assert (installed / "vllm" / "old.py").exists()
    (tmp_path / "vllm-2.0.0-python.sha256").write_text(script.digest_of(source(tmp_path, NEW)) + "\n")
    assert script.main(["2.0.0"]) == 0
    # Python files are replaced, and what is compiled stays.
    assert {str(one.relative_to(installed)) for one in installed.rglob("*.py")} == set(NEW)
    assert (installed / "vllm" / "__init__.py").read_text() == "version = 2\n"
    assert (installed / "vllm" / "_C.abi3.so").read_text() == "of a CPU"
