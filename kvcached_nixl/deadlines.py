# SPDX-License-Identifier: Apache-2.0
"""Which of many things are due, without looking at the others."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from typing import TypeVar

__all__ = ["Deadlines"]

K = TypeVar("K", bound=Hashable)


class Deadlines(MutableMapping[K, float]):
    """Key -> when it is due, in seconds of whatever clock the caller asks; earliest first. Not for several threads.

    A deadline that is moved or dropped leaves its old entry in the heap until that comes up or the heap is rebuilt, so
    each operation, and the first step of an iteration, costs the logarithm of what is held; moving most of them at once
    costs no more than what is held.
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
        """``key`` is due at that time and at no other."""
        self.move({key: at_seconds})

    def move(self, at_seconds: Mapping[K, float]) -> None:
        """Each of these keys is due at its time and at no other."""
        self._at_seconds.update(at_seconds)
        if len(self._heap) + len(at_seconds) > 2 * len(self._at_seconds) + 16:
            self._heap = [(at, place, key) for place, (key, at) in enumerate(self._at_seconds.items())]
            self._pushed = len(self._heap)
            heapq.heapify(self._heap)
            return
        for key, at in at_seconds.items():
            # The number keeps keys that are due at once in order, and keeps them from being compared.
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
        """Those due at ``now_seconds`` or before, earliest first; they are dropped."""
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
        """When the next one is due."""
        while self._heap and self._at_seconds.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
