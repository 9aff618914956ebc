# SPDX-License-Identifier: Apache-2.0
"""worker/geometry/layout.py: which bytes belong to a block, in each of kvcached's arrangements."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kvcached_memory import Geometry, geometries

from kvcached_nixl.errors import LayoutRefused

GEOMETRIES = geometries(
    num_pools=st.integers(1, 5),
    num_kv_heads=st.sampled_from([1, 2, 3, 8]),
    head_size=st.sampled_from([4, 6]),
    block_size=st.sampled_from([1, 4]),
    groups=st.integers(1, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]),
)


@settings(max_examples=100, deadline=None)
@given(GEOMETRIES)
def test_the_descriptors_of_a_block_are_exactly_the_bytes_attention_sees(geometry: Geometry) -> None:
    """Filling one block through attention's views changes every byte of its descriptors, and no other descriptor."""
    caches, memory = geometry.allocate()
    layout = geometry.layout(caches)
    for block_id in range(geometry.num_blocks):
        for cache in caches.values():
            cache[block_id].fill_(1)
        written = b"".join(
            ctypes.string_at(region.address + block_id * region.block_bytes, region.block_bytes)
            for region in layout.regions
        )
        one = torch.ones(1, dtype=geometry.dtype).view(torch.uint8).numpy().tobytes()
        assert written == one * (len(written) // len(one))
        assert len(written) == geometry.block_bytes_of_all_layers()
        touched = sum(int((pool != 0).sum()) for pool in memory)
        assert touched * geometry.dtype.itemsize == geometry.block_bytes_of_all_layers()
        for pool in memory:
            pool.zero_()


@settings(max_examples=50, deadline=None)
@given(GEOMETRIES)
def test_nothing_is_registered_beyond_the_planned_blocks(geometry: Geometry) -> None:
    """Views and regions hold ``num_blocks`` blocks, however many kvcached reserved."""
    caches, _ = geometry.allocate()
    layout = geometry.layout(caches)
    assert {view.shape[0] for view in layout.device_views.values()} == {geometry.num_blocks}
    assert layout.num_blocks == geometry.num_blocks
    larger, _ = dataclasses.replace(geometry, reserved_blocks=geometry.reserved_blocks + 7).allocate()
    assert [r.block_bytes for r in geometry.layout(larger).regions] == [r.block_bytes for r in layout.regions]


@pytest.mark.parametrize(
    ("era", "change"),
    [
        ("packed", {"num_heads": 2}),
        ("packed", {"num_heads": 8}),
        ("packed", {"num_tokens": 8}),
        ("kv_apart", {"num_heads": 2}),
        ("mla", {"num_tokens": 8}),
        ("latent", {"num_tokens": 1}),
    ],
    ids=str,
)
def test_cells_that_are_no_token_of_one_head_are_refused(era: str, change: dict[str, int]) -> None:
    """vLLM 0.29: K and V as heads of their own (``num_head_slots``), several tokens in one (``tokens_per_state``).

    Peers that split heads or blocks otherwise would take K for V, or one token for another.
    """
    geometry = Geometry(era=era)
    caches, _ = geometry.allocate()
    page = dataclasses.replace(geometry.page(), **change)
    with pytest.raises(LayoutRefused, match="tokens and . heads a block"):
        geometry.layout(caches, pages=dict.fromkeys(caches, page))


def test_a_model_without_a_cache_of_its_own_is_refused() -> None:
    geometry = Geometry()
    with pytest.raises(LayoutRefused, match="no layer with a KV cache of its own"):
        geometry.layout(geometry.allocate()[0], pages={})


def test_a_layer_that_shares_anothers_cache_adds_no_region() -> None:
    geometry = Geometry(num_pools=2)
    caches, _ = geometry.allocate()
    first = next(iter(caches))
    layout = geometry.layout(caches | {"shared": caches[first]}, pages=dict.fromkeys(caches, geometry.page()))
    assert list(layout.device_views) == list(caches) and len(layout.regions) == 4


@pytest.mark.parametrize("wrong", ["hole", "stride", "few", "mixed", "order"])
def test_memory_that_cannot_be_described_is_refused_with_numbers(wrong: str) -> None:
    """A hole, an unknown stride, too few blocks, mixed arrangements or a gap between layers stops the engine."""
    geometry = Geometry(era="packed", contiguous=wrong == "order", num_pools=2)
    caches, memory = geometry.allocate()
    first, second = caches
    cache = caches[first]
    if wrong == "hole":
        caches[first] = cache[..., :-1]
    elif wrong == "stride":
        caches[first] = cache[::2]
    elif wrong == "few":
        caches[first] = cache[: geometry.num_blocks - 1]
    elif wrong == "mixed":
        caches[first] = dataclasses.replace(geometry, contiguous=True).allocate()[0][first]
    else:
        caches[second] = caches[first]
    with pytest.raises(LayoutRefused) as refusal:
        geometry.layout(caches)
    assert all(words in str(refusal.value) for words in ("shape (", "strides (", "the engine stops"))


@pytest.mark.parametrize("num_pools", [1, 2, 3])
@pytest.mark.parametrize("era", ["kv_apart", "mla"])
def test_contiguous_blocks_that_the_kernel_splits_are_refused(era: str, num_pools: int) -> None:
    """kvcached 0.1.6 keeps whole blocks there although the kernel, and so the worker, counts halves of them."""
    geometry = Geometry(era=era, contiguous=True, num_pools=num_pools)
    caches, _ = geometry.allocate()
    half = dataclasses.replace(geometry.page(), num_bytes=geometry.page_bytes // 2)
    with pytest.raises(LayoutRefused, match="bytes apart"):
        geometry.layout(caches, pages=dict.fromkeys(caches, half), num_blocks=2 * geometry.num_blocks)
