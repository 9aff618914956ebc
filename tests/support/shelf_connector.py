# SPDX-License-Identifier: Apache-2.0
"""A connector that promises KV and does not load it. Prefill may have one beside NixlConnector (MultiConnector)."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class Shelf(KVConnectorBase_V1, SupportsHMA):
    """Both connector roles, in one process.

    Attributes:
        promises: request id -> tokens that it claims to have; claimed once.
        broken: blocks that it has not loaded after all; reported once.
        saves: requests whose blocks it keeps when they finish.
        saved: requests whose blocks it does not need any more; reported once.
    """

    promises: ClassVar[dict[str, int]] = {}
    broken: ClassVar[set[int]] = set()
    saves: ClassVar[set[str]] = set()
    saved: ClassVar[set[str]] = set()

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
        return self.request_finished(request, block_ids)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return request.request_id in self.saves, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        found = set(self.saved)
        self.saved.clear()
        return found or None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        found = set(self.broken)
        self.broken.clear()
        return found
