# SPDX-License-Identifier: Apache-2.0
"""Named access to the arguments that the scheduler half of vLLM's NIXL connector is constructed with.

Sources: ``v1/nixl_connector.py`` (0.19), ``v1/nixl/base_scheduler.py`` (0.24 to 0.30).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcached_nixl.compat.private import envs, private
from kvcached_nixl.compat.requests import RequestReader
from kvcached_nixl.compat.specs import keeps_all_tokens, specs_of

__all__ = ["SchedulerView"]


@dataclass(frozen=True)
class SchedulerView:
    """The constructor arguments of the scheduler half of a NIXL connector."""

    config: Any
    kv_cache_config: Any

    @property
    def engine_id(self) -> str:
        return str(self.config.kv_transfer_config.engine_id)

    @property
    def host(self) -> str:
        """Host of the side channel; vLLM's setting."""
        return str(private(envs(), "VLLM_NIXL_SIDE_CHANNEL_HOST"))

    @property
    def port(self) -> int:
        """Port of the side channel; each data-parallel engine has its own."""
        index = private(self.config.parallel_config, "data_parallel_index")
        return int(private(envs(), "VLLM_NIXL_SIDE_CHANNEL_PORT") + index)

    @property
    def tp_size(self) -> int:
        return int(self.config.parallel_config.tensor_parallel_size)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Per KV-cache group, tokens in a logical block."""
        return tuple(int(group.kv_cache_spec.block_size) for group in self.kv_cache_config.kv_cache_groups)

    @property
    def dropping_groups(self) -> list[str]:
        """KV-cache groups that free blocks while a request is computed, by the class names of their specs."""
        return [
            type(spec).__name__
            for group in self.kv_cache_config.kv_cache_groups
            for spec in specs_of(group.kv_cache_spec)
            if not keeps_all_tokens(spec)
        ]

    @property
    def recomputes(self) -> bool:
        """Whether a request that received no KV is recomputed instead of failing."""
        return bool(self.config.kv_transfer_config.kv_load_failure_policy == "recompute")

    @property
    def reader(self) -> RequestReader:
        """A new reader for the engine's requests, at each access."""
        return RequestReader(self.config)

    @property
    def extra_config(self) -> Mapping[str, Any]:
        """``kv_connector_extra_config``."""
        found: Mapping[str, Any] = self.config.kv_transfer_config.kv_connector_extra_config
        return found
