# SPDX-License-Identifier: Apache-2.0
"""Environments: bare, with the wheel, with the editable wheel; and fake vllm trees beside them."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support import fake_trees
from support.environments import REPOSITORY, Environment, install_wheel, make_environment


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Without the package."""
    return make_environment(tmp_path_factory.mktemp("bare") / "env")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the normal and the editable wheel, built by hatchling."""
    builder = pytest.importorskip(
        "hatchling.builders.wheel", reason="hatchling builds the wheels: pip install hatchling"
    )
    pytest.importorskip("editables", reason="editables builds the editable wheel: pip install editables")
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("standard", "editable"):
        list(builder.WheelBuilder(str(REPOSITORY)).build(directory=str(folder / version), versions=[version]))
    return folder


@pytest.fixture(scope="session", params=["standard", "editable"])
def installed(request: pytest.FixtureRequest, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With the package, from the normal and from the editable wheel."""
    return _install(tmp_path_factory.mktemp(request.param) / "env", wheels, request.param)


@pytest.fixture(scope="session")
def with_wheel(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With the package, from the normal wheel."""
    return _install(tmp_path_factory.mktemp("wheel") / "env", wheels, "standard")


@pytest.fixture(scope="session")
def unpacked(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content, as by ``pip install --target``: entry points are found there, the .pth is not
    executed."""
    folder = tmp_path_factory.mktemp("unpacked")
    (wheel,) = (wheels / "standard").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def _install(folder: Path, wheels: Path, version: str) -> Environment:
    (wheel,) = (wheels / version).glob("*.whl")
    return install_wheel(make_environment(folder), wheel)


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tree("0.28.0", *options): a fake vllm tree, made once per session and set of options."""
    made: dict[tuple[str, ...], Path] = {}

    def make(version: str, *options: str) -> Path:
        key = (version, *options)
        if key not in made:
            made[key] = fake_trees.make(tmp_path_factory.mktemp("tree") / "tree", version, *options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def this_environment() -> Environment:
    """The environment the tests run in, for what needs the real vLLM."""
    return Environment(Path(sys.executable), Path())
