# SPDX-License-Identifier: Apache-2.0
"""Who gets slots: none is taken twice, the last ones are kept for transfers, and one peer has only a part of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.worker_fakes import HeldCopies, staging_over

from kvcached_nixl.ids import KernelBlock
from kvcached_nixl.wire.messages import KernelBlockRange
from kvcached_nixl.worker.transfer.slab import Slots, Use
from kvcached_nixl.worker.transfer.staging import Held, Staging, StagingWindow


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
