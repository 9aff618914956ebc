# SPDX-License-Identifier: Apache-2.0
"""Where vLLM puts a connector's buffers when nobody says so, as the experiments and the end-to-end tests do not."""

from __future__ import annotations

import types

import pytest

platforms = pytest.importorskip("vllm.platforms", reason="needs an environment: bash experiments/env.sh")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_buffers_are_on_the_device_of_the_platform(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """So the same harness runs on a GPU, where "cpu" is refused, and without one."""
    from vllm.config import KVTransferConfig

    monkeypatch.setattr(platforms, "current_platform", types.SimpleNamespace(device_type=device))
    config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    assert config.kv_buffer_device == device
