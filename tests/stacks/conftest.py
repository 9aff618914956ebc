# SPDX-License-Identifier: Apache-2.0
"""Other projects' stacks with real engines, and the manifests of docs/deploy.

A file for each stack. What a stack needs is installed when a test first asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")

from packaging.version import Version

from experiments.stacks.measure import Outcome, expected_of, measure, targets
from experiments.stacks.stacks import STACKS
from experiments.stacks.traffic import Answer, Request
from kvcached_nixl.vllm.adapter.versions import found_version


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "stacks" in item.path.parts:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[Request, Answer]:
    """What one stock instance says to every request."""
    return expected_of(range(4), tmp_path_factory.mktemp("alone"))


@pytest.fixture
def check(
    expected: dict[Request, Answer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, str], Outcome]:
    """Run a stack with a transfer mode, require all targets, and return what clients got."""

    def run(name: str, mode: str) -> Outcome:
        (stack,) = [one for one in STACKS if one.name == name]
        if reason := stack.reason_to_skip(Version(found_version("vllm") or "").public, 1):
            pytest.skip(reason)
        with capsys.disabled():
            found = measure(stack, mode, expected, tmp_path, lambda text: print(f"\n{text}", end=""))
        assert [one for one in targets(found) if not one.reached] == []
        return found

    return run
