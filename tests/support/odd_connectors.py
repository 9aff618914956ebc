# SPDX-License-Identifier: Apache-2.0
"""Connectors of another package: two that hide what they are, and one that promises KV and does not load it."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

NixlConnector: Any = KVConnectorFactory.get_connector_class(
    KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
)


class Renamed(NixlConnector):  # type: ignore[misc, unused-ignore]
    """vLLM's NIXL connector under another name."""


class Both(MultiConnector):  # type: ignore[misc, unused-ignore]
    """Has children that its configuration does not name."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._connectors = [object.__new__(NixlConnector), object.__new__(OffloadingConnector)]


class Shelf(KVConnectorBase_V1, SupportsHMA):
    """Both connector roles, in one process.

    Attributes:
        promises: request id -> tokens that it claims to have; claimed once.
        broken: blocks that it has not loaded after all; reported once.
    """

    promises: ClassVar[dict[str, int]] = {}
    broken: ClassVar[set[int]] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return max(0, self.promises.get(request.request_id, 0) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            del self.promises[request.request_id]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        found = set(self.broken)
        self.broken.clear()
        return found
