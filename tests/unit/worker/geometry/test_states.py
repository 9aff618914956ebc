# SPDX-License-Identifier: Apache-2.0
"""Layers that keep a state: where it lies, what is moved of it, and what its checksum covers."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
import torch
from support.kvcached_memory import Geometry
from support.worker_fakes import Local

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.ids import KernelBlock
from kvcached_nixl.wire.messages import KernelBlockRange
from kvcached_nixl.wire.planes import GroupMemory, HeadShare
from kvcached_nixl.worker.geometry.layout import Arrangement, Layout, Page, group_memory
from kvcached_nixl.worker.geometry.planes import pages_of_state
from kvcached_nixl.worker.transfer.checksums import Content
from kvcached_nixl.worker.transfer.topology import ranges, routes

STATE_BYTES = 200
BASE = Geometry(era="packed", num_pools=3, groups=2, states=(1,), num_blocks=8, reserved_blocks=11)


def layout_of(geometry: Geometry, split: int = 1, state_bytes: int = STATE_BYTES) -> Layout:
    """``split``: kernel blocks in a block; the geometry's blocks are kernel blocks."""
    caches, memory = dataclasses.replace(geometry, split=split).allocate()
    generator = torch.Generator().manual_seed(geometry.reserved_blocks)
    for pool in memory:
        noise = torch.randint(0, 256, (pool.numel() * pool.itemsize,), generator=generator, dtype=torch.uint8)
        pool.view(torch.uint8).copy_(noise)
    attention, states = geometry.layers_of_groups()
    pages = {layer: geometry.page() for layer in attention}
    pages |= {layer: Page(split * geometry.page_bytes, 1, 1, state_bytes) for layer in states}
    return geometry.layout(caches, pages=pages, split=split)


def groups_of(layout: Layout, geometry: Geometry, split: int = 1) -> tuple[GroupMemory, ...]:
    return tuple(group_memory(layout, layers, split, lambda _: HeadShare(0)) for layers in geometry.layers_of_groups())


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("split", [1, 2])
def test_a_state_is_at_the_beginning_of_its_page(contiguous: bool, split: int) -> None:
    """Its blocks are whole ones, however many kernel blocks attention's are split into; and nothing else is
    registered."""
    geometry = dataclasses.replace(BASE, contiguous=contiguous)
    layout = layout_of(geometry, split)
    attention, state = groups_of(layout, geometry, split)
    assert layout.arrangement is (Arrangement.CONTIGUOUS if contiguous else Arrangement.DENSE)
    assert len(layout.regions) == (1 if contiguous else 3)
    assert sum(region.block_bytes for region in layout.regions) == 3 * geometry.page_bytes
    (planes,) = state.planes
    assert (state.block_size, state.kernel_blocks_per_block, planes.num_blocks) == (1, 1, 8 // split)
    assert (planes.cell_bytes, planes.padded_bytes) == (STATE_BYTES, split * geometry.page_bytes)
    assert planes.block_stride_bytes == split * attention.planes[0].block_stride_bytes
    first = layout.regions[0].address
    apart = split * geometry.page_bytes
    if contiguous:
        assert [base - first for base in planes.bases] == [0, apart, 2 * apart]
    else:
        assert planes.bases == attention.planes[0].bases


@pytest.mark.parametrize("split", [1, 2])
def test_contiguous_states_of_all_layers_are_one_descriptor(split: int) -> None:
    """With their padding; where the two sides pad differently, each layer's state is one."""
    geometry = dataclasses.replace(BASE, contiguous=True)
    groups = groups_of(layout_of(geometry, split), geometry, split)
    one, other = state_blocks(3), state_blocks(1)
    here = dataclasses.replace(Local().side.local, groups=groups)
    between = routes(here.groups, groups, is_prefill=False)
    found = ranges(between, [(nothing(), nothing(), 10), (one, other, 9)], 10)
    size = 3 * split * geometry.page_bytes
    base = groups[1].planes[0].bases[0]
    assert found.local.tolist() == [[base + 3 * size, size]]
    assert found.remote.tolist() == [[base + size, size]]
    padded = [msgspec.structs.replace(planes, padded_bytes=planes.padded_bytes + 64) for planes in groups[1].planes]
    theirs = (groups[0], msgspec.structs.replace(groups[1], planes=tuple(padded)))
    found = ranges(routes(here.groups, theirs, is_prefill=False), [(nothing(), nothing(), 10), (one, other, 9)], 10)
    assert found.local[:, 1].tolist() == [STATE_BYTES] * 3


def state_blocks(block: int, first_token: int = 9) -> KernelBlockRange:
    return KernelBlockRange(first_token, (KernelBlock(block),))


def nothing() -> KernelBlockRange:
    return KernelBlockRange(0, ())


@pytest.mark.parametrize("split", [1, 2])
def test_the_checksum_covers_the_state_and_not_its_padding(split: int) -> None:
    """Equal for every layout, and different for each byte of a state."""
    sums = []
    for contiguous in (True, False):
        geometry = dataclasses.replace(BASE, contiguous=contiguous)
        layout = layout_of(geometry, split)
        groups = groups_of(layout, geometry, split)
        content = Content(groups, layout.areas())
        views = [layout.device_views[layer] for layer in geometry.layers_of_groups()[1]]
        for number, view in enumerate(views):
            view[2].copy_(torch.arange(view.shape[1]).add(number).remainder(251))
        sums.append(content.digest([(nothing(), 10), (state_blocks(2), 9)], 10, groups, is_prefill=True))
        views[1][2, STATE_BYTES:] = 255
        assert content.digest([(nothing(), 10), (state_blocks(2), 9)], 10, groups, is_prefill=True) == sums[-1]
        views[1][2, STATE_BYTES - 1] ^= 1
        assert content.digest([(nothing(), 10), (state_blocks(2), 9)], 10, groups, is_prefill=True) != sums[-1]
    assert sums[0] == sums[1]


@pytest.mark.parametrize("wrong", ["too small", "too large", "holes", "type"])
def test_pages_without_room_for_the_state_and_no_more_are_refused(wrong: str) -> None:
    geometry = dataclasses.replace(BASE, contiguous=True)
    pages, size = geometry.allocate()[0][geometry.layers_of_groups()[1][0]], geometry.page_bytes
    found = {"holes": pages[..., ::2], "type": pages.view(torch.bfloat16), "too small": pages[..., :199]}
    with pytest.raises(LayoutRefused, match="keeps a state"):
        pages_of_state("l", found.get(wrong, pages), size - (wrong == "too large"), 200)


def test_pages_registered_without_their_padding_have_it_all_the_same() -> None:
    """As model runner V2 registers them; the padding belongs to nothing else."""
    geometry = dataclasses.replace(BASE, contiguous=True)
    pages = geometry.allocate()[0][geometry.layers_of_groups()[1][1]]
    for registered in (pages, pages[..., :STATE_BYTES]):
        whole = pages_of_state("l", registered, geometry.page_bytes, STATE_BYTES)
        assert whole.shape == (geometry.reserved_blocks, geometry.page_bytes)
        assert (whole.data_ptr(), whole.stride(0)) == (pages.data_ptr(), pages.stride(0))


def test_pages_that_lie_in_another_way_than_attentions_are_refused() -> None:
    geometry = dataclasses.replace(BASE, contiguous=True)
    caches, _ = geometry.allocate()
    attention, states = geometry.layers_of_groups()
    pages = {layer: geometry.page() for layer in attention}
    pages |= {layer: Page(geometry.page_bytes, 1, 1, STATE_BYTES) for layer in states}
    several = {**caches, states[0]: caches[states[0]][::2]}
    for found, words in (
        (several, "bytes apart"),
        ({layer: caches[layer] for layer in states}, "no layer with a KV cache"),
        ({**caches, states[2]: caches[states[2]][:4]}, "at least 8 blocks"),
    ):
        with pytest.raises(LayoutRefused, match=words):
            geometry.layout(found, pages=pages)


def test_no_bytes_of_neighbours_are_moved() -> None:
    geometry = dataclasses.replace(BASE, contiguous=False)
    layout = layout_of(geometry)
    groups = groups_of(layout, geometry)
    found = ranges(
        routes(groups, groups, is_prefill=False),
        [(nothing(), nothing(), 10), (state_blocks(6), state_blocks(2), 9)],
        10,
    )
    areas = dict(layout.areas())
    expected = {address: area.clone() for address, area in areas.items()}
    for area in expected.values():
        area[6] = area[2]
    for (there, size), (source, _) in zip(found.local.tolist(), found.remote.tolist(), strict=True):
        ((address, area),) = [(a, t) for a, t in areas.items() if 0 <= there - a < t.numel()]
        flat = area.view(-1).numpy()
        flat[there - address : there - address + size] = np.array(flat[source - address : source - address + size])
    assert all(torch.equal(areas[address], area) for address, area in expected.items())
