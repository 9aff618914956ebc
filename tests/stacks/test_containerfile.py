# SPDX-License-Identifier: Apache-2.0
"""docs/deploy/Containerfile: its RUN steps are run in fresh environments, as far as they go without CUDA and root.

The environment of this test stands for vLLM's image: it has vLLM, NIXL, and kvcached over host memory in place of the
one for CUDA. Each stage gets a virtual environment on top, and only the files that the stage copies.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from experiments.stacks.routers import ENVIRONMENTS
from kvcached_nixl.version import __version__

REPOSITORY = Path(__file__).resolve().parents[2]
CONTAINERFILE = REPOSITORY / "docs/deploy/Containerfile"
NOT_RUN = "# not run: "
SKIPPED = {
    "kvcached": ["apt-get", "/build/bin/python", "LIBRARY_PATH=/usr/local/cuda/lib64/stubs"],
    "server": ["uv", "useradd"],
}
"""The first word of each step that is not run: a marker that is added must be added here, too."""


@dataclass
class Stage:
    """One stage: its base image, the files it copies from the context, and its RUN steps; why one is not run, or ""."""

    name: str
    base: str
    copies: list[tuple[list[str], str]] = field(default_factory=list)
    steps: list[tuple[str, str]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def stages(text: str) -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    reason = ""
    for line in lines(text):
        word, _, rest = line.partition(" ")
        if line.startswith(NOT_RUN):
            reason = line.removeprefix(NOT_RUN)
            continue
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = Stage(name, base)
        elif found and word == "RUN":
            [*found.values()][-1].steps.append((rest, reason))
        elif found and word == "COPY" and not rest.startswith("--from"):
            *sources, target = rest.split()
            [*found.values()][-1].copies.append((sources, target))
        elif found and not line.startswith("#"):
            [*found.values()][-1].others.append(line)
        reason = "" if not line.startswith("#") else reason
    return found


def lines(text: str) -> Iterator[str]:
    """Logical lines: a backslash continues one, and a comment after the marker belongs to nothing."""
    yield from (line.strip() for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip())


STAGES = stages(CONTAINERFILE.read_text())


def run(stage: Stage, folder: Path) -> list[str]:
    """Run the steps of a stage that have no marker. Returns the standard output of each.

    Raises:
        AssertionError: a step failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    source, place = folder / "src", folder / "environment"
    for names, target in stage.copies:
        assert target.startswith("/src/")
        for name in names:
            into = folder / target.strip("/")
            into.parent.mkdir(parents=True, exist_ok=True)
            if (REPOSITORY / name).is_dir():
                shutil.copytree(REPOSITORY / name, into, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                into.mkdir(exist_ok=True)
                shutil.copy(REPOSITORY / name, into)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    if stage.name == "server":
        # What vLLM's image brings; not this package, and not its start file.
        (site_packages,) = place.glob("lib/python*/site-packages")
        (site_packages / "base.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ENABLE_", "VLLM"))}
    environ |= {
        "PATH": os.pathsep.join((str(place / "bin"), str(ENVIRONMENTS / "tools" / "bin"), os.environ["PATH"])),
        "VIRTUAL_ENV": str(place),
    }
    said = []
    for step, reason in stage.steps:
        if reason:
            continue
        # The paths of the image, below this folder.
        here = re.sub(r"(?<![\w/.])/(src|build)\b", lambda one: str(folder / one[1]), step)
        done = subprocess.run(
            ["sh", "-euc", here], cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, f"{step}\n{done.stdout}"
        said.append(done.stdout)
    assert source.is_dir() or not stage.copies
    return said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "image"


def test_what_is_not_run_is_what_needs_cuda_or_root() -> None:
    assert [*STAGES] == [*SKIPPED]
    for name, stage in STAGES.items():
        assert [step.split()[0] for step, reason in stage.steps if reason] == SKIPPED[name]


def test_the_server_s_stage(folder: Path) -> None:
    """The package that was copied is installed, and starts by itself."""
    installed, said = run(STAGES["server"], folder)
    assert "kvcached-nixl" in installed
    assert said == f"kvcached_nixl {__version__}\n"
    (start_file,) = folder.glob("environment/lib/python*/site-packages/kvcached_nixl.pth")
    assert start_file.is_file()


def test_the_build_stage_as_far_as_it_goes(folder: Path) -> None:
    run(STAGES["kvcached"], folder)
    assert (folder / "build/bin/python").exists()


def test_a_step_that_fails_is_seen(folder: Path) -> None:
    """A file that is not copied; a step that does not find the package."""
    server = STAGES["server"]
    with pytest.raises(AssertionError, match=r"README\.md|Failed to build"):
        run(Stage(server.name, "", [(["pyproject.toml"], "/src/"), server.copies[1]], server.steps), folder)
    misspelt = [(step.replace("-m kvcached_nixl", "-m kvcached_nix"), reason) for step, reason in server.steps]
    with pytest.raises(AssertionError, match="No module named kvcached_nix"):
        run(Stage(server.name, "", server.copies, misspelt), folder)


def test_servers_run_as_another_user_with_the_package_on() -> None:
    """What the manifests rely on."""
    assert "USER 10001" in STAGES["server"].others
    assert "ENV ENABLE_KVCACHED=true" in STAGES["server"].others and "ENTRYPOINT []" in STAGES["server"].others
    assert STAGES["server"].base == "docker.io/vllm/vllm-openai:v${VLLM}"
