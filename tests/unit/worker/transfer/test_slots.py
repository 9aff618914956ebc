# SPDX-License-Identifier: Apache-2.0
"""No slot is taken twice, slots are adjacent where possible, and the last ones are reserved for transfers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_nixl.worker.transfer.slab import Slots, Use


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
