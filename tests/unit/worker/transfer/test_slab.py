# SPDX-License-Identifier: Apache-2.0
"""A slot has the same bytes as its block, and nothing else is touched; who gets slots, and which are kept."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.digest_fakes import cell_at
from support.kvcached_memory import Geometry, geometries
from support.worker_fakes import HeldCopies, staging_over
from torch.utils._python_dispatch import TorchDispatchMode

from kvcached_nixl.ids import KernelBlock
from kvcached_nixl.wire.messages import KernelBlockRange
from kvcached_nixl.wire.planes import GroupMemory, HeadShare
from kvcached_nixl.worker.geometry.layout import Layout, group_memory
from kvcached_nixl.worker.transfer.slab import Slab, Slots, Use
from kvcached_nixl.worker.transfer.staging import Held, Staging, StagingWindow

CPU = torch.device("cpu")


def allocate(geometry: Geometry) -> tuple[Layout, list[torch.Tensor], tuple[GroupMemory, ...]]:
    caches, memory = geometry.allocate()
    for number, pool in enumerate(memory):
        pool.view(torch.uint8).copy_(torch.arange(pool.nbytes).remainder(251 - number))
    layout = geometry.layout(caches)
    groups = tuple(group_memory(layout, layers, 1, lambda _: HeadShare(0)) for layers in geometry.layers_of_groups())
    return layout, memory, groups


def cells(groups: tuple[GroupMemory, ...], block: int) -> list[bytes]:
    """Every cell of a block, in an order that both sides of a transfer have."""
    return [
        ctypes.string_at(cell_at(planes, base, block, token, head), planes.cell_bytes)
        for group in groups
        for planes in group.planes
        for base in planes.bases
        for token in range(planes.block_size)
        for head in range(planes.num_heads)
    ]


@settings(max_examples=60, deadline=None)
@given(geometries(num_blocks=st.integers(3, 6)), st.data())
def test_what_is_gathered_is_described_by_the_planes_and_comes_back(geometry: Geometry, data: st.DataObject) -> None:
    layout, memory, groups = allocate(geometry)
    slab = Slab(layout, data.draw(st.integers(2, 7)), CPU)
    count = data.draw(st.integers(1, min(slab.num_slots, geometry.num_blocks)))
    blocks = data.draw(st.permutations(range(geometry.num_blocks)))[:count]
    slots = data.draw(st.permutations(range(slab.num_slots)))[:count]
    staged = slab.groups(groups)
    assert {one.num_blocks for group in staged for one in group.planes} == {slab.num_slots}

    expected = {block: cells(groups, block) for block in range(geometry.num_blocks)}
    slab.gather(blocks, slots)
    for block, slot in zip(blocks, slots, strict=True):
        assert cells(staged, slot) == expected[block]

    to = data.draw(st.permutations(range(geometry.num_blocks)))[:count]
    before = [pool.clone() for pool in memory]
    slab.scatter(slots, to)
    for slot, block in zip(slots, to, strict=True):
        assert cells(groups, block) == cells(staged, slot)
    for block in set(range(geometry.num_blocks)) - set(to):
        assert cells(groups, block) == expected[block]
    # Nothing beyond what vLLM planned, either.
    slab.gather(blocks, slots)
    slab.scatter(slots, blocks)
    for pool, old in zip(memory, before, strict=True):
        changed = (pool != old).reshape(-1).nonzero()
        assert len(changed) <= count * geometry.block_bytes_of_all_layers() // pool.element_size()


def test_its_extent_holds_every_slot_and_no_address_of_the_cache() -> None:
    geometry = Geometry()
    layout, memory, groups = allocate(geometry)
    slab = Slab(layout, 5, CPU)
    begin, length = slab.extent
    assert begin % 4096 == 0 and length == Slab.bytes_for(layout, 5)
    for one in [one for group in slab.groups(groups) for one in group.planes]:
        for base in one.bases:
            last = base + (one.num_blocks - 1) * one.block_stride_bytes + one.block_stride_bytes
            assert begin <= base and last <= begin + length
    for pool in memory:
        assert pool.data_ptr() + pool.nbytes <= begin or begin + length <= pool.data_ptr()


def test_what_was_never_written_is_zero() -> None:
    """It is copied with a slot's last token, and what lies behind that must be finite for vLLM's kernels."""
    torch.use_deterministic_algorithms(True)  # Fills what `torch.empty` returns.
    try:
        slab = Slab(allocate(Geometry())[0], 4, CPU)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(area.any() for _, area in slab.areas)


def test_blocks_and_slots_are_one_for_one() -> None:
    layout, _, _ = allocate(Geometry())
    slab = Slab(layout, 4, CPU)
    with pytest.raises(ValueError, match="2 blocks and 1 of the slab"):
        slab.gather([0, 1], [0])
    slab.gather([], [])


class Launched(TorchDispatchMode):
    """Names the operations that move bytes; on an accelerator each is a launch. Views are none."""

    VIEWS = ("aten::slice", "aten::view", "aten::alias", "aten::detach")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.name().startswith(self.VIEWS):
            self.names.append(func.name().partition("::")[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_range_is_one_launch_for_each_region_and_allocates_nothing_there(contiguous: bool) -> None:
    """However long it is, if its slots are consecutive. Block ids are made on the host, and copied to their place."""
    geometry = Geometry(num_pools=2, contiguous=contiguous, head_size=4, num_blocks=700, reserved_blocks=700)
    layout, _, _ = allocate(geometry)
    slab = Slab(layout, 700, CPU)
    assert (len(layout.regions) == 1) is contiguous
    blocks, slots = list(range(0, 1200, 2))[:600], list(range(50, 650))
    blocks = [block % 700 for block in blocks]
    for copy, launch in (
        (lambda: slab.gather(blocks, slots), "index_select.out"),
        (lambda: slab.scatter(slots, blocks), "index_copy_"),
    ):
        with Launched() as found:
            copy()
        assert found.names[-len(layout.regions) :] == [launch] * len(layout.regions)
        assert set(found.names[: -len(layout.regions)]) <= {"copy_", "lift_fresh", "_to_copy"}


class SleepingPool:
    """vLLM's allocator for sleep mode over `torch.cuda.use_mem_pool`: it has what the thread that entered it allocates.

    ``/sleep`` unmaps all of it, and ``/wake_up`` maps other pages there, which are poisoned here.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._entered = threading.local()
        self.memory: list[torch.Tensor] = []
        empty = torch.empty

        def made(*shape: Any, **options: Any) -> torch.Tensor:
            found = empty(*shape, **options)
            if getattr(self._entered, "is_on", False) and found.nbytes:
                self.memory.append(found)
            return found

        patch.setattr(torch, "empty", made)

    @contextmanager
    def use(self) -> Iterator[None]:
        self._entered.is_on = True
        yield
        self._entered.is_on = False

    def sleep_and_wake_up(self) -> None:
        for one in self.memory:
            one.fill_(0xEE)


def test_a_slab_outlives_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker registers KV caches inside the pool that a sleep unmaps."""
    layout, _, _ = allocate(Geometry(num_pools=2))
    pool = SleepingPool(monkeypatch)
    with pool.use():
        torch.empty(8, dtype=torch.uint8)
        slab = Slab(layout, 3, CPU)
    assert len(pool.memory) == 1, "only what a thread in the pool allocates is the pool's"
    slab.gather([0, 1, 2], [0, 1, 2])
    before = ctypes.string_at(*slab.extent)
    pool.sleep_and_wake_up()
    assert ctypes.string_at(*slab.extent) == before


# ------------------------------------------------------------------------------------------------------- who gets slots


def test_what_waits_leaves_room_for_what_moves() -> None:
    slots = Slots(10, 2)
    parked = slots.take(10, Use.PARKED)
    assert len(parked) == 6 and slots.take(1, Use.PARKED) == []
    sending = slots.take(10, Use.SENDING)
    assert len(sending) == 2 and slots.take(1, Use.SENDING) == []
    assert len(slots.take(10, Use.RECEIVING)) == 2
    slots.give_back(sending, Use.SENDING)
    assert slots.available(Use.PARKED) == slots.available(Use.RECEIVING) == 0
    slots.give_back(parked, Use.PARKED)
    assert slots.available(Use.RECEIVING) == 6 and slots.available(Use.SENDING) == 8


def test_what_is_free_cannot_be_given_back() -> None:
    slots = Slots(10, 2)
    taken = slots.take(4, Use.PARKED)
    slots.give_back(taken[1:3], Use.PARKED)
    for wrong in ([1], [0, 1], [9], [3, 4], [10]):
        with pytest.raises(ValueError, match="given back"):
            slots.give_back(wrong, Use.PARKED)


@pytest.mark.parametrize(("count", "kept"), [(0, 0), (4, 0), (3, 2), (0, 1)])
def test_a_slab_that_could_lock_up_is_none(count: int, kept: int) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        Slots(count, kept)


@given(st.data())
def test_no_slot_is_ever_two_peoples(data: st.DataObject) -> None:
    """Whatever is taken and given back, in whatever parts: counts are right, and free slots are joined again."""
    count = data.draw(st.integers(4, 40))
    kept = data.draw(st.integers(1, count // 4))
    slots = Slots(count, kept)
    held: list[tuple[Use, list[int]]] = []
    for _ in range(data.draw(st.integers(0, 30))):
        if held and data.draw(st.booleans()):
            use, mine = held.pop(data.draw(st.integers(0, len(held) - 1)))
            cut = data.draw(st.integers(0, len(mine)))
            slots.give_back(mine[:cut], use)
            if mine[cut:]:
                held.append((use, mine[cut:]))
        else:
            use = data.draw(st.sampled_from(Use))
            wanted, available = data.draw(st.integers(0, count)), slots.available(use)
            mine = slots.take(wanted, use)
            assert len(mine) == min(wanted, available)
            if mine:
                held.append((use, mine))
        everything = [slot for _, mine in held for slot in mine]
        assert len(set(everything)) == len(everything) and set(everything) <= set(range(count))
        for use in Use:
            assert slots.used(use) == sum(len(mine) for other, mine in held if other is use)
        # What keeps two engines from locking up.
        spared = sum(max(0, kept - slots.used(use)) for use in (Use.SENDING, Use.RECEIVING))
        assert count - len(everything) >= spared
    for use, mine in held:
        slots.give_back(mine, use)
    assert slots.take(count, Use.SENDING) == list(range(count - kept))


@pytest.fixture
def staging() -> Staging:
    """72 slots, 64 of them for received KV, or for what is sent."""
    return staging_over(Slots(72, 8), HeldCopies(), (16,))


def take(staging: Staging, use: Use, owner: str) -> list[Held]:
    """Takes as many slots as one engine may write into, or be sent."""
    found = []
    while (held := staging.take(use, [0], 0, 16 * 1000, 16, owner=owner)) is not None:
        found.append(held)
    return found


@pytest.mark.parametrize("use", [Use.RECEIVING, Use.SENDING])
def test_those_that_are_not_heard_of_leave_something_for_the_next_one(staging: Staging, use: Use) -> None:
    """Engines that have vanished keep slots, but each gets only a part of what is left, so some always remain."""
    taken = []
    for number in range(12):
        mine = take(staging, use, f"engine {number}")
        assert mine, f"nothing is left after {number} engines have vanished"
        for held in mine:
            staging.mark_stuck(held)
            staging.mark_stuck(held)
        taken += mine
    assert len(take(staging, use, "one that lives")) > 0
    for held in taken:
        staging.give_back(held)
    assert not any(held.is_stuck for held in taken)
    assert [len(held.slots) for held in take(staging, use, "another")] == [64 // 8, 64 // 8]


def test_what_a_peer_writes_leaves_it_what_it_is_sent(staging: Staging) -> None:
    """Else two engines that send each other KV could each wait for the slots that only the other one frees."""
    counts = [sum(len(held.slots) for held in take(staging, use, "one")) for use in (Use.RECEIVING, Use.SENDING)]
    assert counts == [64 // 4, 64 // 4]


def window(staging: Staging, num_writers: int = 1) -> tuple[StagingWindow, list[Held]]:
    """A window of 16 tokens in blocks of 4, that so many ranks of prefill write."""
    blocks = KernelBlockRange(0, tuple(map(KernelBlock, (9, 8, 7, 6))))
    made, granted = StagingWindow(staging, [blocks], 16, 4, num_writers, "remote"), list[Held]()
    for rank in range(num_writers):
        made.join(rank, granted.append, lambda failed: None)
    return made, granted


def test_slots_that_cannot_be_granted_when_they_are_free_cost_this_hand_over_only() -> None:
    """The thread's turn goes on, and the next one in the queue gets its slots."""
    staging = staging_over(Slots(16, 4), HeldCopies(), (4,))
    others = staging.take(Use.RECEIVING, [0], 0, 1000, 4, is_whole=False)
    taken = [others]
    while (others := staging.take(Use.RECEIVING, [0], 0, 1000, 4)) is not None:
        taken.append(others)
    failed: list[str] = []

    def give(_: Held) -> None:
        raise ValueError("planted")

    made = StagingWindow(staging, [KernelBlockRange(0, tuple(map(KernelBlock, (9, 8))))], 8, 4, 1, "remote")
    made.join(0, give, failed.append)
    made.ready(0, 0, 8)
    next_one, granted = window(staging)
    next_one.ready(0, 0, 4)
    assert failed == granted == []
    for held in taken:
        assert held is not None
        staging.give_back(held)
    staging.turn()
    assert failed == ["no slots were granted: ValueError: planted"]
    assert [(held.first_token, held.end_token) for held in granted] == [(0, 4)]
    made.close(0)
    next_one.close(0)
    assert staging.slots.used(Use.RECEIVING) == 0
