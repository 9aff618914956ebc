# SPDX-License-Identifier: Apache-2.0
"""Servers of the tests of features: a stock instance, and prefill and decode servers over kvcached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.common.device import layout, role
from experiments.common.servers import ServerSpec

KVCACHED = {"ENABLE_KVCACHED": "true", "KVCACHED_HOSTVMM_GIB": "2", **layout()}


def spec(name: str, model: Path, mode: str | None, *arguments: str, **environment: str) -> ServerSpec:
    """Return the configuration of a server; without ``mode``, of the stock instance. The name tells its role."""
    transfer: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": role(name),
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"num_threads": 0, "transfer_mode": mode},
    }
    return ServerSpec(
        name=name,
        model=model,
        dtype="float32",
        # All that is asked at once, in one step: on a CPU vLLM ends where a prompt with a seed is computed in chunks.
        max_num_batched_tokens=2048,
        kv_transfer=transfer if mode else None,
        environment={**environment, **(KVCACHED if mode else {})},
        arguments=arguments,
        forks=True,
    )
