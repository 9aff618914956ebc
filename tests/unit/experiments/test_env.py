# SPDX-License-Identifier: Apache-2.0
"""experiments/env.sh says what is missing before it downloads anything."""

from __future__ import annotations

import shutil
import subprocess
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


class Machine:
    """A copy of env.sh that finds no environment, with ordinary tools, a compiler and a Python with headers on PATH."""

    def __init__(self, folder: Path) -> None:
        self.commands, self.include, self.copy = folder / "commands", folder / "include", folder / "repository"
        for place in (self.commands, self.include, self.copy / "experiments" / "common"):
            place.mkdir(parents=True)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, f"these tests need {tool}"
            (self.commands / tool).symlink_to(found)
        (self.include / "Python.h").touch()
        self.python("python3.11", "3.11")
        self.write("g++", "#!/bin/sh\n")
        for file in ("env.sh", "common/vllm_metadata.py", "common/find_python.sh"):
            shutil.copy(ROOT / "experiments" / file, self.copy / "experiments" / file)
        for name in ("experiments/hostvmm", "experiments/locks", "kvcached_nixl", "pyproject.toml"):
            (self.copy / name).symlink_to(ROOT / name)

    def write(self, name: str, script: str) -> None:
        path = self.commands / name
        path.unlink(missing_ok=True)
        path.write_text(script)
        path.chmod(0o755)

    def python(self, name: str, version: str, include: Path | None = None, *, without_venv: bool = False) -> None:
        values = {"version": version, "include": include or self.include, "without_venv": int(without_venv)}
        self.write(name, PYTHON.format(**values))

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(self.copy / "experiments" / "env.sh"), *arguments]
        variables = {"PATH": str(self.commands), "HOME": str(self.copy.parent), **variables}
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)

    def fails(self, *said: str, version: str = "0.26.0", **variables: str) -> None:
        found = self.run(version, **variables)
        assert (found.returncode, found.stdout) == (2, "")
        assert all(one in found.stderr for one in said), found.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_version_without_a_lock_is_refused_and_the_known_ones_are_named(machine: Machine) -> None:
    """Nothing unpinned is ever installed."""
    machine.fails("expected one of: 0.26.0 0.27.1 ", f" {ROWS[-1].tested}", version="0.1.0")


@pytest.mark.parametrize("named", ["python3.14", "python3"])
def test_a_missing_interpreter_is_said(machine: Machine, named: str) -> None:
    """There are locks for some Pythons only."""
    (machine.commands / "python3.11").unlink()
    machine.python(named, "3.14")
    machine.fails(f"no CPython {','.join(lock.PYTHONS)} on PATH", "python3.13-dev")


@pytest.mark.parametrize(("named", "version"), [("python3.13", "3.13"), ("python3.12", "3.12"), ("python3", "3.10")])
def test_the_interpreter_that_is_there_is_used(machine: Machine, named: str, version: str) -> None:
    """With the headers and packages of its own name; what is needed of disk is the same."""
    (machine.commands / "python3.11").unlink()
    machine.python(named, version, Path("nowhere"))
    machine.fails(f"apt-get install python{version}-dev")
    machine.python(named, version, without_venv=True)
    machine.fails(f"apt-get install python{version}-venv")
    machine.python(named, version)
    machine.write("df", FULL_DISK)
    machine.fails("found 1000 MB free")


@pytest.mark.parametrize("variables", [{}, {"CXX": "no-such-compiler"}])
def test_a_missing_compiler_is_said(machine: Machine, variables: dict[str, str]) -> None:
    """Before gigabytes are fetched, not after; CXX, if set, is the only one that counts."""
    if not variables:
        (machine.commands / "g++").unlink()
    machine.fails("no C++ compiler", **variables)


@pytest.mark.parametrize(("wheel", "needed"), [(False, "8800 MB"), (True, "3500 MB")])
def test_too_little_disk_is_said_before_the_download(machine: Machine, wheel: bool, needed: str) -> None:
    """How much is needed depends on whether a CPU build of torch is offered."""
    machine.write("df", FULL_DISK)
    if wheel:
        pinned = (ROOT / "experiments" / "locks" / "torch-2.13-cpu-wheel.txt").read_text().split()[0]
        (machine.include / f"{pinned.replace('==', '-')}-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    machine.fails(f"expected {needed}", version="0.28.0", PIP_FIND_LINKS=str(machine.include))


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--unused"], ["tools", "vllm-0.26.0", "vllm-0.28.0"]),
        (["0.28.0", "0.1.0"], ["tools", "vllm-0.26.0"]),
        (["../tools"], ["tools", "vllm-0.1.0", "vllm-0.26.0", "vllm-0.28.0"]),
    ],
)
def test_environments_are_removed(machine: Machine, arguments: list[str], left: list[str]) -> None:
    """Those that are named, or that no lock names."""
    folder = machine.copy / ".venvs"
    for name in ("tools", "vllm-0.1.0", "vllm-0.26.0", "vllm-0.28.0"):
        (folder / name / "bin").mkdir(parents=True)
    found = machine.run("--remove", *arguments)
    assert (found.returncode, found.stdout) == (2 if len(left) == 4 else 0, ""), found.stderr
    assert sorted(place.name for place in folder.iterdir()) == left
