# SPDX-License-Identifier: Apache-2.0
"""experiments/env.sh says what is missing before it downloads anything."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.script_loading import load_script

from kvcached_nixl.vllm.adapter.versions import ROWS

ROOT = Path(__file__).parents[3]
lock = load_script("experiments_lock_pythons", ROOT / "experiments" / "locks" / "lock.py")
TOOLS = (
    *("bash", "cat", "cut", "df", "dirname", "env", "find", "flock", "grep", "mkdir", "mktemp", "printf", "rm", "sed"),
    *("sha256sum", "sort", "tail", "tr", "uname"),
)
PYTHON = """#!/bin/sh
case "$*" in
*version_info*) echo "{version} $0" ;;
*sysconfig*) echo "{include}" ;;
*ensurepip*) exit {without_venv} ;;
esac
"""

FULL_DISK = "#!/bin/sh\necho Avail\necho 1000\n"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder for PATH that holds the ordinary tools, a compiler and a Python with headers, and nothing else."""
    folder = tmp_path / "commands"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None, f"these tests need {tool}"
        (folder / tool).symlink_to(found)
    include = tmp_path / "include"
    include.mkdir()
    (include / "Python.h").touch()
    write(folder / "python3.11", python("3.11", include))
    write(folder / "g++", "#!/bin/sh\n")
    return folder


def python(version: str, include: Path, *, without_venv: bool = False) -> str:
    """An interpreter that tells what it is and has."""
    return PYTHON.format(version=version, include=include, without_venv=int(without_venv))


def write(path: Path, script: str) -> None:
    """Write an executable script."""
    path.unlink(missing_ok=True)
    path.write_text(script)
    path.chmod(0o755)


@pytest.fixture
def run(tmp_path: Path, commands: Path) -> Run:
    """Run a copy of env.sh with only ``commands`` on PATH; it finds no environment there."""
    copy = tmp_path / "repository"
    (copy / "experiments" / "common").mkdir(parents=True)
    shutil.copy(ROOT / "experiments" / "env.sh", copy / "experiments")
    for file in ("vllm_metadata.py", "find_python.sh"):
        shutil.copy(ROOT / "experiments" / "common" / file, copy / "experiments" / "common")
    for folder in ("hostvmm", "locks"):
        (copy / "experiments" / folder).symlink_to(ROOT / "experiments" / folder)
    (copy / "kvcached_nixl").symlink_to(ROOT / "kvcached_nixl")
    (copy / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(copy / "experiments" / "env.sh"), *arguments],
            env={"PATH": str(commands), "HOME": str(tmp_path), **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    return call


def test_a_version_without_a_lock_is_refused_and_the_known_ones_are_named(run: Run) -> None:
    """Nothing unpinned is ever installed."""
    found = run("0.1.0")
    assert found.returncode == 2
    assert "expected one of: 0.26.0 0.27.1 " in found.stderr
    assert f" {ROWS[-1].tested}" in found.stderr


def fails(run: Run, *said: str, version: str = "0.26.0", **variables: str) -> None:
    found = run(version, **variables)
    assert (found.returncode, found.stdout) == (2, "")
    assert all(one in found.stderr for one in said), found.stderr


@pytest.mark.parametrize("named", ["python3.14", "python3"])
def test_a_missing_interpreter_is_said(run: Run, commands: Path, tmp_path: Path, named: str) -> None:
    """There are locks for some Pythons only."""
    (commands / "python3.11").unlink()
    write(commands / named, python("3.14", tmp_path / "include"))
    fails(run, f"no CPython {','.join(lock.PYTHONS)} on PATH", "python3.13-dev")


@pytest.mark.parametrize(("named", "version"), [("python3.13", "3.13"), ("python3.12", "3.12"), ("python3", "3.10")])
def test_the_interpreter_that_is_there_is_used(
    run: Run, commands: Path, tmp_path: Path, named: str, version: str
) -> None:
    """With the headers and packages of its own name; what is needed of disk is the same."""
    (commands / "python3.11").unlink()
    write(commands / named, python(version, tmp_path / "nowhere"))
    fails(run, f"apt-get install python{version}-dev")
    write(commands / named, python(version, tmp_path / "include", without_venv=True))
    fails(run, f"apt-get install python{version}-venv")
    write(commands / named, python(version, tmp_path / "include"))
    write(commands / "df", FULL_DISK)
    fails(run, "found 1000 MB free")


@pytest.mark.parametrize("variables", [{}, {"CXX": "no-such-compiler"}])
def test_a_missing_compiler_is_said(run: Run, commands: Path, variables: dict[str, str]) -> None:
    """Before gigabytes are fetched, not after; CXX, if set, is the only one that counts."""
    if not variables:
        (commands / "g++").unlink()
    fails(run, "no C++ compiler", **variables)


@pytest.mark.parametrize(("wheel", "needed"), [(False, "8800 MB"), (True, "3500 MB")])
def test_too_little_disk_is_said_before_the_download(
    run: Run, commands: Path, tmp_path: Path, wheel: bool, needed: str
) -> None:
    """How much is needed depends on whether a CPU build of torch is offered."""
    write(commands / "df", FULL_DISK)
    if wheel:
        pinned = (ROOT / "experiments" / "locks" / "torch-2.13-cpu-wheel.txt").read_text().split()[0]
        (tmp_path / f"{pinned.replace('==', '-')}-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    fails(run, f"expected {needed}", version="0.28.0", PIP_FIND_LINKS=str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--unused"], ["tools", "vllm-0.26.0", "vllm-0.28.0"]),
        (["0.28.0", "0.1.0"], ["tools", "vllm-0.26.0"]),
        (["../tools"], ["tools", "vllm-0.1.0", "vllm-0.26.0", "vllm-0.28.0"]),
    ],
)
def test_environments_are_removed(run: Run, tmp_path: Path, arguments: list[str], left: list[str]) -> None:
    """Those that are named, or that no lock names."""
    folder = tmp_path / "repository" / ".venvs"
    for name in ("tools", "vllm-0.1.0", "vllm-0.26.0", "vllm-0.28.0"):
        (folder / name / "bin").mkdir(parents=True)
    found = run("--remove", *arguments)
    assert (found.returncode, found.stdout) == (2 if len(left) == 4 else 0, ""), found.stderr
    assert sorted(place.name for place in folder.iterdir()) == left
