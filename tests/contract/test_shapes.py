# SPDX-License-Identifier: Apache-2.0
"""What this package assumes of vLLM: its methods and parameters, drafts, and copies of its configuration."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from packaging.version import Version
from support.shapes.fixture import SERIES, VLLM_PATCHES, load, verdicts
from vllm.config import VllmConfig, speculative
from vllm.config.speculative import EagleModelTypes, SpeculativeConfig, SpeculativeMethod
from vllm.config.utils import replace
from vllm.v1 import kv_cache_interface

from kvcached_nixl.patching import Patch
from kvcached_nixl.patching.patch import find_seat, locate
from kvcached_nixl.vllm.adapter.specs import KEEPS, WITHOUT_KV, keeps_draft_kv
from kvcached_nixl.vllm.adapter.versions import found_version
from kvcached_nixl.vllm.patches import naming


@pytest.fixture(scope="module")
def shape() -> dict[str, Any]:
    version = Version(str(found_version("vllm"))).public
    if not (SERIES / f"{version}.json").is_file():
        pytest.skip(f"there is no fixture of vLLM {version}")
    return load(version)


@pytest.mark.parametrize("patch", VLLM_PATCHES, ids=lambda patch: patch.name)
def test_a_patch_stands_where_the_fixture_says_with_its_parameters(shape: dict[str, Any], patch: Patch) -> None:
    """Text was read for the one, Python has made the other: decorators, aliases and bases are told alike."""
    (verdict,) = [one for one in verdicts(shape) if one.patch == patch.name]
    if verdict.word != "holds":
        pytest.skip(f"{verdict.word}: {verdict.detail}")
    found = locate(patch.target, importlib.import_module(patch.target.module))
    assert found is not None
    seat = find_seat(patch, found)
    assert seat.where == verdict.detail
    owner = seat.owner
    body = f"{owner.__name__}:" if inspect.ismodule(owner) else f"{owner.__module__}:{owner.__qualname__}"
    parameters = [
        one.replace(annotation=inspect.Parameter.empty, default=... if one.default is not one.empty else one.empty)
        for one in inspect.signature(seat.function).parameters.values()
    ]
    _, _, text = shape["bodies"][body]["methods"][patch.attribute].partition("(")
    made: dict[str, Any] = {}
    exec(f"def method({text}: ...", made)
    assert parameters == list(inspect.signature(made["method"]).parameters.values())


REFUSED = frozenset(
    {
        *("EncoderOnlyAttentionSpec", "CrossAttentionSpec", "CircularBufferSpec"),
        *("HiSparseHotSpec", "HiSparseResidentSpec", "TQFullAttentionSpec"),
    }
)
NO_LAYERS = frozenset({"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs", "KVCacheGroupSpec"})


def test_every_kind_of_cache_is_known_or_refused() -> None:
    """One that this vLLM adds is looked at before it is served."""
    found = {name for name in vars(kv_cache_interface) if name.endswith(("Spec", "Specs"))}
    assert KEEPS.keys() <= found - NO_LAYERS <= KEEPS.keys() | REFUSED


METHODS = frozenset(get_args(SpeculativeMethod))
BY_A_MODEL = frozenset(get_args(EagleModelTypes)) | {"draft_model", "dspark"}
UNKNOWN = frozenset({"custom_class"})
"""A class of the user's."""
REMOVED = frozenset({"medusa", "mlp_speculator"})
"""Methods that vLLM 0.33 no longer has."""


def drafting(method: str) -> Any:
    return SimpleNamespace(method=method, draft_model_config=None)


def test_every_method_is_known() -> None:
    """A method that this vLLM adds is looked at before it is served."""
    without_a_model = METHODS - BY_A_MODEL - UNKNOWN
    assert without_a_model <= WITHOUT_KV and WITHOUT_KV - without_a_model <= REMOVED
    assert not WITHOUT_KV & BY_A_MODEL


def test_vllm_says_the_same() -> None:
    """vLLM 0.30 has a name for it; earlier runners check for these three, one by one, to draft on the device."""
    for method in METHODS - UNKNOWN:
        # Kinds of mtp are renamed when a configuration is made.
        config = drafting("mtp" if method.endswith("_mtp") else method)
        asked = (SpeculativeConfig.use_eagle, SpeculativeConfig.uses_draft_model)
        keeps = any(ask(config) for ask in (*asked, SpeculativeConfig.uses_extract_hidden_states))
        assert keeps_draft_kv(config) is keeps, method
    assert 'self.method = "mtp"' in inspect.getsource(speculative)


def test_gemmas_drafts_share_the_models_kv() -> None:
    """Which is found out by the same name, and has each of its layers read another's KV."""
    draft = SimpleNamespace(hf_config=SimpleNamespace(model_type="gemma4_mtp"))
    config = SimpleNamespace(method="mtp", draft_model_config=draft)
    assert SpeculativeConfig.use_gemma4_mtp(config)
    assert not keeps_draft_kv(config)
    drafts = Path(inspect.getfile(speculative)).parents[1] / "v1" / "spec_decode" / "gemma4.py"
    assert "attn.kv_sharing_target_layer_name = target_layer_name" in drafts.read_text()


class Executor:
    """Stands for vLLM's, which lives as long as its engine."""


@pytest.fixture
def executor() -> Iterator[Any]:
    yield Executor()
    naming.give_up_name()


def test_an_attribute_that_is_no_field_cannot_be_copied() -> None:
    config = VllmConfig()
    config.kvcached_nixl_name = "any"
    with pytest.raises(ValueError, match="kvcached_nixl_name"):
        replace(config)


def test_a_workers_configuration_can_be_copied(executor: Any) -> None:
    """As vLLM does it for the language model of a model with images, and for a draft model."""
    config = VllmConfig()
    naming.own_engine(executor, config)
    naming.join_engine(config)
    # `replace` passes each of them to the constructor.
    assert vars(config).keys() <= {field.name for field in fields(VllmConfig)}
