# SPDX-License-Identifier: Apache-2.0
"""What takes an engine's hand-overs back, on both sides (rule R12): other weights, a pause, a cleared cache. One per
engine, on its thread.

Prefill's offers are revoked, and decode's hand-overs fail. Neither waits for a peer. Only a transfer that may be in
flight is waited for, and only for a while.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from typing import Any

from kvcached_nixl.scheduler.context import ANY_ADAPTER, EngineContext, is_meant
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.wire.causes import RevocationCause
from kvcached_nixl.wire.handshake import Weights

QUIET_SECONDS = 2.0
"""How long a pause waits for transfers that may be in flight, before its caller is told that the cache is not clear."""


class Revocations:
    """What the patches in `patches.engine_loop` and `patches.weights` call; see the module's docstring.

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
        self.is_doubted = False
        if self._weights not in (None, weights):
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
        self._engine.stock.reader.forget(adapter)
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
