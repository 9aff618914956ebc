# SPDX-License-Identifier: Apache-2.0
"""A slab has room for the engine's load, is never larger than the cache, and never smaller than transfers need."""

from __future__ import annotations

import math

import pytest
import torch
from support.kvcached_memory import Geometry
from unit.worker.transfer.test_slab import allocate

from kvcached_nixl.errors import SettingsError
from kvcached_nixl.settings import MemoryPath, Settings
from kvcached_nixl.worker.memory_registration import SlabLoad, make_slab, num_kept, num_slots
from kvcached_nixl.worker.transfer.slab import Slots, Use

LAYOUT, _, _ = allocate(Geometry(num_pools=2, block_size=16, num_blocks=2000, reserved_blocks=2001))
LARGEST_BLOCK_TOKENS = 256
"""Of either side, as `sizing` assumes."""
SLOT_BYTES = sum(region.block_bytes for region in LAYOUT.regions)
LOAD = SlabLoad(longest_tokens=1600, running=64, slot_tokens=(16,))


@pytest.mark.parametrize(
    ("load", "slots"),
    [
        (LOAD, 4 * 100),
        (SlabLoad(1600, 2, (16,)), 2 * 100),
        (SlabLoad(1601, 2, (16,)), 2 * 101),
        (SlabLoad(1600, 2, (16, 16)), 4 * 100),
        (SlabLoad(1600, 3, (64, 16)), 3 * (25 + 100)),
        (SlabLoad(1_000_000, 64, (16,)), 2000),
        (SlabLoad(16, 1, (16,)), 64),
        (SlabLoad(16, 1, (128, 128, 128)), 24),
        (SlabLoad(1600, 2, (16,), 3), 2 * (100 + 3)),
        (SlabLoad(16, 1, (16,), 3), 4 * (16 + 3)),
    ],
    ids=[
        "four",
        "as many as run",
        "a block more",
        "groups",
        "groups of two sizes",
        "the whole cache",
        "few",
        "few of large ones",
        "states",
        "few of states",
    ],
)
def test_it_is_as_large_as_what_it_is_for(load: SlabLoad, slots: int) -> None:
    assert num_slots(LAYOUT, load, None, is_host=True) == slots


def test_on_a_device_it_is_a_small_part_of_the_cache() -> None:
    """On a device there is little memory beside the cache, so the default is 1/16 of it."""
    assert num_slots(LAYOUT, LOAD, None, is_host=False) == 2000 // 16
    assert num_slots(LAYOUT, SlabLoad(16, 1, (16,)), None, is_host=False) == 64


def test_it_is_as_large_as_asked_for_and_never_larger_than_the_cache() -> None:
    for is_host in (True, False):
        assert num_slots(LAYOUT, LOAD, 500 * SLOT_BYTES / 2**30, is_host=is_host) == 500
        assert num_slots(LAYOUT, LOAD, 64.0, is_host=is_host) == 2000


def test_one_that_no_block_of_a_peers_would_fit_is_refused_in_words() -> None:
    fewest = LOAD.fewest_slots
    with pytest.raises(SettingsError) as refused:
        num_slots(LAYOUT, LOAD, (fewest - 1) * SLOT_BYTES / 2**30, is_host=True)
    words = str(refused.value)
    assert f"{fewest - 1} slots" in words and f"{fewest} slots" in words and "staging_gib" in words


def test_memory_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(SettingsError, match="CUDA out of memory"):
        make_slab(LAYOUT, MemoryPath.DEVICE, LOAD, Settings())


@pytest.mark.parametrize("sizes", [(16, 64), (16, 128), (16, 48), (48, 64), (64, 32)])
@pytest.mark.parametrize("factors", [(16, 16), (16, 1), (3, 1), (1, 4)])
def test_the_fewest_slots_hold_a_range_that_ends_where_blocks_of_all_groups_end(
    sizes: tuple[int, int], factors: tuple[int, int]
) -> None:
    """Also those of a peer, whose blocks may be larger, up to 256 tokens in the group with the smallest ones."""
    load = SlabLoad(1, 1, sizes)
    theirs = [size * factor for size, factor in zip(sizes, factors, strict=True)]
    step = math.lcm(*sizes, *theirs)
    if step * min(sizes) > 256 * math.lcm(*sizes):
        return
    slots = Slots(load.fewest_slots, num_kept(load.fewest_slots))
    needed = sum(-(-step // size) for size in sizes)
    assert needed <= num_kept(load.fewest_slots) <= slots.most(Use.SENDING)


@pytest.mark.parametrize("block_size", [1, 16, 100, 256, 1000])
def test_what_moves_always_has_room_for_a_block_of_either_side(block_size: int) -> None:
    load = SlabLoad(1, 1, (block_size,) * 3)
    slots = Slots(load.fewest_slots, num_kept(load.fewest_slots))
    slots.take(10**6, Use.PARKED)
    for use in (Use.SENDING, Use.RECEIVING):
        assert slots.available(use) * block_size >= 3 * max(block_size, LARGEST_BLOCK_TOKENS)
