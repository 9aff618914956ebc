# SPDX-License-Identifier: Apache-2.0
"""worker/memory_registration.py: planned blocks are registered, and memory that no peer could read is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.kvcached_memory import Geometry

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.settings import MemoryPath, Settings
from kvcached_nixl.worker.geometry.layout import Arrangement, Page
from kvcached_nixl.worker.memory_registration import register

PROBED = {"num_blocks": 1_000_003, "block_size": 4_800, "num_heads": 1_009}


class Stock:
    """vLLM's worker, as ``adapter.nixl_worker.WorkerView`` shows it."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.caches, _ = geometry.allocate()
        self.unserved: Sequence[tuple[str, str]] = ()
        self.num_blocks, self.num_pools = geometry.num_blocks, geometry.num_pools
        self.registered: list[tuple[list[tuple[int, int]], int]] = []
        self.memory_types: list[str | None] = []
        self.load = 1000, 64
        self.kernel_blocks_per_block = 1

    def groups(self) -> list[dict[str, Any]]:
        page = self.geometry.page()
        return [dict.fromkeys(layers, page) for layers in self.geometry.layers_of_groups()]

    def probe_cache_shape(self) -> tuple[tuple[int, ...], dict[str, int]]:
        shape = (PROBED["num_blocks"], 2, PROBED["block_size"], PROBED["num_heads"], 1)
        return shape, PROBED

    def register_memory(
        self, extents: Sequence[tuple[int, int]], device_id: int, memory_type: str | None = None
    ) -> None:
        self.registered.append((list(extents), device_id))
        self.memory_types.append(memory_type)


def test_the_planned_blocks_of_each_region_are_registered_once() -> None:
    """Host memory is device 0, as NIXL counts."""
    stock = Stock(Geometry(num_pools=2, num_blocks=5, reserved_blocks=13))
    layout = register(stock, stock.caches, MemoryPath.DIRECT, Settings()).layout
    assert layout.arrangement is Arrangement.SPLIT_HALF
    ((extents, device_id),) = stock.registered
    assert device_id == 0
    assert extents == [(region.address, 5 * stock.geometry.page_bytes // 2) for region in layout.regions]
    assert len(extents) == 4


@pytest.mark.parametrize(
    "unserved",
    [
        [("--pipeline-parallel-size 2", "--pipeline-parallel-size 1")],
        [("--decode-context-parallel-size 2", "--decode-context-parallel-size 1"), ("another", "other")],
    ],
)
def test_what_no_peer_could_make_sense_of_is_refused_before_anything_is_registered(unserved: Any) -> None:
    """A5: with a sentence of what to do."""
    stock = Stock(Geometry())
    stock.unserved = unserved
    with pytest.raises(LayoutRefused) as refusal:
        register(stock, stock.caches, MemoryPath.DIRECT, Settings())
    found, expected = unserved[0]
    assert (refusal.value.found, refusal.value.expected) == (found, expected)
    assert f"serve with {expected}" in refusal.value.remedy
    assert stock.registered == []


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_slot_has_room_for_a_state_across_kernel_blocks(contiguous: bool) -> None:
    """The slab is as large however many kernel blocks a block is split into."""
    found = []
    for split in (1, 2, 4):
        geometry = Geometry(
            era="packed", contiguous=contiguous, num_pools=2, groups=2, states=(1,), split=split,
            block_size=16 // split, num_blocks=400 * split, reserved_blocks=404 * split,
        )  # fmt: skip
        stock = Stock(geometry)
        attention, states = geometry.layers_of_groups()
        pages = [
            dict.fromkeys(attention, geometry.page()),
            dict.fromkeys(states, Page(split * geometry.page_bytes, 1, 1, 100)),
        ]
        stock.groups = lambda pages=pages: pages  # type: ignore[misc]
        stock.kernel_blocks_per_block = split
        shape = PROBED["num_blocks"], PROBED["num_heads"], PROBED["block_size"], 1
        stock.probe_cache_shape = lambda shape=shape: (shape, PROBED)  # type: ignore[misc]
        assert register(stock, stock.caches, MemoryPath.DIRECT, Settings()).slab is None
        slab = register(stock, stock.caches, MemoryPath.HOST, Settings()).slab
        assert slab is not None and slab.blocks_per_slot == split
        found.append((slab.num_slots, slab.extent[1]))
    assert found == [(4 * (1000 // 16 + 1 + 1), found[0][1])] * 3


def test_memory_that_cannot_be_described_is_not_registered() -> None:
    stock = Stock(Geometry())
    stock.num_blocks = 1000
    with pytest.raises(LayoutRefused, match="at least 1000 blocks"):
        register(stock, stock.caches, MemoryPath.DIRECT, Settings())
    assert stock.registered == []


@pytest.mark.parametrize(("path", "memory_type"), [(MemoryPath.HOST, "DRAM"), (MemoryPath.DEVICE, None)])
def test_of_what_stages_the_slab_is_registered_and_no_byte_of_the_cache(path: MemoryPath, memory_type: Any) -> None:
    stock = Stock(Geometry(num_pools=2, num_blocks=2000, reserved_blocks=2001))
    registered = register(stock, stock.caches, path, Settings())
    assert registered.slab is not None
    (((begin, length),), device_id), *others = stock.registered
    assert (begin, length) == registered.slab.extent and not others
    assert (device_id, stock.memory_types) == (0, [memory_type])
    for cache in stock.caches.values():
        storage = cache.untyped_storage()
        assert begin + length <= storage.data_ptr() or storage.data_ptr() + storage.nbytes() <= begin
