# SPDX-License-Identifier: Apache-2.0
"""Which of many things are due, without looking at the others."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Deadlines"]

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """At most one deadline per key, in seconds of whatever clock the caller asks. Not for several threads.

    A deadline that is moved or dropped leaves its old entry in the heap until that comes up or the heap is rebuilt, so
    each operation costs the logarithm of what is held.
    """

    def __init__(self) -> None:
        self._at_seconds: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._at_seconds)

    def __contains__(self, key: K) -> bool:
        return key in self._at_seconds

    def get(self, key: K) -> float | None:
        """When ``key`` is due; None if it is not."""
        return self._at_seconds.get(key)

    def set(self, key: K, at_seconds: float) -> None:
        """``key`` is due at that time and at no other."""
        self._at_seconds[key] = at_seconds
        self._push(at_seconds, key)
        if len(self._heap) > 2 * len(self._at_seconds) + 16:
            self._heap = []
            for live, live_at_seconds in self._at_seconds.items():
                self._push(live_at_seconds, live)

    def discard(self, key: K) -> None:
        """``key`` is not due any more, if it was."""
        self._at_seconds.pop(key, None)

    def take_due(self, now_seconds: float) -> list[K]:
        """Those due at ``now_seconds`` or before, earliest first; they are dropped."""
        due: list[K] = []
        while (first := self.first_seconds) is not None and first <= now_seconds:
            key = heapq.heappop(self._heap)[2]
            del self._at_seconds[key]
            due.append(key)
        return due

    @property
    def first_seconds(self) -> float | None:
        """When the next one is due."""
        while self._heap and self._at_seconds.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _push(self, at_seconds: float, key: K) -> None:
        # The number keeps keys that are due at once in order, and keeps them from being compared.
        self._pushed += 1
        heapq.heappush(self._heap, (at_seconds, self._pushed, key))
