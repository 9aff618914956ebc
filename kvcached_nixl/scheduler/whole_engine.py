# SPDX-License-Identifier: Apache-2.0
"""What concerns a whole engine, and not one request: what takes its hand-overs back, and its own side channel. One of
each per engine, on its thread, except where it is said.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvcached_nixl.scheduler.context import ANY_ADAPTER, EngineContext, is_meant
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.wire.causes import RevocationCause
from kvcached_nixl.wire.handshake import Answer, Answers, Weights, read_rank
from kvcached_nixl.wire.headroom import AskingFigures, Headroom, encode_headroom

if TYPE_CHECKING:
    from kvcached_nixl.transport.listener import Listener

QUIET_SECONDS = 2.0
"""How long a pause waits for transfers that may be in flight, before its caller is told that the cache is not clear."""
ANSWER_SECONDS = 0.25
"""Answers within this time say the same of the queue: what it costs to look grows with its length."""


class Revocations:
    """What takes an engine's hand-overs back, on both sides (rule R12): other weights, a pause, a cleared cache. Called
    by `patches.engine_loop` and `patches.weights`.

    Prefill's offers are revoked, and decode's hand-overs fail. Neither waits for a peer. Only a transfer that may be in
    flight is waited for, and only for a while.

    Attributes:
        is_doubted: weights may have changed, and were not read since.
    """

    def __init__(self, engine: EngineContext, offering: PrefillOffers, fetching: DecodeFetches) -> None:
        self._engine = engine
        self._offering = offering
        self._fetching = fetching
        self._weights: Mapping[Any, Weights] | None = None
        self._quiet_by_seconds = 0.0
        self.is_doubted = False

    def identified(self, weights: Mapping[Any, Weights]) -> None:
        """The workers have said which weights they have, by rank."""
        knew_weights, self.is_doubted, self._engine.knows_weights = self._engine.knows_weights, False, True
        # What was computed while they could not be read may be of others than these.
        if not knew_weights or self._weights not in (None, weights):
            self.weights_changed()
        self._weights = weights

    def weights_doubted(self, *, has_changed: bool) -> None:
        """A call may have changed weights, or has (``has_changed``), whatever the workers find. `identified` follows
        before the next step."""
        self.is_doubted, has_news = True, self._engine.has_news
        if has_changed:
            self.weights_changed()
        # An engine that keeps nothing for peers has nobody to tell before its next step.
        self._engine.has_news = has_news or self._keeps_blocks

    def weights_changed(self, adapter: int | None = None) -> None:
        """Revokes every hand-over of KV that was computed with the weights of before, and lets no request that arrives
        from now on begin with such KV: of a LoRA adapter, or of the model (None)."""
        reason = "the weights were changed" if adapter is None else "an adapter was loaded again"
        # An idle engine has to step, too, to tell its workers.
        self._engine.has_news = True
        if adapter is None:
            self._engine.incarnation = self._engine.step.incarnation = secrets.token_hex(8)
            self._weights = None
        outdated: Collection[str] = ()
        if self._engine.is_bound:
            self._fetching.revoke(f"decode: {reason}", adapter=adapter)
            # Whose KV was on its way has lost its blocks, and may begin anew.
            outdated = self._engine.blocks.outdate(lambda number, _: is_meant(adapter, number))
        self._offering.revoke(RevocationCause.WEIGHTS, f"prefill: {reason}", adapter=adapter, outdated=outdated)

    def adapters_changed(self, adapter: int | None = None) -> None:
        """A LoRA adapter was loaded under a number that was in use, or was removed; None: any adapter may have been."""
        self._engine.stock.reader.adapters.forget(adapter)
        self.weights_changed(adapter or ANY_ADAPTER)

    def paused(self, *, grace_seconds: float, clears: bool) -> None:
        """The engine is paused until `resumed`. Revokes offers: with blocks kept for peers it would never be idle.

        Args:
            grace_seconds: how long decode may still fetch what has ended, or ends from now on.
            clears: the cache is cleared, too, so no transfer into it or out of it may be under way.
        """
        self._quiet_by_seconds = self._engine.clock.now_seconds() + grace_seconds + QUIET_SECONDS
        self._offering.kept.close("prefill is paused", grace_seconds=grace_seconds)
        if clears:
            self.clear(running=not grace_seconds)

    def clear(self, *, running: bool = True) -> None:
        """The cache is about to be cleared: revokes the hand-overs out of it and into it. If ``running``, running
        requests lose what they have computed, so their offers are revoked, too."""
        self._quiet_by_seconds = max(self._quiet_by_seconds, self._engine.clock.now_seconds() + QUIET_SECONDS)
        if running:
            self._offering.revoke(RevocationCause.CLEARED, "prefill's cache is cleared")
        self._fetching.revoke("decode's cache is cleared")

    def resumed(self) -> None:
        self._offering.kept.reopen()

    @property
    def has_blocks(self) -> bool:
        """Whether blocks are held, kept for decode, or waiting for KV, although no running request uses them."""
        return self._keeps_blocks or bool(self._fetching.attempts.waiting or self._fetching.received)

    @property
    def quiet_in_seconds(self) -> float:
        """How long a pause still waits for transfers in flight; 0 if none can be in flight, or nobody waits."""
        return max(0.0, self._quiet_by_seconds - self._engine.clock.now_seconds()) if self._keeps_blocks else 0.0

    @property
    def _keeps_blocks(self) -> bool:
        """Whether there are blocks that no running request has, and that transfers may use."""
        is_copied = self._engine.is_bound and self._engine.blocks.is_copied
        return bool(self._engine.holds.num_blocks or self._offering.kept.num_kept or is_copied)


class OwnSideChannel:
    """What an engine answers peers, what it says of its memory, and what it asks of the engine.

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
        self._listener: Listener | None = None
        self._mapped_bytes = self._risen_bytes = self._fallen_bytes = 0
        self._queued_tokens = 0
        self._said_until_seconds = 0.0

    def introduce(self, metadata: Mapping[Any, Any], listen: Callable[[Answers], Listener]) -> None:
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
        """The engine's weights cannot be read: it answers peers that it has no rank, and fetches no KV, until
        `introduce` is called again."""
        self._engine.knows_weights = False
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
