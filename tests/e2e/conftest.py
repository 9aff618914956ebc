# SPDX-License-Identifier: Apache-2.0
"""Real servers for the tests of this folder; every pair is started once and stopped by its process group."""

from __future__ import annotations

import pytest

for module in ("vllm", "kvcached"):
    pytest.importorskip(module, reason="needs an environment: bash experiments/env.sh")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            # Two servers take up to a minute to start on two cores.
            item.add_marker(pytest.mark.timeout(420))
