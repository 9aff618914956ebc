# SPDX-License-Identifier: Apache-2.0
"""worker/memory_registration.py: kvcached's planned blocks are registered where that is proved, elsewhere a slab with
room for the engine's load. Memory that no peer could read is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.kvcached_memory import Geometry
from unit.worker.transfer.test_slab import allocate

from kvcached_nixl.errors import LayoutRefused, MemoryRefused, SettingsError, Unproved
from kvcached_nixl.proof.result import LaneFound, Proof, Question, Rates
from kvcached_nixl.settings import SERVER_LOGGER, MemoryPath, Settings
from kvcached_nixl.worker.geometry.layout import Arrangement, Page
from kvcached_nixl.worker.memory_registration import SlabLoad, choose, make_slab, num_kept, num_slots, register
from kvcached_nixl.worker.transfer.slab import Slots, Use

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


# ------------------------------------------------------------------------------------------------------ the memory path

AUTO, DIRECT, HOST, DEVICE = MemoryPath
FAST, SLOW = Rates(8e9, 8e9, 1e6), Rates(1e7, 1e7, 1e3)
GOOD = LaneFound("tcp", "tcp", rates={"elastic": FAST, "ordinary": FAST})
COPIES = LaneFound("cuda_ipc", "all", rates={"elastic": SLOW, "ordinary": FAST})
WRONG = LaneFound("cma", "cma,tcp", wrong=("mapped again (a peer READ)",), rates=GOOD.rates)
UNKNOWN = LaneFound("rc_mlx5", "rc_mlx5,tcp", unusable="no endpoint")
UNUSED = LaneFound("posix", "posix", never="it does not notice the end of a peer")


def proof(*lanes: LaneFound, device: str = "cuda") -> Proof:
    return Proof(Question(device, 0, "DRAM", ("UCX",)), {}, lanes, None, 1.0)


@pytest.mark.parametrize("wish", [AUTO, DIRECT])
def test_what_follows_is_registered(wish: MemoryPath) -> None:
    assert choose(wish, lambda: proof(GOOD, UNUSED)) is DIRECT


@pytest.mark.parametrize("lane", [WRONG, UNKNOWN, COPIES], ids=["wrong", "not known", "slow"])
@pytest.mark.parametrize(("device", "path"), [("cpu", HOST), ("cuda", DEVICE)])
def test_what_does_not_is_staged_and_said(
    caplog: pytest.LogCaptureFixture, lane: LaneFound, device: str, path: MemoryPath
) -> None:
    with caplog.at_level("WARNING", SERVER_LOGGER):
        assert choose(AUTO, lambda: proof(GOOD, lane, device=device)) is path
    assert lane.name in caplog.text and path.value in caplog.text


def test_kvcacheds_pages_are_not_registered_against_the_proof() -> None:
    with pytest.raises(MemoryRefused) as refused:
        choose(DIRECT, lambda: proof(GOOD, WRONG, UNKNOWN))
    words = str(refused.value)
    assert all(one in words for one in ("direct", "cma", "a peer READ", "rc_mlx5", "no endpoint", "UCX_TLS=tcp "))


def test_what_is_slow_is_said_where_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", SERVER_LOGGER):
        assert choose(DIRECT, lambda: proof(COPIES)) is DIRECT
    assert "cuda_ipc" in caplog.text and "0.01 GB/s" in caplog.text


UNPROVED = Unproved(found="no proof: timed out", expected="one", consequence="The engine stops.", remedy="Ask again.")


def unproved() -> Proof:
    raise UNPROVED


@pytest.mark.parametrize("staged", [HOST, DEVICE])
def test_a_prover_that_cannot_tell_has_kv_staged(caplog: pytest.LogCaptureFixture, staged: MemoryPath) -> None:
    """A slab needs no proof; why there is one is said."""
    with caplog.at_level("WARNING", SERVER_LOGGER):
        assert choose(AUTO, unproved, staged) is staged
    assert "no proof: timed out" in caplog.text and f"memory_path {staged.value}" in caplog.text


def test_a_prover_that_cannot_tell_ends_a_start_with_kvcacheds_pages() -> None:
    with pytest.raises(Unproved, match="timed out"):
        choose(DIRECT, unproved)


@pytest.mark.parametrize("wish", [HOST, DEVICE])
def test_a_slab_that_is_asked_for_needs_no_proof(wish: MemoryPath) -> None:
    def prove() -> Proof:
        raise AssertionError("nothing has to be known of kvcached's pages")

    assert choose(wish, prove) is wish
    with pytest.raises(AssertionError):
        choose(AUTO, prove)


# ------------------------------------------------------------------------------------------------------ slots of a slab

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
