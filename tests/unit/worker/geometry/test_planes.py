# SPDX-License-Identifier: Apache-2.0
"""worker/geometry/planes.py: a cell is exactly the bytes that attention sees of one token and head."""

from __future__ import annotations

import ctypes
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
