# SPDX-License-Identifier: Apache-2.0
"""Connectors of another package, which hide what they are from a look at the configuration."""

from __future__ import annotations

from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
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
