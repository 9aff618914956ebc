# SPDX-License-Identifier: Apache-2.0
"""Which configurations are accepted: connectors, their settings and neighbours, and classes in place of vLLM's."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support import attention_engines
from vllm import platforms
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_worker import Worker

from kvcached_nixl.errors import SettingsError, StartRefused
from kvcached_nixl.vllm.adapter.attributes import sides
from kvcached_nixl.vllm.adapter.neighbours import JUDGED
from kvcached_nixl.vllm.adapter.versions import HITS_DIVERGE, installed_has
from kvcached_nixl.vllm.patches import factory
from kvcached_nixl.vllm.patches.factory import is_nixl

pytestmark = pytest.mark.usefixtures("parallel_state", "patched")
Construct = Callable[..., Any]


def read(**fields: Any) -> KVTransferConfig:
    return KVTransferConfig(**{"kv_connector": "NixlPushConnector", "kv_role": "kv_producer", **fields})


@pytest.mark.parametrize("extra", [{}, {"transfer_mode": "push"}, {"num_threads": 2}])
def test_the_push_connector_is_a_mode(extra: dict[str, Any]) -> None:
    given = dict(extra)
    config = read(kv_connector_extra_config=extra)
    assert (config.kv_connector, config.kv_role) == ("NixlConnector", "kv_producer")
    assert config.kv_connector_extra_config == {**extra, "transfer_mode": "push"}
    assert extra == given, "what the operator gave was changed"
    assert is_nixl(KVConnectorFactory.get_connector_class(config))


def test_another_mode_contradicts_it() -> None:
    with pytest.raises(SettingsError, match=r"NixlPushConnector with transfer_mode='pull'"):
        read(kv_connector_extra_config={"transfer_mode": "pull"})


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


class Counting(AsyncScheduler):
    """As an operator writes one who wants to know more."""

    added = 0

    def add_request(self, request: Any) -> None:
        self.added += 1
        super().add_request(request)

    def get_request_counts(self) -> tuple[int, int]:
        return 0, 0


class Forgetful(AsyncScheduler):
    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request


class Foreign:
    """Another implementation of vLLM's interface."""


class QuietWorker(Worker):
    def get_kv_connector_handshake_metadata(self) -> None:
        return None


class NamedWorker(Worker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class OwnConnector(NixlConnector):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class GreedyConnector(NixlConnector):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Skips the constructor, and what it checks."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return request.num_prompt_tokens - num_computed_tokens, True


@pytest.fixture
def construct(engine_over: attention_engines.EngineOver) -> Construct:
    """construct(role, scheduler, worker, connector): a connector of an engine that is configured so."""

    def make(role: str = "SCHEDULER", scheduler: Any = None, worker: str = "", connector: type | None = None) -> Any:
        engine, _ = engine_over(dataclasses.replace(attention_engines.GQA, era=attention_engines.ERAS[0]))
        config = engine.config
        config.scheduler_config.scheduler_cls = scheduler
        if worker:
            config.parallel_config.worker_cls = f"{__name__}.{worker}"
        if connector is not None:
            config.kv_transfer_config.kv_connector = connector.__name__
            config.kv_transfer_config.kv_connector_module_path = __name__
        return KVConnectorFactory.create_connector(config, KVConnectorRole[role], engine.kv_cache_config)

    return make


@pytest.mark.parametrize(
    "replaced",
    [
        *({"scheduler": one} for one in (None, Scheduler, AsyncScheduler, Counting, f"{__name__}.Counting")),
        {"role": "WORKER", "worker": "NamedWorker"},
        *({"role": role, "connector": OwnConnector} for role in ("SCHEDULER", "WORKER")),
    ],
    ids=str,
)
def test_a_class_that_calls_vllms_is_served(construct: Construct, replaced: dict[str, Any]) -> None:
    assert construct(**replaced)


@pytest.mark.parametrize(
    ("replaced", "words"),
    [
        # Its requests would have no lease, and a failed hand-over would pass for one that has succeeded.
        *(
            ({"scheduler": one}, "Forgetful.add_request does not call super().add_request")
            for one in (Forgetful, f"{__name__}.Forgetful")
        ),
        ({"scheduler": Foreign}, "Foreign does not extend vllm.v1.core.sched.scheduler.Scheduler"),
        # Its weights would not be compared.
        (
            {"role": "WORKER", "worker": "QuietWorker"},
            "QuietWorker.get_kv_connector_handshake_metadata does not call",
        ),
        *(
            ({"role": role, "connector": GreedyConnector}, "GreedyConnector.get_num_new_matched_tokens does not call")
            for role in ("SCHEDULER", "WORKER")
        ),
    ],
    ids=str,
)
def test_a_class_that_replaces_what_is_patched_is_refused(
    construct: Construct, replaced: dict[str, Any], words: str
) -> None:
    with pytest.raises(StartRefused) as refused:
        construct(**replaced)
    assert words in str(refused.value) and "Call super()" in str(refused.value)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_buffers_are_on_the_device_of_the_platform(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """So the same harness runs on a GPU, where "cpu" stands for a slab on the host, and without one."""
    monkeypatch.setattr(platforms, "current_platform", types.SimpleNamespace(device_type=device))
    config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    assert config.kv_buffer_device == device


@pytest.fixture
def on_a_gpu(
    engine_over: attention_engines.EngineOver, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, Any]]:
    """on_a_gpu(...): the scheduler's connector as on a GPU, with ``kv_buffer_device`` "cpu"; and its configuration."""

    def make(**extra_config: Any) -> tuple[Any, Any]:
        geometry = dataclasses.replace(
            attention_engines.GQA, era=attention_engines.ERAS[0], reserved_blocks=attention_engines.GQA.num_blocks
        )
        engine, _ = engine_over(geometry)
        config = engine.config
        config.kv_transfer_config.kv_buffer_device = "cpu"
        config.kv_transfer_config.kv_connector_extra_config.update(extra_config)
        monkeypatch.setattr(type(platforms.current_platform), "device_type", "cuda")
        made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, engine.kv_cache_config)
        return made, config.kv_transfer_config

    return make


def test_a_buffer_on_the_host_is_a_slab_there(on_a_gpu: Callable[..., tuple[Any, Any]]) -> None:
    connector, config = on_a_gpu()
    assert connector.connector_scheduler.use_host_buffer is False
    assert (config.kv_buffer_device, config.kv_connector_extra_config["memory_path"]) == ("cuda", "host")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"verify_fracton": 1.0, "num_threads": 4}, ("'verify_fracton'", "'verify_fraction'")),
        ({"enforce_handshake_compat": False}, ("enforce_handshake_compat", "not followed")),
    ],
)
def test_a_setting_that_is_not_followed_is_named_once(
    on_a_gpu: Callable[..., tuple[Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    """Nobody reads it, and nothing else would say so."""
    said: list[str] = []
    monkeypatch.setattr(factory.logger, "warning", lambda text, *values: said.append(text % values))
    on_a_gpu(**extra)
    (line,) = (one for one in said if "kv_connector_extra_config" in one)
    assert all(word in line for word in words)


@pytest.fixture
def inside(engine_over: attention_engines.EngineOver) -> Callable[..., Any]:
    """inside(extra, ...): our facade of a NixlConnector in a MultiConnector with that extra configuration."""

    def make(extra: dict[str, Any], **fields: Any) -> Any:
        engine, _ = engine_over(dataclasses.replace(attention_engines.GQA, era=attention_engines.ERAS[0]))
        extra = {**extra, "connectors": [NIXL]}
        engine.config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector", kv_connector_extra_config=extra, **fields
        )
        made = KVConnectorFactory.create_connector(engine.config, KVConnectorRole.SCHEDULER, engine.kv_cache_config)
        (side,) = sides(made)
        return side

    return make


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_role_and_policy_are_those_of_the_outermost_connector(
    inside: Callable[..., Any], role: str, policy: str
) -> None:
    """vLLM's scheduler reads them there: a request must not be recomputed here and failed there."""
    stock = inside({}, kv_role=role, kv_load_failure_policy=policy).engine.stock
    assert stock.recomputes is (policy == "recompute")
    assert (stock.is_consumer, stock.is_producer) == (role != "kv_producer", role != "kv_consumer")


def test_a_key_of_ours_beside_connectors_is_named(inside: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read of the NIXL connector alone: the server would start without what was asked for."""
    said: list[str] = []
    monkeypatch.setattr(factory.logger, "warning", lambda text, *values: said.append(text % values))
    unread = {"transfer_mode": "push", "prefill": ["http://a"], "memory_path": "host", "queue_timeout": 5}
    inside({**unread, "trusted_connectors": ["A"], "drain_delay": 1, "another": 1}, kv_role="kv_consumer")
    named = [line for line in said if "below connectors" in line]
    assert len(named) == len(unread) and all(any(key in line for line in named) for key in unread)
