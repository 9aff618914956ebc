# SPDX-License-Identifier: Apache-2.0
"""Where vLLM puts a connector's buffers if ``kv_buffer_device`` is not set, as in the experiments and end-to-end tests.

On an accelerator no buffer is created on the host, where it would mirror the whole pool.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support import attention_engines
from vllm import platforms
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvcached_nixl.vllm.patches import factory

parallel_state, patched, engine_over = (
    attention_engines.parallel_state,
    attention_engines.patched,
    attention_engines.engine_over,
)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_buffers_are_on_the_device_of_the_platform(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """So the same harness runs on a GPU, where "cpu" stands for a slab on the host, and without one."""
    from vllm.config import KVTransferConfig

    monkeypatch.setattr(platforms, "current_platform", types.SimpleNamespace(device_type=device))
    config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    assert config.kv_buffer_device == device


@pytest.fixture
def construct(
    engine_over: attention_engines.EngineOver, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, Any]]:
    """construct(...): the scheduler's connector as on a GPU, with ``kv_buffer_device`` "cpu"; and its configuration."""

    def make(**extra_config: Any) -> tuple[Any, Any]:
        geometry = dataclasses.replace(
            attention_engines.GQA, era=attention_engines.ERAS[0], reserved_blocks=attention_engines.GQA.num_blocks
        )
        engine, _ = engine_over(geometry)
        config = engine.config
        config.kv_transfer_config.kv_buffer_device = "cpu"
        config.kv_transfer_config.kv_connector_extra_config.update(extra_config)
        monkeypatch.setattr(type(platforms.current_platform), "device_type", "cuda")
        made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, engine.kv_cache_config)
        return made, config.kv_transfer_config

    return make


def test_a_buffer_on_the_host_is_a_slab_there(construct: Callable[..., tuple[Any, Any]]) -> None:
    connector, config = construct()
    assert connector.connector_scheduler.use_host_buffer is False
    assert (config.kv_buffer_device, config.kv_connector_extra_config["memory_path"]) == ("cuda", "host")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"verify_fracton": 1.0, "num_threads": 4}, ("'verify_fracton'", "'verify_fraction'")),
        ({"enforce_handshake_compat": False}, ("enforce_handshake_compat", "not followed")),
    ],
)
def test_a_setting_that_is_not_followed_is_named_once(
    construct: Callable[..., tuple[Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    """Nobody reads it, and nothing else would say so."""
    said: list[str] = []
    monkeypatch.setattr(factory.logger, "warning", lambda text, *values: said.append(text % values))
    construct(**extra)
    (line,) = (one for one in said if "kv_connector_extra_config" in one)
    assert all(word in line for word in words)
