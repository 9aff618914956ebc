# SPDX-License-Identifier: Apache-2.0
"""No harness sets a connector's buffer device: vLLM asks the platform (tests/contract/test_buffer_device.py)."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_no_harness_names_a_buffer_device() -> None:
    """On a GPU "cpu" is refused, and "cuda" is not there without one."""
    files = [*(ROOT / "experiments").rglob("*.py"), *(ROOT / "tests" / "e2e").rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in files if "kv_buffer_device" in path.read_text()] == []
    assert any("kv_connector" in path.read_text() for path in files)
