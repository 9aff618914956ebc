# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU; each says what it has found on it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs an environment: bash experiments/env.sh")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            reason = "no GPU: torch.cuda.is_available() is False"
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason=reason))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))
