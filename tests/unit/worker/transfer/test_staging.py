# SPDX-License-Identifier: Apache-2.0
"""worker/transfer/staging.py: how much of a slab one peer, and silent peers together, may have."""

from __future__ import annotations

import pytest
from support.worker_fakes import HeldCopies, staging_over

from kvcached_nixl.worker.transfer.slab import Slots, Use
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
