# SPDX-License-Identifier: Apache-2.0
"""``--kv-transfer-config`` as vLLM reads it: its own name for push is a mode of this package's connector."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from support import attention_engines
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.vllm.patches.factory import is_nixl

patched = attention_engines.patched


def read(**fields: Any) -> KVTransferConfig:
    return KVTransferConfig(**{"kv_connector": "NixlPushConnector", "kv_role": "kv_producer", **fields})


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("extra", [{}, {"transfer_mode": "push"}, {"num_threads": 2}])
def test_the_push_connector_is_a_mode(extra: dict[str, Any]) -> None:
    given = dict(extra)
    config = read(kv_connector_extra_config=extra)
    assert (config.kv_connector, config.kv_role) == ("NixlConnector", "kv_producer")
    assert config.kv_connector_extra_config == {**extra, "transfer_mode": "push"}
    assert extra == given, "what the operator gave was changed"
    assert is_nixl(KVConnectorFactory.get_connector_class(config))


@pytest.mark.usefixtures("patched")
def test_another_mode_contradicts_it() -> None:
    with pytest.raises(SettingsError, match=r"NixlPushConnector with transfer_mode='pull'"):
        read(kv_connector_extra_config={"transfer_mode": "pull"})


@pytest.mark.usefixtures("patched")
def test_other_connectors_are_left_alone() -> None:
    """Somebody's own class of that name, too."""
    for fields in (
        {"kv_connector": "NixlConnector"},
        {"kv_connector": "SharedStorageConnector"},
        {"kv_connector_module_path": "support.odd_connectors"},
    ):
        config = read(**fields)
        assert config.kv_connector == fields.get("kv_connector", "NixlPushConnector")
        assert config.kv_connector_extra_config == {}


@pytest.mark.usefixtures("patched")
def test_children_of_other_connectors_are_renamed_too() -> None:
    """However deep; what the operator gave stays as it is."""
    nixl = {"kv_connector": "NixlPushConnector", "kv_role": "kv_both"}
    inner = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [nixl, "odd"]}}
    extra = {"connectors": [inner, {"kv_connector": "Shelf"}]}
    given = copy.deepcopy(extra)
    config = read(kv_connector="MultiConnector", kv_connector_extra_config=extra)
    found = config.kv_connector_extra_config["connectors"]
    assert config.kv_connector == "MultiConnector" and found[1] == {"kv_connector": "Shelf"}
    (renamed, odd) = found[0]["kv_connector_extra_config"]["connectors"]
    pushes = {"transfer_mode": "push"}
    assert renamed == {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": pushes}
    assert odd == "odd" and extra == given
