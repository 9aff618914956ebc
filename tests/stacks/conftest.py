# SPDX-License-Identifier: Apache-2.0
"""Other projects' programs: routers before real servers, manifests. Their environments are made on first use."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")

from experiments.stacks.measure import expected_of
from experiments.stacks.traffic import Answer, Request


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "stacks" in item.path.parts:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[Request, Answer]:
    """What one stock instance says to every request."""
    return expected_of(range(4), tmp_path_factory.mktemp("alone"))
