# SPDX-License-Identifier: Apache-2.0
"""`vllm.adapter.neighbours` with stand-ins for vLLM's connectors and their factory."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.vllm import KV_TRANSFER
from kvcached_nixl.vllm.adapter import neighbours
from kvcached_nixl.vllm.adapter.neighbours import (
    JUDGED,
    TRUSTED,
    connector_classes,
    is_tier,
    require_no_replacement,
    require_one_group,
)
from kvcached_nixl.vllm.adapter.versions import HITS_DIVERGE
from kvcached_nixl.wire.manifest import Keeps

BASE = type("KVConnectorBase_V1", (), {"__module__": f"{KV_TRANSFER}.v1.base"})


def of_vllm(name: str) -> type:
    return type(name, (BASE,), {"__module__": f"{KV_TRANSFER}.v1.{name.lower()}"})


CLASSES = {name: of_vllm(name) for name in (*JUDGED, "NewConnector")}
CLASSES["Mine"] = type("Mine", (BASE,), {"__module__": "mine"})
CLASSES["Derived"] = type("Derived", (CLASSES["OffloadingConnector"],), {"__module__": "mine"})
CLASSES["LMCacheConnectorV1Dynamic"] = type("LMCacheConnectorV1Dynamic", (BASE,), {"__module__": "lmcache.integration"})


class Factory:
    @staticmethod
    def get_connector_class(config: Any) -> type:
        return CLASSES[config.kv_connector]


def multi(*names: str) -> dict[str, Any]:
    connectors = [{"kv_connector": "NixlConnector"}, *({"kv_connector": name} for name in names)]
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}


def vllm_config(*names: str, inner: bool = False, trusted: Any = None) -> Any:
    given = multi(*names)
    if inner:
        given["kv_connector_extra_config"] = {"connectors": [given.copy()]}
    if trusted is not None:
        given["kv_connector_extra_config"][TRUSTED] = trusted
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(**given))


def require_servable(config: Any) -> None:
    neighbours.require_servable(connector_classes(Factory, config.kv_transfer_config), config)


@pytest.fixture(autouse=True)
def serves_tiers(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As with vLLM 0.28."""
    monkeypatch.setattr(neighbours, "installed_has", HITS_DIVERGE.__eq__)
    return monkeypatch


REFUSED = sorted({*JUDGED} - {"MultiConnector"} - {name for name in JUDGED if "Nixl" in name})


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("name", [*REFUSED, "NewConnector", "Derived", "LMCacheConnectorV1Dynamic"])
def test_a_connector_that_was_not_shown_to_be_safe_is_refused_in_words(name: str, inner: bool) -> None:
    """One that a later vLLM adds, too, and a class that extends one of vLLM's."""
    with pytest.raises(SettingsError) as refusal:
        require_servable(vllm_config(name, inner=inner))
    assert name in refusal.value.found and f"Remove {name}" in refusal.value.remedy
    named = {"Derived": "OffloadingConnector", "OffloadingConnector": "CPUOffloadingSpec"}.get(name, name)
    assert refusal.value.consequence.startswith(f"{named} ")


def tier_config(spec: Any, trusted: Any = None, speculative: Any = None, stages: int = 1) -> Any:
    config = vllm_config("OffloadingConnector", trusted=trusted)
    tier = config.kv_transfer_config.kv_connector_extra_config["connectors"][1]
    tier["kv_connector_extra_config"] = {} if spec is None else {"spec_name": spec}
    config.speculative_config = speculative
    config.parallel_config = SimpleNamespace(pipeline_parallel_size=stages)
    return config


@pytest.mark.parametrize(
    ("spec", "trusted", "why"),
    [
        (None, None, "GPU"),
        ("CPUOffloadingSpec", ["Other"], "GPU"),
        ("Mine", None, "not shown"),
        ("Mine", "Mine", "not shown"),
        ("TieringOffloadingSpec", ["TieringOffloadingSpec"], "other weights"),
    ],
)
def test_a_tier_copies_with_what_somebody_vouches_for(spec: Any, trusted: Any, why: str) -> None:
    """And never with what outlives the engine's weights."""
    with pytest.raises(SettingsError) as refusal:
        require_servable(tier_config(spec, trusted))
    assert why in refusal.value.consequence
    assert ("add" in refusal.value.remedy) is (why != "other weights")


@pytest.mark.parametrize("spec", [None, "CPUOffloadingSpec", "Mine"])
def test_a_tier_is_served_since_one_version_and_without_drafts(spec: Any, serves_tiers: pytest.MonkeyPatch) -> None:
    trusted = [spec or "CPUOffloadingSpec"]
    require_servable(tier_config(spec, trusted))
    with pytest.raises(SettingsError, match="with --speculative-config"):
        require_servable(tier_config(spec, trusted, speculative=object()))
    with pytest.raises(SettingsError, match="with --pipeline-parallel-size"):
        require_servable(tier_config(spec, trusted, stages=2))
    serves_tiers.setattr(neighbours, "installed_has", ().__contains__)
    with pytest.raises(SettingsError, match="after vLLM has freed it"):
        require_servable(tier_config(spec, trusted))


def test_a_class_that_extends_the_tier_is_none() -> None:
    assert is_tier(CLASSES["OffloadingConnector"])
    assert not is_tier(CLASSES["Derived"]) and not is_tier(CLASSES["NixlConnector"])


@pytest.mark.parametrize("names", [(), ("OffloadingConnector",) * 2])
def test_one_tier_is_served_and_the_configuration_names_it(names: tuple[str, ...]) -> None:
    """One that it does not name may copy with anything, and of two, one's blocks would not be kept."""
    with pytest.raises(SettingsError, match=f"{len(names)} configurations"):
        neighbours.require_servable([CLASSES["OffloadingConnector"]], vllm_config(*names))


@pytest.mark.parametrize("kinds", [(), ("WINDOW",), ("EVERYTHING", "WINDOW"), ("EVERYTHING",) * 2, ("STATE",)], ids=str)
def test_a_tier_copies_full_attention_only(kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "keeps_of", lambda name: Keeps[name])

    def config(*names: str) -> Any:
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=name) for name in names])

    require_one_group(config("EVERYTHING"))
    with pytest.raises(SettingsError, match="one KV-cache group"):
        require_one_group(config(*kinds))


def test_embeddings_of_an_encoder_s_connector_are_refused() -> None:
    """It finds them by an image's hash: those of another model, or of weights of before."""
    config = vllm_config()
    config.ec_transfer_config = SimpleNamespace(ec_connector="ECExampleConnector")
    with pytest.raises(SettingsError, match="--ec-transfer-config with ECExampleConnector"):
        require_servable(config)
    config.ec_transfer_config = None
    require_servable(config)


def test_an_engine_that_goes_on_after_a_step_has_failed_is_refused() -> None:
    config = vllm_config()
    for is_on in (False, True):
        config.parallel_config = SimpleNamespace(enable_fault_tolerance=is_on)
        with pytest.raises(SettingsError, match="--enable-fault-tolerance") if is_on else nullcontext():
            require_servable(config)


@pytest.mark.parametrize(
    ("is_on", "role", "is_refused"),
    [
        (False, "kv_consumer", False),
        (True, "kv_producer", False),
        # It may only prefill.
        (True, "kv_both", False),
        (True, "kv_consumer", True),
    ],
)
def test_kv_that_vllm_takes_with_the_experts_of_its_tokens_only_is_refused(
    is_on: bool, role: str, is_refused: bool
) -> None:
    config = vllm_config()
    config.aux_output_config = SimpleNamespace(enable_return_routed_experts=is_on)
    config.kv_transfer_config.kv_role = role
    with pytest.raises(SettingsError, match="--enable-return-routed-experts") if is_refused else nullcontext():
        require_servable(config)


@pytest.mark.parametrize("trusted", [None, [], ["Other"], "Mine", {"Mine": 1}], ids=str)
@pytest.mark.parametrize("inner", [False, True])
def test_a_connector_of_another_package_is_refused_until_somebody_vouches_for_it(trusted: Any, inner: bool) -> None:
    with pytest.raises(SettingsError) as refusal:
        require_servable(vllm_config("Mine", inner=inner, trusted=trusted))
    assert "Mine" in refusal.value.found and f'"{TRUSTED}": ["Mine"]' in refusal.value.remedy
    require_servable(vllm_config("Mine", inner=inner, trusted=["Mine"]))


@pytest.mark.parametrize("name", ["OffloadingConnector", "Derived", "LMCacheConnectorV1Dynamic"])
def test_nobody_can_vouch_for_one_that_is_known(name: str) -> None:
    with pytest.raises(SettingsError):
        require_servable(vllm_config(name, trusted=[name]))


@pytest.mark.parametrize(
    ("connector", "gib", "refused"),
    [
        ("OffloadingConnector", 4.0, True),
        ("LMCacheMPConnector", 4.0, True),
        ("OffloadingConnector", None, False),
        ("NixlConnector", 4.0, False),
        ("NixlConnector", None, False),
    ],
)
def test_an_offloading_connector_in_nixl_s_place_is_refused(connector: str, gib: float | None, refused: bool) -> None:
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector=connector, kv_connector_extra_config={}),
        cache_config=SimpleNamespace(kv_offloading_size=gib),
    )
    if refused:
        with pytest.raises(SettingsError, match="--kv-offloading-size 4.0"):
            require_no_replacement(config)
    else:
        require_no_replacement(config)


@pytest.mark.parametrize("below", [["odd"], [{"url": "tcp://h"}], [{"kv_connector": None}], 3], ids=str)
def test_what_another_connector_has_below_the_same_key_is_not_read(below: Any) -> None:
    """It started before, and has no NIXL connector that it could be beside."""
    config = SimpleNamespace(kv_connector="Mine", kv_connector_extra_config={"connectors": below})
    assert list(connector_classes(Factory, config)) == [CLASSES["Mine"]]
