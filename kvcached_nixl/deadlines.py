# SPDX-License-Identifier: Apache-2.0
"""A clock that is passed as an argument, so that tests need not wait; and deadlines: which of many are due, without
looking at the others.
"""

from __future__ import annotations

import heapq
import time
from collections import UserDict
from collections.abc import Hashable, Mapping
from typing import TypeVar


class Clock:
    """The monotonic clock that vLLM itself uses for its deadlines. Its origin differs between processes: send remaining
    seconds, never a time.
    """

    def now_seconds(self) -> float:
        return time.perf_counter()


K = TypeVar("K", bound=Hashable)


def earliest(*at_seconds: float | None) -> float | None:
    """Returns the least of some times, of which each may be None; None if all are."""
    return min((one for one in at_seconds if one is not None), default=None)


class Deadlines(UserDict[K, float]):
    """Key -> when it is due, in seconds of the caller's clock. Not thread-safe.

    A deadline that is moved or deleted leaves its old entry in the heap until that is popped or the heap is rebuilt. So
    with n deadlines each operation takes O(log n) time; moving most of them at once takes O(n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._pushed = 0
        super().__init__()

    def __setitem__(self, key: K, at_seconds: float) -> None:
        self.move({key: at_seconds})

    def move(self, at_seconds: Mapping[K, float]) -> None:
        """Sets or moves the deadlines of several keys at once."""
        self.data.update(at_seconds)
        if len(self._heap) + len(at_seconds) > 2 * len(self.data) + 16:
            self._heap = [(at, place, key) for place, (key, at) in enumerate(self.data.items())]
            self._pushed = len(self._heap)
            heapq.heapify(self._heap)
            return
        for key, at in at_seconds.items():
            # The number orders keys with equal deadlines, so that keys are never compared.
            heapq.heappush(self._heap, (at, self._pushed, key))
            self._pushed += 1

    def take_due(self, now_seconds: float, at_most: int | None = None) -> list[K]:
        """Removes and returns the keys that are due at ``now_seconds`` or before, earliest first."""
        due: list[K] = []
        while (
            (at_most is None or len(due) < at_most)
            and (first := self.first_seconds) is not None
            and first <= now_seconds
        ):
            key = heapq.heappop(self._heap)[2]
            del self.data[key]
            due.append(key)
        return due

    @property
    def first_seconds(self) -> float | None:
        """The earliest deadline; None if there is none."""
        while self._heap and self.data.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


STILL_SECONDS = 1.0
"""If a thread that looks several times a second has not looked for so long, its process was stopped."""
HEARD_SECONDS = 2.0
"""After that NIXL's thread, which was stopped, too, has handed over what has arrived meanwhile."""


class HeardDeadlines(Deadlines[K]):
    """Deadlines by which a peer would have said something, looked at several times a second. If this process was
    stopped, what falls due before HEARD_SECONDS have passed is put off until then; once, so that it comes on a slow
    machine, too."""

    def __init__(self, now_seconds: float) -> None:
        super().__init__()
        self._looked_at_seconds = now_seconds
        # Those that were put off, and until when.
        self._put_off: dict[K, float] = {}

    def take_due(self, now_seconds: float, at_most: int | None = None) -> list[K]:
        if now_seconds - self._looked_at_seconds > STILL_SECONDS:
            until = now_seconds + HEARD_SECONDS
            self._put_off = {key: at for key, at in self._put_off.items() if self.data.get(key) == at}
            late = {key: until for key, at in self.data.items() if at < until and key not in self._put_off}
            self._put_off |= late
            self.move(late)
        self._looked_at_seconds = now_seconds
        return super().take_due(now_seconds, at_most)
