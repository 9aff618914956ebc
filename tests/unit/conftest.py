# SPDX-License-Identifier: Apache-2.0
"""Where what vLLM brings is not installed, the modules that need it are skipped; the others are not held up."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

FROM_VLLM = ("torch", "zmq")


class Module(pytest.Module):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            missing = getattr(error.__cause__, "name", None)
            if missing not in FROM_VLLM:
                raise
            pytest.skip(f"needs {missing}, which vLLM brings", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return Module.from_parent(parent, path=module_path)
