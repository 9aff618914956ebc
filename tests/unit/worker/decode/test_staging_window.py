# SPDX-License-Identifier: Apache-2.0
"""Slots are granted for tokens that are ready on every rank of prefill, and for no others."""

from __future__ import annotations

from support.worker_fakes import HeldCopies, staging_over

from kvcached_nixl.ids import KernelBlock
from kvcached_nixl.wire.messages import KernelBlockRange
from kvcached_nixl.worker.transfer.slab import Slots, Use
from kvcached_nixl.worker.transfer.staging import Held, Staging, StagingWindow


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
