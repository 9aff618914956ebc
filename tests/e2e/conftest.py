# SPDX-License-Identifier: Apache-2.0
"""Real servers for the tests of this folder; every pair is started once and stopped by its process group."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from kvcached_nixl.compat.series import ROWS
from kvcached_nixl.compat.versions import installed_row


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    is_newest = installed_row() is ROWS[-1]
    for item in items:
        if item.get_closest_marker("newest_only") and not is_newest and "KVCACHED_NIXL_ALL" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="with the newest vLLM only; KVCACHED_NIXL_ALL=1 runs it here, too"))
        if "e2e" in item.path.parts:
            # Two servers take up to a minute to start on two cores.
            item.add_marker(pytest.mark.timeout(420))
