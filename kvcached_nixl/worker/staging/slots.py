# SPDX-License-Identifier: Apache-2.0
"""Allocates the slots of a slab. Once per worker, on the transfer thread.

Two engines that wait for each other must never deadlock, so KV that waits for a peer can never take the last slots from
KV that is moving:

    PARKED      holds KV that decode has not asked for yet; for as long as a lease lasts
    SENDING     holds KV that is now written to a peer, or read by it; for as long as that lasts
    RECEIVING   receives KV that a peer has ready, by its WRITE or this rank's READ; for as long as that lasts

A share of the slots is kept for each of the last two. SENDING may wait for a peer's RECEIVING. RECEIVING waits for no
peer: its slots are taken only when the source is ready.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from typing import NamedTuple

__all__ = ["SlabUse", "Slots", "Use"]


class Use(Enum):
    """What slots are taken for."""

    PARKED = "parked"
    SENDING = "sending"
    RECEIVING = "receiver"


class SlabUse(NamedTuple):
    """A slab's bytes and slots, how many of them are taken for each `Use`, and how many hand-overs wait for some."""

    num_bytes: int
    num_slots: int
    parked: int
    sending: int
    receiving: int
    waiting: int

    @property
    def is_idle(self) -> bool:
        return not (self.parked or self.sending or self.receiving or self.waiting)


class Slots:
    """See the module.

    Args:
        count: slots of the slab, numbered from 0.
        kept: slots kept for SENDING, and as many for RECEIVING; PARKED never gets them.

    Raises:
        ValueError: there are fewer slots than are kept, or none are kept.
    """

    def __init__(self, count: int, kept: int) -> None:
        if not 0 < 2 * kept <= count:
            raise ValueError(f"found {count} slots; expected at least {2 * kept}, and {kept} to be above 0")
        self.count = count
        self._kept = kept
        self._free: list[tuple[int, int]] = [(0, count)]
        self._used = dict.fromkeys(Use, 0)

    def used(self, use: Use) -> int:
        """Number of slots taken for a use."""
        return self._used[use]

    def most(self, use: Use) -> int:
        """Most slots that may be taken for a use, when none are taken."""
        return self.count - self._kept * sum(other is not use for other in (Use.SENDING, Use.RECEIVING))

    def available(self, use: Use) -> int:
        """Number of slots that may be taken for a use now."""
        free = self.count - sum(self._used.values())
        spared = sum(self._spared(other) for other in (Use.SENDING, Use.RECEIVING) if other is not use)
        return max(0, free - spared)

    def take(self, wanted: int, use: Use, at_least: int = 1) -> list[int]:
        """Take up to ``wanted`` slots, consecutive ones if possible; none if fewer than ``at_least`` are available."""
        number = min(wanted, self.available(use))
        if number < max(1, at_least):
            return []
        self._used[use] += number
        found: list[int] = []
        while len(found) < number:
            missing = number - len(found)
            place = next((i for i, (_, length) in enumerate(self._free) if length >= missing), None)
            if place is None:
                place = max(range(len(self._free)), key=lambda i: self._free[i][1])
            begin, length = self._free[place]
            taken = min(length, missing)
            found.extend(range(begin, begin + taken))
            if taken == length:
                del self._free[place]
            else:
                self._free[place] = (begin + taken, length - taken)
        return found

    def give_back(self, slots: list[int], use: Use) -> None:
        """Free slots that no copy or transfer touches any more."""
        for begin, length in _runs(slots):
            self._free_run(begin, length)
        self._used[use] -= len(slots)

    def _spared(self, use: Use) -> int:
        return max(0, self._kept - self._used[use])

    def _free_run(self, begin: int, length: int) -> None:
        place = bisect_left(self._free, (begin, 0))
        after = self._free[place] if place < len(self._free) else (self.count, 0)
        before = self._free[place - 1] if place else (0, 0)
        if begin < before[0] + before[1] or begin + length > after[0] or begin + length > self.count:
            raise ValueError(f"found the slots {begin} to {begin + length - 1} given back, some of which were free")
        if place < len(self._free) and after[0] == begin + length:
            length += after[1]
            del self._free[place]
        if place and before[0] + before[1] == begin:
            begin, length = before[0], before[1] + length
            place -= 1
            del self._free[place]
        self._free.insert(place, (begin, length))


def _runs(slots: list[int]) -> list[tuple[int, int]]:
    """Returns (begin, length) of each run of consecutive slots."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if runs and sum(runs[-1]) == slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return runs
