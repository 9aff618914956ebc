# SPDX-License-Identifier: Apache-2.0
"""Engines with real memory, registration and handshake and nothing else, for every era of attention backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from kvcached_nixl.patching import Registry
from kvcached_nixl.vllm.adapter.versions import COUNTS_EXTERNAL_WEIGHTS, LOADS_BEHIND, installed_has
from kvcached_nixl.vllm.patches import PATCHES
from support.kvcached_memory import Geometry
from support.patches import applied
from support.stock_pair import MAX_TOKENS, Engine, build_engine, write_model

ERAS = ["packed", "latent" if installed_has(LOADS_BEHIND) else "mla"]
EngineOver = Callable[..., tuple[Engine, dict[str, torch.Tensor]]]
GQA = Geometry(num_kv_heads=4, head_size=32, block_size=32, num_blocks=11, reserved_blocks=29)


@pytest.fixture
def patched() -> Iterator[Registry]:
    with applied(PATCHES) as registry:
        yield registry


def backend_of(geometry: Geometry) -> type:
    """Returns a backend whose caches have the geometry's shape, like the GPU backends of this vLLM."""

    class Backend(CPUAttentionBackend):
        @staticmethod
        def get_name() -> str:
            return f"TEST_{geometry.era.upper()}"

        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
            return sorted({geometry.of_group(group).block_size for group in range(geometry.groups)})

        @staticmethod
        def get_kv_cache_shape(
            num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *args: Any, **kwargs: Any
        ) -> tuple[int, ...]:
            # Backends of latent attention take no number of heads.
            heads = 1 if geometry.is_latent else num_kv_heads
            one = dataclasses.replace(geometry, block_size=block_size, num_kv_heads=heads, head_size=head_size)
            return one.shape(num_blocks)

    return Backend


STATE_SHAPES, STATE_DTYPES = ((3, 40), (2, 8, 8)), (torch.bfloat16, torch.float32)
"""Of a state's convolution and recurrence: 752 bytes, less than a page."""
CHECKPOINTS = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}


def state_spec_of(geometry: Geometry, mode: str, num_drafts: int = 0) -> Any:
    """Returns the KV-cache spec of a group that keeps states.

    Args:
        mode: ``mamba_cache_mode``: "none", with one block for all tokens; or "align".
        num_drafts: tokens that are drafted at once. As many blocks more are for the states behind them.
    """
    return MambaSpec(
        block_size=geometry.block_size * geometry.split if mode == "align" else MAX_TOKENS,
        shapes=STATE_SHAPES,
        dtypes=STATE_DTYPES,
        page_size_padded=geometry.page_bytes * geometry.split,
        mamba_cache_mode=mode,
        num_speculative_blocks=num_drafts,
        # Drafts are served with gated delta nets only.
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN if num_drafts else MambaAttentionBackendEnum.MAMBA2,
        # As Mamba2's, in any mode.
        **(CHECKPOINTS if installed_has(COUNTS_EXTERNAL_WEIGHTS) else {}),
    )


def spec_of(geometry: Geometry, window: int | None) -> Any:
    """Returns the KV-cache spec of a group whose blocks have this geometry."""
    common: dict[str, Any] = {
        "block_size": geometry.block_size * geometry.split,
        "num_kv_heads": geometry.num_kv_heads,
        "head_size": geometry.head_size,
        "dtype": geometry.dtype,
    }
    if geometry.is_latent:
        return MLAAttentionSpec(
            **{**common, "num_kv_heads": 1, "head_size": geometry.num_kv_heads * geometry.head_size}
        )
    if window is not None:
        return SlidingWindowSpec(**common, sliding_window=window)
    return FullAttentionSpec(**common)


def engine_of(
    geometry: Geometry,
    folder: Path,
    windows: Sequence[int | str | None] | None = None,
    num_drafts: int = 0,
    extra_config: Mapping[str, Any] | None = None,
    kv_role: str = "kv_both",
) -> Engine:
    """Returns an engine of a model whose KV cache has this geometry.

    Args:
        windows: sliding window of each group; None for a group that keeps all tokens; the ``mamba_cache_mode`` of one
            that keeps states. By default all groups but the first have a window.
    """
    overrides: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": min(geometry.num_kv_heads, 8)}
    architecture = "Qwen2ForCausalLM"
    if geometry.is_latent:
        architecture = "DeepseekV2ForCausalLM"
        overrides = {
            "model_type": "deepseek_v2",
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "kv_lora_rank": 96,
            "q_lora_rank": None,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 2,
            "first_k_dense_replace": 99,
            "moe_intermediate_size": 64,
        }
    model = write_model(folder, architecture, **overrides)
    if windows is None:
        windows = [None, *[128] * (geometry.groups - 1)]
    specs = [
        state_spec_of(geometry, window, num_drafts)
        if isinstance(window, str)
        else spec_of(geometry.of_group(group), window)
        for group, window in enumerate(windows)
    ]
    names = geometry.layer_names()
    return build_engine(
        model,
        list(zip(geometry.layers_of_groups(), specs, strict=True)),
        [names[pool :: geometry.num_pools] for pool in range(geometry.num_pools)],
        geometry.num_blocks // geometry.split,
        geometry.block_size * geometry.split,
        backend_of(geometry),
        extra_config,
        kv_role=kv_role,
    )


@pytest.fixture
def engine_over(tmp_path: Path, parallel_state: None, patched: Registry) -> Iterator[EngineOver]:
    """Creates engines with filled caches, and shuts them down after the test."""
    with ExitStack() as ends:

        def make(geometry: Geometry) -> tuple[Engine, dict[str, torch.Tensor]]:
            engine = engine_of(geometry, tmp_path)
            ends.callback(engine.shutdown)
            caches, memory = geometry.allocate()
            for index, pool in enumerate(memory):
                # Bytes below 64 are finite numbers in every dtype, so equal values mean equal bytes.
                generator = torch.Generator().manual_seed(index + geometry.reserved_blocks)
                pool.view(torch.uint8).copy_(
                    torch.randint(0, 64, (pool.numel() * pool.element_size(),), generator=generator, dtype=torch.uint8)
                )
            engine.register(caches)
            return engine, caches

        yield make


class vllm_log_to:
    """Passes records of vLLM's loggers to pytest, once, while the ``with`` block runs. They do not propagate; from vLLM
    0.31 on, that is so when a server has configured them."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        import logging

        self.logger, self.handler = logging.getLogger("vllm"), caplog.handler

    def __enter__(self) -> None:
        self.logger.addHandler(self.handler)
        self.propagated, self.logger.propagate = self.logger.propagate, False

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self.handler)
        self.logger.propagate = self.propagated
