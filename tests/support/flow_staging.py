# SPDX-License-Identifier: Apache-2.0
"""A rank's slab, and a copier that copies when the test says so and checks every slot and block that it touches."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvcached_nixl.worker.background import Work
from kvcached_nixl.worker.transfer.slab import Slots, Use
from kvcached_nixl.worker.transfer.staging import Staging
from support.digest_fakes import Copy, StubSlab
from support.flow_memory import RankMemory

if TYPE_CHECKING:
    from support.flow_engine import Request, Worker


class WatchedSlots(Slots):
    """Slots that number their takings, so that reuse of a slot shows. Free slots are poisoned at once.

    Attributes:
        taken: slot -> the number of the call of `take` that took it; 0 while it is free.
    """

    def __init__(self, count: int, kept: int, slab: RankMemory) -> None:
        super().__init__(count, kept)
        self._slab = slab
        self._takings = 0
        self.taken = [0] * count

    def take(self, wanted: int, use: Use, at_least: int = 1) -> list[int]:
        found = super().take(wanted, use, at_least)
        self._takings += 1
        for slot in found:
            assert not self.taken[slot], "a slot is taken twice"
            self.taken[slot] = self._takings
        return found

    def give_back(self, slots: list[int], use: Use) -> None:
        super().give_back(slots, use)
        for slot in slots:
            assert self.taken[slot], "a slot is given back twice"
            self.taken[slot] = 0
            self._slab.poison(slot)

    def takings(self, slots: set[int]) -> dict[int, int]:
        """Returns the takings of slots that are about to be written or read; none of them may be free."""
        found = {slot: self.taken[slot] for slot in slots}
        assert all(found.values()), "bytes go into a slot that is free, or come from one"
        return found


@dataclass(eq=False)
class _Asked:
    copy: Copy
    takings: dict[int, int]
    requests: set[Request]


@dataclass
class LateCopier:
    """Copies only when the test calls `run`.

    Attributes:
        fails: how many of the next copies fail.
    """

    worker: Worker
    slab: RankMemory
    slots: WatchedSlots
    fails: int = 0
    asked: deque[_Asked] = field(default_factory=deque)
    ended: deque[tuple[Copy, str]] = field(default_factory=deque)

    def close(self) -> None:
        """There is no thread to stop."""

    def submit(self, work: Work[None]) -> None:
        copy = Copy.of(work)
        asked = _Asked(copy, self.slots.takings(set(copy.staged)), self._holders(copy))
        assert asked.requests, "a copy touches blocks that are not one request's"
        self._watch(asked)
        self.asked.append(asked)

    def turn(self) -> None:
        while self.ended:
            copy, failed = self.ended.popleft()
            copy.ended(failed)

    def run(self) -> None:
        """Does the oldest copy."""
        asked = self.asked.popleft()
        copy, failed = asked.copy, "a copy failed" if self.fails else ""
        self._watch(asked)
        assert self.slots.takings(set(copy.staged)) == asked.takings, "a copy touches a slot of somebody else"
        if failed:
            self.fails -= 1
        else:
            here, there = self.worker.memory.cells, self.slab.cells
            blocks, slots = np.asarray(copy.blocks), np.asarray(copy.staged)
            if copy.is_gather:
                there[:, slots] = here[:, blocks]
            else:
                here[:, blocks] = there[:, slots]
        self.ended.append((copy, failed))

    def _holders(self, copy: Copy) -> set[Request]:
        holders = self.worker.engine.pool.holders
        return set.intersection(*(set(holders[block]) for block in self._blocks(copy)))

    def _watch(self, asked: _Asked) -> None:
        if asked.copy.is_gather:
            assert asked.requests & self._holders(asked.copy), "a copy reads blocks that were given away"
        else:
            self.worker.engine.cluster.allow(self.worker, self._blocks(asked.copy), asked.requests)

    def _blocks(self, copy: Copy) -> set[int]:
        return {block // self.worker.memory.shape.ratio for block in copy.blocks}


def slab_of(worker: Worker, num_slots: int, kept: int) -> tuple[Staging, LateCopier]:
    """Returns the staging and the copier of a worker, over a new slab. ``kept``: see `Slots`."""
    shape = worker.memory.shape
    one = dataclasses.replace(shape, block_size=worker.memory.tokens, ratio=1, num_blocks=num_slots)
    slab = RankMemory(one, worker.tp_rank, worker.pp_rank)
    slots = WatchedSlots(num_slots, kept, slab)
    copier = LateCopier(worker, slab, slots)
    return Staging(slots, StubSlab(), copier, (worker.memory.tokens,)), copier  # type: ignore[arg-type]
