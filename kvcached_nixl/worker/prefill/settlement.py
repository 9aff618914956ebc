# SPDX-License-Identifier: Apache-2.0
"""Prefill: decides when nothing reads an offer's blocks any more and when the offer ends, and reports both.

The offer's ownership token is removed before its blocks are reported as free (rule R3). Once per worker, on the
transfer thread.
"""

from __future__ import annotations

from kvcached_nixl.worker.outcome_queue import OutcomeQueue
from kvcached_nixl.worker.prefill.matching import OfferMatcher
from kvcached_nixl.worker.prefill.offer import Offer
from kvcached_nixl.worker.prefill.writer import Writer
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.lease import Leases
from kvcached_nixl.worker.transfer.ownership_tokens import TokenTable

__all__ = ["Settlement"]


class Settlement:
    """See the module."""

    def __init__(
        self,
        context: WorkerContext,
        tokens: TokenTable,
        matcher: OfferMatcher,
        leases: Leases,
        writer: Writer,
        outcomes: OutcomeQueue,
    ) -> None:
        self._context = context
        self._tokens = tokens
        self._matcher = matcher
        self._leases = leases
        self._writer = writer
        self._outcomes = outcomes

    def claim(self, offer: Offer) -> None:
        """A rank of decode has registered for an offer, or needs nothing of it."""
        if offer.claim:
            self._outcomes.claimed(offer.claim)
            offer.claim = 0

    def settle_rank(self, offer: Offer, tp_rank: int, tp_size: int) -> None:
        """A rank of decode needs nothing more of an offer."""
        self.claim(offer)
        offer.settled.add(tp_rank)
        # How many ranks of decode share this rank's heads.
        offer.awaited = max(1, tp_size // self._writer.tp_size)

    def settle(self, offer: Offer) -> None:
        """Report holds and blocks that nothing reads any more, and remove the offer if decode is done with it."""
        self._writer.follow(offer)
        is_copying = self._writer.source.is_copying(offer)
        if offer.draining and not (is_copying or (offer.is_read and self._context.staging is None)):
            for hold in offer.draining:
                self._outcomes.hold_idle(hold)
            offer.draining = []
        if offer.finished and offer.is_kept and self._writer.source.is_free_of_blocks(offer):
            offer.is_kept, offer.blocks = False, ()
            self._outcomes.done(offer.request_id)
        # The end of its last registration may have removed it already.
        if (
            not offer.finished
            or is_copying
            or offer.write_tasks
            or self._matcher.offers.get(offer.request_id) is not offer
        ):
            return
        if not (offer.is_satisfied or offer.stopped):
            if offer.request_id in self._leases:
                return
            self._outcomes.expired(offer.request_id)
        # Rule R3: before the blocks can be freed.
        self._tokens.remove(offer.request_id)
        self._leases.pop(offer.request_id, None)
        self._matcher.remove(offer)
        self._writer.source.offer_finished(offer)
        offer.timeline.end(self._context.clock.now_seconds())
        if not self._context.local.tp_rank:
            self._outcomes.timed(offer.timeline.reported(trace=offer.update.trace))
        if offer.is_kept:
            self._outcomes.done(offer.request_id)
