# SPDX-License-Identifier: Apache-2.0
"""worker/geometry/{layout,planes}.py: which bytes belong to a block, and to one token and head of it."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Collection
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.digest_fakes import cell_at
from support.kvcached_memory import Geometry, geometries

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.wire.planes import HeadShare, named_planes
from kvcached_nixl.worker.geometry.layout import group_memory
from kvcached_nixl.worker.geometry.planes import Axes, planes_of

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


# ---------------------------------------------------------------------------------------------------------------- cells


DTYPES = st.sampled_from([torch.bfloat16, torch.float32])
NUMBERS = {"num_blocks": 1_000_003, "block_size": 48, "num_heads": 7}


@settings(max_examples=40, deadline=None)
@given(geometries(num_blocks=st.integers(1, 3), reserved_blocks=st.integers(3, 5), dtype=DTYPES))
def test_a_cell_is_what_attention_sees_of_a_token_and_a_head(geometry: Geometry) -> None:
    """For every block, token, head and plane, in each of kvcached's arrangements."""
    caches, memory = geometry.allocate()
    for number, pool in enumerate(memory):
        pool.copy_(torch.arange(pool.numel()).remainder(97 + number).to(pool.dtype))
    axes = geometry.axes()
    (planes,) = planes_of(caches, axes, lambda _: HeadShare(0))
    assert len(planes.bases) == geometry.num_pools * (2 if geometry.era == "kv_apart" else 1)
    seen = []
    for cache in list(caches.values())[: geometry.num_pools]:
        seen += list(cache.unbind(axes.kv)) if axes.kv is not None else [cache]
    order = [axis - (axes.kv is not None and axes.kv < axis) for axis in (0, axes.token)]
    if axes.head is not None:
        order.append(axes.head - (axes.kv is not None and axes.kv < axes.head))
    for base, view in zip(planes.bases, seen, strict=True):
        # What is left counts one of something: the head of a latent.
        alone = [axis for axis in range(view.dim() - 1) if axis not in order]
        cells = view.permute(*order, view.dim() - 1, *alone).flatten(len(order))
        for place in torch.cartesian_prod(*(torch.arange(size) for size in cells.shape[:-1])).tolist():
            block, token, *head = place
            at = cell_at(planes, base, block, token, *head)
            expected = cells[tuple(place)].contiguous().view(torch.uint8).numpy().tobytes()
            assert ctypes.string_at(at, planes.cell_bytes) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1_000_003, 2, 48, 7, 80), Axes(2, 3, 1, 5)),
        ((1_000_003, 7, 48, 160), Axes(2, 1, None, 4)),
        ((1_000_003, 48, 560), Axes(1, None, None, 3)),
        ((1_000_003, 1, 48, 560), Axes(2, None, None, 4)),
    ],
    ids=["K and V apart", "packed", "latent", "vLLM 0.29's latent"],
)
def test_the_dimensions_are_found_by_their_numbers(shape: tuple[int, ...], expected: Axes) -> None:
    assert Axes.from_probe(shape, **NUMBERS) == expected


@pytest.mark.parametrize(
    "shape",
    [
        (5, 48, 7, 80),
        (1_000_003, 5, 7, 80),
        (1_000_003, 3, 48, 7, 80),
        (1_000_003, 2, 2, 48, 7, 80),
        (1_000_003, 2, 48, 80),
        (2, 1_000_003, 48, 7, 80),
    ],
    ids=["no blocks", "no tokens", "three halves", "two halves twice", "K and V without heads", "K and V first"],
)
def test_a_shape_that_cannot_be_read_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutRefused, match="cannot be told apart"):
        Axes.from_probe(shape, **NUMBERS)


@pytest.mark.parametrize("wrong", ["holes", "another stride", "another size"])
def test_cells_with_holes_and_layers_that_share_memory_and_differ_are_refused(wrong: str) -> None:
    geometry = Geometry(era="packed", num_pools=2, groups=2)
    caches: dict[str, Any] = geometry.allocate()[0]
    last = list(caches)[-1]
    if wrong == "holes":
        caches = {layer: cache[..., ::2] for layer, cache in caches.items()}
    elif wrong == "another stride":
        caches[last] = caches[last][::2]
    else:
        caches[last] = caches[last][..., :-1]
    with pytest.raises(LayoutRefused, match="other bytes"):
        planes_of(caches, geometry.axes(), lambda _: HeadShare(0))


def test_layers_that_change_places_between_groups_are_told_apart() -> None:
    """As with another ``--kv-cache-dtype-skip-layers``: planes of the same number and cells, of other layers."""
    geometry = Geometry(era="packed", num_pools=2, groups=2)
    caches, _ = geometry.allocate()
    layout = geometry.layout(caches)
    first, second = geometry.layers_of_groups()

    def told(*groups: Collection[str]) -> frozenset[tuple[int, int, int]]:
        return named_planes([group_memory(layout, layers, 1, lambda _: HeadShare(0)) for layers in groups])

    assert told(first, second) == told(list(first), set(second))
    others = [told(second, first), told((first[0], second[1]), (second[0], first[1])), told((*first, *second))]
    assert told(first, second) not in others and told(first[:1], second[:1]) < told(first, second)
