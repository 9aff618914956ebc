# SPDX-License-Identifier: Apache-2.0
"""worker/transfer/staging.py: how much of a slab one peer, and silent peers together, may have."""

from __future__ import annotations

import pytest
from support.worker_fakes import HeldCopies, staging_over

from kvcached_nixl.ids import KernelBlock
from kvcached_nixl.worker.geometry.descriptors import KernelBlocks
from kvcached_nixl.worker.transfer.slab import SlabUse, Slots, Use
from kvcached_nixl.worker.transfer.staging import Held, Staging


@pytest.fixture
def staging() -> Staging:
    """72 slots, 64 of them for received KV."""
    return staging_over(Slots(72, 8), HeldCopies(), (16,))


def take(staging: Staging, owner: str) -> list[Held]:
    """Takes as many slots as one engine may write into."""
    found = []
    while (held := staging.take(Use.RECEIVING, [0], 0, 16 * 1000, 16, owner=owner)) is not None:
        found.append(held)
    return found


def test_those_that_are_not_heard_of_leave_something_for_the_next_one(staging: Staging) -> None:
    """Engines that have vanished keep slots, but each gets only a part of what is left, so some always remain."""
    taken = []
    for number in range(12):
        mine = take(staging, f"engine {number}")
        assert mine, f"nothing is left after {number} engines have vanished"
        for held in mine:
            staging.mark_stuck(held)
            staging.mark_stuck(held)
        taken += mine
    assert len(take(staging, "one that lives")) > 0
    for held in taken:
        staging.give_back(held)
    assert not any(held.is_stuck for held in taken)
    assert sum(len(held.slots) for held in take(staging, "another")) == 64 // 4


def test_one_that_is_heard_of_has_a_quarter(staging: Staging) -> None:
    assert [sum(len(held.slots) for held in take(staging, name)) for name in "abcd"] == [16] * 4
    assert take(staging, "e") == []


def test_groups_with_blocks_of_other_sizes_get_slots_for_the_same_tokens() -> None:
    """Gemma 4: a slot holds 64 tokens of one group, and 32 of the other."""
    copies = HeldCopies()
    staging = staging_over(Slots(72, 8), copies, (64, 32))
    held = staging.take(Use.RECEIVING, [128, 0], 64, 256, 64)
    assert held is not None and (held.first_token, held.end_token) == (64, 256)
    assert [(group.first_token, len(group.block_ids)) for group in held.groups] == [(128, 2), (64, 6)]
    assert len(set(held.slots)) == 8
    blocks_of_groups = [KernelBlocks(list(map(KernelBlock, one))) for one in (range(10, 14), range(20, 28))]
    staging.gather(held, blocks_of_groups, 192, lambda failed: None)
    assert copies.blocks == [[12, 22, 23, 24, 25]]
    assert copies.slots == [[held.groups[0].block_ids[0], *held.groups[1].block_ids[:4]]]


def test_a_slot_has_room_for_several_kernel_blocks_beside_states() -> None:
    """Attention has four in a slot, whichever tokens they are of; a state has a slot, and is copied as four."""
    copies = HeldCopies()
    staging = staging_over(Slots(72, 8), copies, (4, 1), (4, 1))
    held = staging.take(Use.RECEIVING, [8, 29], 8, 30, 4)
    assert held is not None and held.end_token == 30 and len(held.slots) == 2 + 1
    attention, state = held.groups
    assert (attention.first_token, state.first_token) == (8, 29)
    assert list(attention.block_ids) == [slot * 4 + place for slot in held.slots[:2] for place in range(4)][:6]
    assert list(state.block_ids) == held.slots[2:]
    blocks = [KernelBlocks(list(map(KernelBlock, range(50, 58)))), KernelBlocks([KernelBlock(9)], 29)]
    staging.scatter(held, blocks, lambda failed: None)
    assert copies.blocks == [[*range(52, 58), 36, 37, 38, 39]]
    assert copies.slots == [[*attention.block_ids, *(held.slots[2] * 4 + place for place in range(4))]]
    assert staging.take(Use.RECEIVING, [0, 0], 30, 4 * 4 * 64, 4) is not None
    staging.give_back(held)
    assert staging.slots.used(Use.RECEIVING) > 0


def test_a_slabs_use_says_what_is_taken_for_what_and_who_waits(staging: Staging) -> None:
    """Who asks again while it waits has waited once."""
    assert staging.use == SlabUse(4096, 72, 0, 0, 0, 0) and staging.use.is_idle
    (held, *_) = take(staging, "a")
    assert staging.use.receiving > 0 and not staging.use.is_idle
    for _ in range(2):
        staging.wait(Use.SENDING, "who", lambda: True)
    staging.wait(Use.RECEIVING, "who", lambda: True, owner="a")
    assert (staging.use.waiting, staging.num_waits) == (2, 2)
    staging.give_back(held)
    staging.turn()
    assert (staging.use.waiting, staging.num_waits) == (0, 2)
    staging.wait(Use.SENDING, "who", lambda: True)
    assert staging.num_waits == 3
