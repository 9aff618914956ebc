# SPDX-License-Identifier: Apache-2.0
"""An engine's `Headroom`, for the side channel and for prefill's answers. One per engine.

Threads: the side channel's thread calls `of` and `watch`; the engine's thread calls `in_answer`.
"""

from __future__ import annotations

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.scheduler.engine import BlockPool
from kvcached_nixl.scheduler.kept_offers import KeptOffers
from kvcached_nixl.wire.headroom import AskingFigures, Headroom

__all__ = ["ANSWER_SECONDS", "MappedMemory", "ToldHeadroom"]


class MappedMemory:
    """Counts how much memory kvcached maps and gives back. Once per engine, on the side channel's thread.

    kvcached 0.1.6 says how much is mapped, but has no counters (``operation_counters`` in its ``observability.py``). So
    the amount is looked at again and again, and its rises and falls are added up. What is mapped and given back between
    two looks is not counted: both sums are lower bounds, and their difference is exact.

    Attributes:
        num_bytes: mapped at the last look.
        risen_bytes, fallen_bytes: sums of all rises and falls; the first look is a rise from 0.
    """

    def __init__(self) -> None:
        self.num_bytes = self.risen_bytes = self.fallen_bytes = 0

    def look(self, num_bytes: int) -> None:
        """Take note of how much is mapped now."""
        change, self.num_bytes = num_bytes - self.num_bytes, num_bytes
        self.risen_bytes += max(0, change)
        self.fallen_bytes += max(0, -change)


ANSWER_SECONDS = 0.25
"""Answers within this time say the same: what it costs to look grows with the queue."""


class ToldHeadroom:
    """See the module.

    Args:
        tokens_per_block: of all KV-cache groups together.
        asking: None if the engine asks no prefill servers.
    """

    def __init__(
        self,
        clock: Clock,
        tokens_per_block: float,
        kept: KeptOffers,
        fetching: DecodeFetches,
        asking: AskingFigures | None = None,
    ) -> None:
        self._clock = clock
        self._tokens_per_block = tokens_per_block
        self._kept = kept
        self._fetching = fetching
        self._asking = asking
        self._mapped = MappedMemory()
        self._queued_tokens = 0
        self._said_until_seconds = 0.0

    def watch(self, blocks: BlockPool) -> None:
        """Counts what kvcached has mapped and unmapped since the last call."""
        self._mapped.look(blocks.mapped_bytes())

    def of(self, blocks: BlockPool) -> Headroom:
        """At this moment."""
        usage, per_block = blocks.usage(), self._tokens_per_block
        num_offers, num_kept, oldest_offer_seconds = self._kept.kept_now()
        num_fetches, oldest_fetch_seconds = self._fetching.waiting_now()
        return Headroom(
            free_tokens=int(usage.num_free * per_block),
            used_tokens=int(usage.num_used * per_block),
            queued_tokens=usage.queued_tokens,
            kept_offers=num_offers,
            kept_tokens=int(num_kept * per_block),
            free_bytes=usage.free_bytes,
            mapped_bytes=self._mapped.num_bytes,
            map_bytes=self._mapped.risen_bytes,
            unmap_bytes=self._mapped.fallen_bytes,
            waiting_fetches=num_fetches,
            oldest_fetch_seconds=oldest_fetch_seconds,
            oldest_offer_seconds=oldest_offer_seconds,
            asking=self._asking,
        )

    def in_answer(self, blocks: BlockPool) -> dict[str, int]:
        """What prefill's answers say of it."""
        now = self._clock.now_seconds()
        if now >= self._said_until_seconds:
            self._said_until_seconds = now + ANSWER_SECONDS
            self._queued_tokens = blocks.usage().queued_tokens
        return {"queued_tokens": self._queued_tokens}
