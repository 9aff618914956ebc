# SPDX-License-Identifier: Apache-2.0
"""What the build refuses before it starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvcached_nixl.hostvmm import HostvmmError, build


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The remedy is a package to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(HostvmmError) as refusal:
        build.find_toolchain()
    assert "no c++" in refusal.value.found
    assert "install g++" in refusal.value.remedy


def test_a_compiler_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong CXX is not replaced by another compiler silently."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(HostvmmError, match="no-such-compiler"):
        build.find_toolchain()


def test_an_interpreter_that_does_not_run_is_refused(tmp_path: Path) -> None:
    """--python must name an interpreter."""
    with pytest.raises(HostvmmError, match="nowhere"):
        build.check_environment(tmp_path / "nowhere")


def test_an_environment_without_torch_is_refused(tmp_path: Path) -> None:
    """kvcached is compiled against the torch it will run with."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    python.chmod(0o755)
    with pytest.raises(HostvmmError, match="no (torch|setuptools) in"):
        build.check_environment(python)


def test_too_little_memory_and_disk_are_refused_with_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A build that starves ends in the kernel killing the compiler, which explains nothing."""
    build.check_room(tmp_path)
    monkeypatch.setattr(build, "available_memory_bytes", lambda: 100 << 20)
    with pytest.raises(HostvmmError, match="100 MiB of memory"):
        build.check_room(tmp_path)


@pytest.mark.parametrize("kind", ["missing", "empty folder"])
def test_something_else_than_kvcacheds_source_is_refused(tmp_path: Path, kind: str) -> None:
    """The error says what was expected at --sdist."""
    sdist = tmp_path / "sdist"
    if kind == "empty folder":
        sdist.mkdir()
    with pytest.raises(HostvmmError, match="kvcached's source"), build._unpacked(sdist, tmp_path / "out"):
        pass


def test_a_failing_command_shows_its_output(capfd: pytest.CaptureFixture[str]) -> None:
    """The compiler's own output comes first, then what failed."""
    with pytest.raises(HostvmmError, match="exit status 3"):
        build._run([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], "compiling")
    assert "the reason" in capfd.readouterr().err
