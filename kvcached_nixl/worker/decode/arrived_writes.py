# SPDX-License-Identifier: Apache-2.0
"""Decode: which WRITEs of one rank of prefill have arrived, by their numbers.

A rank numbers its WRITEs from 0, and the last one says that it is the last. Notifications may overtake each other, so a
WRITE counts only when all before it have arrived. Owned by the transfer thread; one per part of an attempt.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcached_nixl.wire.messages import Written

__all__ = ["ArrivedWrites"]


class ArrivedWrites:
    """See the module.

    Attributes:
        ranges: the last WRITE of each range, in order, of those before which every WRITE has arrived.
    """

    def __init__(self) -> None:
        self.ranges: list[Written] = []
        self._indices: set[int] = set()
        self._highest = 0
        self._last: int | None = None
        self._following = 0
        self._ends_of_ranges: dict[int, Written] = {}

    @property
    def is_complete(self) -> bool:
        """Whether the last WRITE and every one before it has arrived."""
        return self._last is not None and len(self._indices) > self._last

    def take(self, message: Written) -> None:
        """Note a WRITE.

        Raises:
            ValueError: the numbers contradict each other, so the bytes cannot be trusted. The rank may still write.
        """
        last = message.index if message.is_last else self._last
        self._highest = max(self._highest, message.index)
        if last is not None and (self._highest > last or self._last not in (None, last)):
            raise ValueError(f"numbers WRITEs wrongly: {last} is the last one, and {self._highest} was sent")
        self._last = last
        self._indices.add(message.index)
        if message.end_token:
            self._ends_of_ranges[message.index] = message

    def follow(self) -> Iterator[Written]:
        """Yield the ranges that have become complete since the last call, and keep them in ``ranges``."""
        while self._following in self._indices:
            written = self._ends_of_ranges.pop(self._following, None)
            self._following += 1
            if written is not None:
                self.ranges.append(written)
                yield written
