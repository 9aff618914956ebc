# SPDX-License-Identifier: Apache-2.0
"""Other connectors beside NixlConnector (``MultiConnector``): each of vLLM's was read, and unsafe ones are refused.

When a test here fails with a new vLLM, read that connector: it may be a new one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support import attention_engines
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.vllm.adapter.neighbours import JUDGED
from kvcached_nixl.vllm.adapter.versions import HITS_DIVERGE, installed_has

patched = attention_engines.patched

NIXL, SHELF, RENAMED, OFFLOADING = (
    {"kv_connector": name, "kv_role": "kv_both", **more}
    for name, more in (
        ("NixlConnector", {}),
        ("Shelf", {"kv_connector_module_path": "support.odd_connectors"}),
        ("Renamed", {"kv_connector_module_path": "support.odd_connectors"}),
        ("OffloadingConnector", {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24}}),
    )
)
SEVERAL: dict[str, dict[str, Any]] = {
    **{
        name: {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}
        for name, children in {
            "after": [NIXL, OFFLOADING],
            "before": [OFFLOADING, SHELF, NIXL],
            "beside it under another name": [RENAMED, OFFLOADING],
        }.items()
    },
    "not named by the configuration": {"kv_connector": "Both", "kv_connector_module_path": "support.odd_connectors"},
}


def test_every_connector_of_vllm_was_judged() -> None:
    """A new one is refused until it was read."""
    assert set(vars(KVConnectorFactory)["_registry"]) <= JUDGED


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize("several", list(SEVERAL))
def test_the_offloading_connector_beside_nixl_s_is_refused(several: str, role: KVConnectorRole) -> None:
    """In each process, before either is constructed, with vLLM's own spec, which needs a GPU."""
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", **SEVERAL[several]),
        cache_config=None,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
    )
    with pytest.raises(SettingsError) as refusal:
        KVConnectorFactory.create_connector(config, role, None)
    why = ("need a GPU", "wrong tokens") if installed_has(HITS_DIVERGE) else ("after vLLM has freed it",)
    assert any(one in refusal.value.consequence for one in why)
