# SPDX-License-Identifier: Apache-2.0
"""What prefill's half of a push keeps of a request, and of registrations that are over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvcached_nixl.ids import PrefillRequestId

__all__ = ["Memory", "Offer"]

T = TypeVar("T")

REMEMBERED = 65_536


@dataclass
class Offer:
    """A request of prefill.

    Attributes:
        ready_tokens: how many of its tokens are in ``block_ids`` (per group).
        finished: prefill computes no more of it.
        settled: ranks of decode that need nothing more of it, of ``awaited_ranks`` once that is known.
        draining: it was preempted, and the blocks of these holds may still be read.
    """

    request_id: PrefillRequestId
    transfer: str
    block_ids: tuple[Sequence[int], ...] = ()
    ready_tokens: int = 0
    finished: bool = False
    stopped: str = ""
    settled: set[int] = field(default_factory=set)
    awaited_ranks: int | None = None
    draining: list[int] = field(default_factory=list)


class Memory(Generic[T]):
    """The last ``REMEMBERED`` things that were added."""

    def __init__(self) -> None:
        self._held: OrderedDict[T, None] = OrderedDict()

    def __contains__(self, thing: T) -> bool:
        return thing in self._held

    def add(self, thing: T) -> None:
        self._held[thing] = None
        if len(self._held) > REMEMBERED:
            self._held.popitem(last=False)

    def discard(self, thing: T) -> None:
        self._held.pop(thing, None)
