# SPDX-License-Identifier: Apache-2.0
"""`kvcached_nixl.compat.actions.superseded`: kvcached's own patch is removed exactly, or a refusal says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcached_nixl.compat.actions.superseded import take_off
from kvcached_nixl.compat.names import KV_TRANSFER
from kvcached_nixl.errors import ContractChanged

V1 = f"{KV_TRANSFER}.v1"

CONNECTOR = """
class NixlConnector:
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        return "HND of " + cls.__name__
class NixlConnectorWorker:
    def register_kv_caches(self, kv_caches):
        return kv_caches
"""
SPLIT_CONNECTOR = """
class NixlBaseConnector:
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        return "HND of " + cls.__name__
class NixlPullConnector(NixlBaseConnector): pass
class NixlPushConnector(NixlBaseConnector): pass
NixlConnector = NixlPullConnector
"""
SPLIT_WORKER = """
class NixlBaseConnectorWorker:
    def register_kv_caches(self, kv_caches):
        return kv_caches
"""
TOPOLOGY = """
class TransferTopology:
    def __init__(self, tp_rank):
        self.tp_rank = tp_rank
"""


def patch_as_kvcached_does(connector: Any, worker: Any, topology: Any) -> None:
    """The traces of kvcached 0.1.6: a saved bound method, a saved function with a mark, an original in a closure."""
    connector._original_get_layout = connector.get_required_kvcache_layout
    connector.get_required_kvcache_layout = classmethod(lambda cls, *args, **kwargs: None)
    worker._kvcached_original_register_kv_caches = worker.register_kv_caches
    worker._kvcached_register_patched = True
    worker.register_kv_caches = lambda self, kv_caches, *args, **kwargs: None
    _orig_init = topology.__init__

    def _patched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        _orig_init(self, *args, **kwargs)

    topology.__init__ = _patched_init
    topology._kvcached_topology_patched = True


def snapshot(*classes: type) -> list[dict[str, Any]]:
    """Class dictionaries, with the function in place of a classmethod: that object was not kept by anybody."""
    return [{k: getattr(v, "__func__", v) for k, v in vars(cls).items()} for cls in classes]


def test_a_single_file_connector_gets_its_own_methods_back(make_module: Callable[..., Any]) -> None:
    """vLLM up to 0.19: all three places are as before, and no trace is left."""
    module = make_module(f"{V1}.nixl_connector", CONNECTOR)
    utils = make_module(f"{KV_TRANSFER}.utils", TOPOLOGY)
    classes = (module.NixlConnector, module.NixlConnectorWorker, utils.TransferTopology)
    before = snapshot(*classes)
    patch_as_kvcached_does(*classes)
    notes = take_off()
    assert snapshot(*classes) == before
    assert len(notes) == 3 and all("kvcached's" in note for note in notes)
    assert module.NixlConnector.get_required_kvcache_layout(None) == "HND of NixlConnector"
    assert isinstance(vars(module.NixlConnector)["get_required_kvcache_layout"], classmethod)


def test_a_pull_connector_inherits_its_layout_again(make_module: Callable[..., Any]) -> None:
    """From vLLM 0.24 on the override landed on a class that never had the method: it is deleted, not restored."""
    connector = make_module(f"{V1}.nixl.connector", SPLIT_CONNECTOR)
    worker = make_module(f"{V1}.nixl.base_worker", SPLIT_WORKER)
    utils = make_module(f"{KV_TRANSFER}.utils", TOPOLOGY)
    classes = (
        connector.NixlBaseConnector,
        connector.NixlPullConnector,
        worker.NixlBaseConnectorWorker,
        utils.TransferTopology,
    )
    before = snapshot(*classes)
    patch_as_kvcached_does(connector.NixlConnector, worker.NixlBaseConnectorWorker, utils.TransferTopology)
    assert "get_required_kvcache_layout" in vars(connector.NixlPullConnector)
    take_off()
    assert snapshot(*classes) == before
    assert connector.NixlPullConnector.get_required_kvcache_layout(None) == "HND of NixlPullConnector"


def test_taking_off_what_was_never_put_on_changes_nothing(make_module: Callable[..., Any]) -> None:
    """The usual case: this package was there first."""
    module = make_module(f"{V1}.nixl_connector", CONNECTOR)
    before = dict(vars(module.NixlConnector))
    assert take_off() == ()
    assert dict(vars(module.NixlConnector)) == before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c, w, t: setattr(c, "_original_get_layout", "something"),
        lambda c, w, t: setattr(w, "_kvcached_original_register_kv_caches", None),
        lambda c, w, t: delattr(w, "_kvcached_register_patched"),
        lambda c, w, t: setattr(t, "__init__", lambda self: None),
    ],
)
def test_traces_of_another_kvcached_are_refused(make_module: Callable[..., Any], spoil: Callable[..., None]) -> None:
    """What is not known cannot be undone exactly, and two patches of one method would contradict each other."""
    module = make_module(f"{V1}.nixl_connector", CONNECTOR)
    utils = make_module(f"{KV_TRANSFER}.utils", TOPOLOGY)
    classes = (module.NixlConnector, module.NixlConnectorWorker, utils.TransferTopology)
    patch_as_kvcached_does(*classes)
    spoil(*classes)
    with pytest.raises(ContractChanged, match=r"kvcached 0\.1\.6"):
        take_off()
