# SPDX-License-Identifier: Apache-2.0
"""Shapes of vLLM's own attention backends, as far as they can be imported without a GPU: each is read."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an environment: bash experiments/env.sh")
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvcached_nixl.vllm.adapter.versions import LOADS_BEHIND, installed_has
from kvcached_nixl.worker.geometry.planes import Axes

pytestmark = pytest.mark.skipif(installed_has(LOADS_BEHIND), reason="vLLM 0.29 asks no backend for a shape")
NAMES = ("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "TRITON_ATTN", "TRITON_ATTN_DIFFKV", "TRITON_MLA", "FLASHMLA", "CPU_ATTN")
NUMBERS = {"num_blocks": 1_000_003, "block_size": 4_800, "num_heads": 1_009}


def backend(name: str) -> Any:
    try:
        return AttentionBackendEnum[name].get_class()
    except KeyError:
        pytest.skip("not in this vLLM")
    except (ImportError, AssertionError, AttributeError, RuntimeError, ValueError) as error:
        pytest.skip(f"not on this machine: {error}")


def shape_of(name: str) -> tuple[int, ...]:
    sizes = {"num_blocks": NUMBERS["num_blocks"], "block_size": NUMBERS["block_size"]}
    try:
        return tuple(backend(name).get_kv_cache_shape(**sizes, num_kv_heads=NUMBERS["num_heads"], head_size=1))
    except AssertionError as error:
        pytest.skip(f"takes no such shape: {error}")


@pytest.mark.parametrize("name", NAMES)
def test_blocks_tokens_and_heads_are_found(name: str) -> None:
    """Latents have no heads; K and V of different head sizes (``DIFFKV``) are packed in one cell."""
    shape = shape_of(name)
    axes = Axes.from_probe(shape, **NUMBERS)
    assert (shape[0], shape[axes.token]) == (NUMBERS["num_blocks"], NUMBERS["block_size"])
    if "MLA" in name:
        assert axes.head is axes.kv is None
    else:
        assert axes.head is not None and shape[axes.head] == NUMBERS["num_heads"]
        assert axes.kv is None or shape[axes.kv] == 2


@pytest.mark.parametrize("name", ["FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV"])
def test_keys_and_values_of_different_sizes_are_one_cell(name: str) -> None:
    """MiMo-V2: 192 and 128 elements a head. They are moved together, and never cut between the two."""
    shape = shape_of(name)
    axes = Axes.from_probe(shape, **NUMBERS)
    assert axes.kv is None and shape[-1] > 2 and axes.ndim == 4
