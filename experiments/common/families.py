# SPDX-License-Identifier: Apache-2.0
"""Small models of families whose layers keep KV in several ways, with random weights; nothing is downloaded.

Their configurations are those of transformers, with a few small layers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

from experiments.common import device
from experiments.common.model import make
from experiments.common.servers import python_path, tag_of
from kvcached_nixl.vllm.adapter.versions import COUNTS_EXTERNAL_WEIGHTS, installed_has

SERVED_FROM = "0.28"
"""The first vLLM whose CPU build serves these models with kvcached and the locked transformers, as far as tested."""
STAND_INS = Path(__file__).resolve().parent / "stand_ins"


def stand_ins() -> dict[str, str]:
    """Environment variables of ``vllm serve`` with what stands in for torchvision, where it is not installed."""
    if importlib.util.find_spec("torchvision"):
        return {}
    return {"PYTHONPATH": python_path(STAND_INS)}


@dataclass(frozen=True)
class Family:
    """A model of some family.

    Attributes:
        config: class of transformers' configuration.
        architecture: as vLLM's registry names it.
        values: of the configuration; the rest is transformers' default.
        block_size: ``--block-size`` of its servers, in tokens; None for vLLM's choice.
        dtype: of its servers. Where kernels take float32, batches of any size are rounded alike on a CPU.
        has_delta_net: some layers are a gated delta net. Its kernels take bfloat16 only; without AMX they want the
            state of its recurrence in float32.
        has_mamba2: some layers are Mamba2's.
        fewest_tokens: of a prompt; shorter ones are not handed over.
        imports_torchvision: vLLM's module of it does, for images.
    """

    config: str
    architecture: str
    values: Mapping[str, Any] = field(default_factory=dict)
    block_size: int | None = 32
    dtype: str = "float32"
    has_delta_net: bool = False
    has_mamba2: bool = False
    fewest_tokens: int = 3
    imports_torchvision: bool = False

    def reason_to_skip(self, caches_prefixes: bool = True) -> str | None:
        """Why the installed vLLM cannot serve it here, as far as tested; None if it can."""
        vllm = version("vllm")
        if Version(vllm) < Version(SERVED_FROM):
            return f"vLLM {SERVED_FROM} is the first that serves this model here"
        if self.has_mamba2 and vllm.startswith("0.31.") and not device.has_gpu():
            return "this vLLM's CPU build has no convolution in float32"
        if caches_prefixes and not self.caches_prefixes:
            return "this vLLM's CPU build cannot compute Mamba2 with prefix caching"
        return None

    @property
    def caches_prefixes(self) -> bool:
        """Whether the installed vLLM can serve it with prefix caching here: from 0.32 on, its CPU kernel of Mamba2 ends
        the engine where it is to keep the checkpoints for it."""
        return not (self.has_mamba2 and installed_has(COUNTS_EXTERNAL_WEIGHTS)) or device.has_gpu()

    @property
    def arguments(self) -> tuple[str, ...]:
        if not self.has_delta_net:
            return ()
        import torch

        return () if torch.cpu._is_amx_tile_supported() else ("--mamba-ssm-cache-dtype", "float32")

    @property
    def environment(self) -> Mapping[str, str]:
        return stand_ins() if self.imports_torchvision else {}


_SMALL: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_LAYERS = {"w": "sliding_attention", "f": "full_attention", "s": "linear_attention", "m": "mlp"}


def _family(config: str, architecture: str, pattern: str, values: Mapping[str, Any], **more: Any) -> Family:
    """``pattern``: a letter per layer, w for a sliding window, f for full attention, s for a state, m for a layer that
    keeps nothing."""
    name = "layers_block_type" if config == "NemotronHConfig" else "layer_types"
    layers = {"num_hidden_layers": len(pattern), name: [_LAYERS[letter] for letter in pattern]}
    return Family(config, architecture, {**_SMALL, **layers, **values}, **more)


def _gemma4(pattern: str, *, block_size: int = 32, **values: Any) -> Family:
    widths = {"head_dim": 64, "global_head_dim": 128, "hidden_size_per_layer_input": 0}
    config = {"sliding_window": 128, "vocab_size_per_layer_input": 512, **widths, **values}
    more = {"block_size": block_size, "fewest_tokens": 2}
    return _family("Gemma4TextConfig", "Gemma4ForCausalLM", pattern, config, **more)


_GEMMA3: Mapping[str, Any] = {
    "sliding_window": 128,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
}
_QWEN: Mapping[str, Any] = {
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
"""The gated delta net's kernels want heads of at least 64 on a CPU."""
_NEMOTRON: Mapping[str, Any] = {
    "head_dim": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 2,
}
_MAMBA2: Mapping[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 64}
_HAS_MAMBA2: Mapping[str, Any] = {"block_size": None, "has_mamba2": True}
_GATED_DELTA_NET: Mapping[str, Any] = {"block_size": None, "dtype": "bfloat16", "has_delta_net": True}

FAMILIES: Mapping[str, Family] = {
    "gemma3 one head": _family("Gemma3TextConfig", "Gemma3ForCausalLM", "wfwf", _GEMMA3, fewest_tokens=2),
    "gemma4 one head": _gemma4("wfwf", num_key_value_heads=1),
    "gemma4": _gemma4("wfwf"),
    "gemma4 5:1": _gemma4("wwwwwf"),
    "gemma4 K=V": _gemma4(
        "wfwf", block_size=64, num_key_value_heads=4, attention_k_eq_v=True, num_global_key_value_heads=1
    ),
    "gemma4 shared": _gemma4("wfwfwf", num_kv_shared_layers=2),
    "nemotron-h": _family("NemotronHConfig", "NemotronHForCausalLM", "smfsf", _NEMOTRON, **_HAS_MAMBA2),
    "granite4-h": _family(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        "sssf",
        {
            **_MAMBA2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 256,
            "position_embedding_type": "rope",
        },
        **_HAS_MAMBA2,
    ),
    "falcon-h1": Family(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {**_SMALL, "num_hidden_layers": 3, "head_dim": 64, "mamba_d_ssm": 256, **_MAMBA2},
        **_HAS_MAMBA2,
    ),
    "zamba2": Family(
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {
            **_SMALL,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 1,
            "adapter_rank": 16,
            "n_mamba_heads": 4,
            "mamba_headdim": 64,
            "mamba_d_state": 64,
            "mamba_ngroups": 1,
        },
        **_HAS_MAMBA2,
    ),
    "qwen3.5": _family(
        "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", "sssf", _QWEN, imports_torchvision=True, **_GATED_DELTA_NET
    ),
    "qwen3-next": _family(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        "sssf",
        {
            **_QWEN,
            "num_experts": 4,
            # All of them: otherwise rounding may choose other experts, and change an answer by more than a nat.
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
        **_GATED_DELTA_NET,
    ),
}


def make_family(name: str) -> Path:
    """Return the folder of the model of ``FAMILIES[name]``; makes it if it does not exist."""
    one = FAMILIES[name]
    return make(tag_of(name), one.architecture, one.config, one.values)
