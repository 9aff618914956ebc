# SPDX-License-Identifier: Apache-2.0
"""`vllm.patches.kvcached_quirks`: kvcached's own patch is removed exactly, or a refusal says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcached_nixl.errors import ContractChanged
from kvcached_nixl.vllm import KV_TRANSFER, NIXL_PREFIX
from kvcached_nixl.vllm.patches.kvcached_quirks import take_off

CONNECTOR = """
class NixlBaseConnector:
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        return "HND of " + cls.__name__
class NixlPullConnector(NixlBaseConnector): pass
NixlConnector = NixlPullConnector
"""
WORKER = """
class NixlBaseConnectorWorker:
    def register_kv_caches(self, kv_caches):
        return kv_caches
class NixlPullConnectorWorker(NixlBaseConnectorWorker): pass
NixlConnectorWorker = NixlPullConnectorWorker
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


@pytest.fixture
def classes(make_module: Callable[..., Any]) -> tuple[Any, Any, Any]:
    """vLLM's pull connector, the class that defines a worker's methods, and the topology."""
    connector = make_module(f"{NIXL_PREFIX}.connector", CONNECTOR)
    worker = make_module(f"{NIXL_PREFIX}.worker", WORKER)
    utils = make_module(f"{KV_TRANSFER}.utils", TOPOLOGY)
    return connector.NixlConnector, worker.NixlBaseConnectorWorker, utils.TransferTopology


def test_all_three_places_are_as_before(classes: tuple[Any, Any, Any]) -> None:
    """The layout landed on a class that never had the method: it is deleted, not restored. No trace is left."""
    connector, *_ = classes
    before = snapshot(*classes, *connector.__bases__)
    patch_as_kvcached_does(*classes)
    assert "get_required_kvcache_layout" in vars(connector)
    notes = take_off()
    assert snapshot(*classes, *connector.__bases__) == before
    assert len(notes) == 3 and all("kvcached's" in note for note in notes)
    assert connector.get_required_kvcache_layout(None) == "HND of NixlPullConnector"


def test_taking_off_what_was_never_put_on_changes_nothing(classes: tuple[Any, Any, Any]) -> None:
    """The usual case: this package was there first."""
    before = snapshot(*classes)
    assert take_off() == ()
    assert snapshot(*classes) == before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c, w, t: setattr(c, "_original_get_layout", "something"),
        lambda c, w, t: setattr(c.__bases__[0], "get_required_kvcache_layout", classmethod(lambda *_: "another")),
        lambda c, w, t: setattr(w, "_kvcached_original_register_kv_caches", None),
        lambda c, w, t: delattr(w, "_kvcached_register_patched"),
        lambda c, w, t: setattr(t, "__init__", lambda self: None),
    ],
)
def test_traces_of_another_kvcached_are_refused(classes: tuple[Any, Any, Any], spoil: Callable[..., None]) -> None:
    """What is not known cannot be undone exactly, and two patches of one method would contradict each other."""
    patch_as_kvcached_does(*classes)
    spoil(*classes)
    with pytest.raises(ContractChanged, match=r"kvcached 0\.1\.6"):
        take_off()
