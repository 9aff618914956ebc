# SPDX-License-Identifier: Apache-2.0
"""Named access to the arguments that the scheduler half of vLLM's NIXL connector is constructed with.

Source: ``v1/nixl/base_scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcached_nixl.side_channel_address import SideChannelAddress
from kvcached_nixl.vllm.adapter.attributes import private
from kvcached_nixl.vllm.adapter.platform import side_channel_address
from kvcached_nixl.vllm.adapter.requests import RequestReader
from kvcached_nixl.vllm.adapter.specs import keeps_of, specs_of
from kvcached_nixl.vllm.adapter.tracing import EngineSpans, spans_of
from kvcached_nixl.wire.kv_groups import Keeps, KVGroup


@dataclass(frozen=True)
class SchedulerView:
    """The constructor arguments of the scheduler half of a NIXL connector."""

    config: Any
    kv_cache_config: Any

    @property
    def engine_id(self) -> str:
        return str(self.config.kv_transfer_config.engine_id)

    @property
    def address(self) -> SideChannelAddress:
        """Each data-parallel engine has ports of its own. Looks names up, at each access."""
        return side_channel_address(int(private(self.config.parallel_config, "data_parallel_index")))

    @property
    def tp_size(self) -> int:
        return int(self.config.parallel_config.tensor_parallel_size)

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        return tuple(KVGroup(int(spec.block_size), keeps_of(spec)) for spec in specs)

    @property
    def window_kinds(self) -> list[str]:
        """KV-cache groups whose blocks leave a window while a request is computed, by the class names of their
        specs."""
        return [
            type(spec).__name__
            for group in self.kv_cache_config.kv_cache_groups
            for spec in specs_of(group.kv_cache_spec)
            if keeps_of(spec) is Keeps.WINDOW
        ]

    @property
    def zeroes_blocks(self) -> bool:
        """Whether vLLM zeroes new blocks on the device at the beginning of a step."""
        return bool(private(self.kv_cache_config, "needs_kv_cache_zeroing"))

    @property
    def recomputes(self) -> bool:
        """Whether a request that received no KV is recomputed instead of failing."""
        return bool(self.config.kv_transfer_config.kv_load_failure_policy == "recompute")

    @property
    def is_consumer(self) -> bool:
        return bool(self.config.kv_transfer_config.is_kv_consumer)

    @property
    def is_producer(self) -> bool:
        return bool(self.config.kv_transfer_config.is_kv_producer)

    @property
    def max_num_batched_tokens(self) -> int:
        return int(self.config.scheduler_config.max_num_batched_tokens)

    @property
    def reader(self) -> RequestReader:
        """A new reader for the engine's requests, at each access."""
        return RequestReader(self.config)

    @property
    def spans(self) -> EngineSpans | None:
        """Makes spans of hand-overs; None without ``--otlp-traces-endpoint``."""
        return spans_of(self.config)

    @property
    def extra_config(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.config.kv_transfer_config.kv_connector_extra_config
        return found
