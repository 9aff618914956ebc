# SPDX-License-Identifier: Apache-2.0
"""An engine's own side channel: what it answers peers, what it says of its memory, and what it asks of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from kvcached_nixl.scheduler.context import EngineContext
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.scheduler.revocations import Revocations
from kvcached_nixl.wire.handshake import Answer, Answers, read_rank
from kvcached_nixl.wire.headroom import AskingFigures, Headroom, encode_headroom

ANSWER_SECONDS = 0.25
"""Answers within this time say the same of the queue: what it costs to look grows with its length."""


class HandshakeListener(Protocol):
    """The listening side of a side channel."""

    def answer(self, answers: Answers) -> None:
        """Replaces the answers."""

    def close(self) -> None: ...


class OwnSideChannel:
    """See the module. One per engine.

    kvcached 0.1.6 says how much memory is mapped, but has no counters (``observability.py``). So rises and falls of the
    amount are added up, look by look: both sums are lower bounds, and their difference is exact.

    Threads: the side channel's thread calls `headroom` and `watch_memory`; the engine's thread calls the others.

    Args:
        asking: None if the engine asks no prefill servers.
    """

    def __init__(
        self,
        engine: EngineContext,
        offering: PrefillOffers,
        fetching: DecodeFetches,
        revocations: Revocations,
        asking: AskingFigures | None,
    ) -> None:
        self._engine = engine
        self._offering = offering
        self._fetching = fetching
        self._revocations = revocations
        self._asking = asking
        self._listener: HandshakeListener | None = None
        self._mapped_bytes = self._risen_bytes = self._fallen_bytes = 0
        self._queued_tokens = 0
        self._said_until_seconds = 0.0

    def introduce(self, metadata: Mapping[Any, Any], listen: Callable[[Answers], HandshakeListener]) -> None:
        """Sets the handshakes of this engine's ranks. Called when the workers have registered their memory, and again
        when their weights may have changed. Peers are answered with them until `close`.

        Args:
            metadata: vLLM's containers of what the workers have said, by (pipeline stage, rank).
        """
        ranks = {key: read_rank(one.agent_metadata_bytes) for key, one in metadata.items()}
        self._offering.is_read_early |= any(one.is_staged for one in ranks.values())
        self._revocations.identified({key: one.weights for key, one in ranks.items()})
        # Drawn again if other weights were found just now.
        incarnation = self._engine.incarnation
        answers = {
            place: (one.compatibility_hash, msgspec.msgpack.encode(Answer(incarnation, one.agent_metadata_bytes)))
            for place, one in metadata.items()
        }
        if self._listener is None:
            self._listener = listen(answers)
        else:
            self._listener.answer(answers)

    def hide(self) -> None:
        """Answers peers that this engine has no rank, until `introduce` is called again."""
        self._revocations.weights_changed()
        if self._listener is not None:
            self._listener.answer({})

    def close(self) -> None:
        """Stops listening; called when the engine shuts down."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def headroom(self) -> bytes:
        """Returns this engine's `Headroom`, encoded; empty before its first step."""
        self.watch_memory()
        if self._revocations.is_doubted:
            # An idle engine looks at its weights before its next step: now, since somebody asks.
            self._engine.woken()
        if not self._engine.is_bound:
            return b""
        usage, per_block = self._engine.blocks.usage(), self._engine.groups.tokens_per_block
        num_offers, num_kept, oldest_offer_seconds = self._offering.kept.kept_now()
        num_fetches, oldest_fetch_seconds = self._fetching.waiting_now()
        return encode_headroom(
            Headroom(
                free_tokens=int(usage.num_free * per_block),
                used_tokens=int(usage.num_used * per_block),
                queued_tokens=usage.queued_tokens,
                kept_offers=num_offers,
                kept_tokens=int(num_kept * per_block),
                free_bytes=usage.free_bytes,
                mapped_bytes=self._mapped_bytes,
                map_bytes=self._risen_bytes,
                unmap_bytes=self._fallen_bytes,
                waiting_fetches=num_fetches,
                oldest_fetch_seconds=oldest_fetch_seconds,
                oldest_offer_seconds=oldest_offer_seconds,
                asking=self._asking,
            )
        )

    def watch_memory(self) -> None:
        """Counts what kvcached has mapped and unmapped since the last call. The first amount is a rise from 0."""
        if self._engine.is_bound:
            before, self._mapped_bytes = self._mapped_bytes, self._engine.blocks.mapped_bytes()
            self._risen_bytes += max(0, self._mapped_bytes - before)
            self._fallen_bytes += max(0, before - self._mapped_bytes)

    def in_answer(self) -> dict[str, int]:
        """What prefill's answers say of this engine's queue."""
        now = self._engine.clock.now_seconds()
        if now >= self._said_until_seconds:
            self._said_until_seconds = now + ANSWER_SECONDS
            self._queued_tokens = self._engine.blocks.usage().queued_tokens
        return {"queued_tokens": self._queued_tokens}
