# SPDX-License-Identifier: Apache-2.0
"""A set that remembers only its newest members, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["RecentSet"]

T = TypeVar("T")

CAPACITY = 65_536


class RecentSet(Generic[T]):
    """The last ``CAPACITY`` distinct members that were added."""

    def __init__(self) -> None:
        self._held: OrderedDict[T, None] = OrderedDict()

    def __contains__(self, thing: T) -> bool:
        return thing in self._held

    def add(self, thing: T) -> None:
        self._held[thing] = None
        if len(self._held) > CAPACITY:
            self._held.popitem(last=False)
