# SPDX-License-Identifier: Apache-2.0
"""Compares what `vllm.adapter.specs` says about vLLM's speculative methods with the installed vLLM."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")

from vllm.config import speculative
from vllm.config.speculative import EagleModelTypes, SpeculativeConfig, SpeculativeMethod

from kvcached_nixl.vllm.adapter.specs import WITHOUT_KV, keeps_draft_kv

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
