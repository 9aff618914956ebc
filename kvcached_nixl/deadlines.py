# SPDX-License-Identifier: Apache-2.0
"""A clock that is passed as an argument, so that tests need not wait; and deadlines: which of many are due, without
looking at the others.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Hashable, Iterator, Mapping, MutableMapping
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


class Deadlines(MutableMapping[K, float]):
    """Key -> when it is due, in seconds of the caller's clock. Iterates earliest first. Not thread-safe.

    A deadline that is moved or deleted leaves its old entry in the heap until that is popped or the heap is rebuilt. So
    with n deadlines each operation, and the first step of an iteration, takes O(log n) time; moving most of them at
    once takes O(n).
    """

    def __init__(self) -> None:
        self._at_seconds: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._at_seconds)

    def __contains__(self, key: object) -> bool:
        return key in self._at_seconds

    def __getitem__(self, key: K) -> float:
        return self._at_seconds[key]

    def __setitem__(self, key: K, at_seconds: float) -> None:
        """Sets or moves the deadline of ``key``."""
        self.move({key: at_seconds})

    def move(self, at_seconds: Mapping[K, float]) -> None:
        """Sets or moves the deadlines of several keys at once."""
        self._at_seconds.update(at_seconds)
        if len(self._heap) + len(at_seconds) > 2 * len(self._at_seconds) + 16:
            self._heap = [(at, place, key) for place, (key, at) in enumerate(self._at_seconds.items())]
            self._pushed = len(self._heap)
            heapq.heapify(self._heap)
            return
        for key, at in at_seconds.items():
            # The number orders keys with equal deadlines, so that keys are never compared.
            heapq.heappush(self._heap, (at, self._pushed, key))
            self._pushed += 1

    def __delitem__(self, key: K) -> None:
        del self._at_seconds[key]

    def __iter__(self) -> Iterator[K]:
        if self.first_seconds is not None:
            first = self._heap[0][2]
            yield first
            yield from (key for key in sorted(self._at_seconds, key=self._at_seconds.__getitem__) if key != first)

    def take_due(self, now_seconds: float, at_most: int | None = None) -> list[K]:
        """Removes and returns the keys that are due at ``now_seconds`` or before, earliest first."""
        due: list[K] = []
        while (
            (at_most is None or len(due) < at_most)
            and (first := self.first_seconds) is not None
            and first <= now_seconds
        ):
            key = heapq.heappop(self._heap)[2]
            del self._at_seconds[key]
            due.append(key)
        return due

    @property
    def first_seconds(self) -> float | None:
        """The earliest deadline; None if there is none."""
        while self._heap and self._at_seconds.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
