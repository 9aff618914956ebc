# SPDX-License-Identifier: Apache-2.0
"""Prefill: which KV of its running requests it offers to decode. One per engine, on the engine's thread.

It follows each request through vLLM's scheduler. When the last tokens of a prompt are scheduled, its manifest is
complete (`wire.manifest`) and the workers are told; when the request has ended, the client gets it. From then on the
request is one of the `KeptOffers`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.scheduler.engine import BlockPool, Progress, Request
from kvcached_nixl.scheduler.failures import Failures
from kvcached_nixl.scheduler.holds import Holds
from kvcached_nixl.scheduler.kept_offers import KeptOffers
from kvcached_nixl.scheduler.offer_request import OfferRequest
from kvcached_nixl.scheduler.terms import Terms, is_meant
from kvcached_nixl.scheduler.timelines import Timelines
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed, RevocationCause
from kvcached_nixl.wire.params import RemotePrefill, asks, prefill_params, read_offer
from kvcached_nixl.wire.step import BlockIds, Finish, Preempt, Revocation, Revoke, Step, Stop
from kvcached_nixl.wire.timeline import State

__all__ = ["PrefillOffers"]


class PrefillOffers:
    """Prefill's half of `SchedulerFacade`; see the module's docstring.

    Args:
        own: what a peer needs to find this engine's ranks.
        incarnation: drawn when this engine starts.

    Attributes:
        kept: requests that have ended.
        incarnation: as above; drawn again when the engine's weights change.
        is_read_early: workers read computed tokens before the request has ended: to write them (push), or to copy them
            into a slab.
    """

    def __init__(
        self,
        own: RemotePrefill,
        incarnation: str,
        terms: Terms,
        kept: KeptOffers,
        holds: Holds,
        failures: Failures,
        timelines: Timelines,
    ) -> None:
        self._own = own
        self.incarnation = incarnation
        self._terms = terms
        self.kept = kept
        self._holds = holds
        self._running: dict[PrefillRequestId, OfferRequest] = {}
        # Holds with the blocks of preempted requests.
        self._draining: set[int] = set()
        self._failures = failures
        self._timelines = timelines
        self.is_read_early = terms.mode.is_push

    # ---------------------------------------------------------------------------------------- what a request is here

    def is_offering(self, request_id: str) -> bool:
        """Whether a request that has not ended is to be offered."""
        return PrefillRequestId(request_id) in self._running

    def has_begun(self, request_id: str) -> bool:
        """Whether a request is not to be offered, or has been computed in part."""
        one = self._running.get(PrefillRequestId(request_id))
        return one is None or one.cached_tokens is not None

    @property
    def are_awaited(self) -> bool:
        """Whether a prompt to be offered has no blocks. Its peer may have them already, and wait."""
        return any(not one.block_ids for one in self._running.values())

    def is_read(self, request_id: str) -> bool:
        """Whether the workers may be reading the blocks of a request that is still running."""
        one = self._running.get(PrefillRequestId(request_id))
        return one is not None and one.is_read

    def is_named(self, request_id: str) -> bool:
        """Whether a manifest names the blocks of a request."""
        one = self._running.get(PrefillRequestId(request_id))
        return one is not None and one.manifest is not None

    # ---------------------------------------------------------------------------------------------- what becomes of it

    def arrived(self, request: Request, step: Step) -> None:
        """A request has entered the engine. Requests without ``do_remote_decode`` are ignored from here on."""
        params, request_id = request.params, PrefillRequestId(request.request_id)
        if params is None or not asks(params, "do_remote_decode") or request_id in self._running:
            return
        # With both roles set, decode's half refuses it.
        if asks(params, "do_remote_prefill"):
            return
        try:
            name = read_offer(params, request.request_id)
        except HandOverFailed as failure:
            self._failures.not_offered(request_id, failure)
            return
        if request.is_session:
            reason = (
                "it is a streaming session (resumable), whose blocks are filled further by later input; expected a "
                "complete prompt. It is computed as without kv_transfer_params. Send them with requests of one "
                "prompt each"
            )
            self._failures.not_offered(request_id, HandOverFailed(FailureCause.PARAMETERS, reason))
            return
        if self._terms.groups.have_states and request.whole_because:
            self._failures.not_offered(request_id, HandOverFailed(FailureCause.RANGE, request.whole_because))
            return
        num_tokens = request.num_prompt_tokens
        is_streamed = not self._terms.groups.have_windows
        one = OfferRequest(request_id, request, name, request.digest(num_tokens), num_tokens, is_streamed)
        self._running[request_id] = one
        self._timelines.begin(request, State.PREFILL_QUEUED)
        if self._terms.mode.is_push:
            # Decode's registration may arrive first: tell the workers that there is such a request.
            self._offer(one, step)

    def scheduled(self, progress: Iterable[Progress], blocks: BlockPool, step: Step) -> None:
        """Offers the tokens that the step being built computes."""
        for computed in progress:
            step.is_idle = False
            one = self._running.get(PrefillRequestId(computed.request_id))
            if one is not None:
                self._advance(one, computed, blocks, step)

    def preempted(self, request_id: str, blocks: BlockPool, step: Step) -> None:
        """A request is preempted while workers may read its blocks: holds them until no rank reads them."""
        one = self._running[PrefillRequestId(request_id)]
        one.lose_blocks()
        hold = self._holds.take(blocks, request_id)
        self._draining.add(hold)
        step.tell(Preempt(one.request_id, hold))

    def drained(self, idle_holds: Iterable[int], blocks: BlockPool) -> None:
        """No rank reads the blocks of these holds any more. Frees those of preempted requests."""
        for hold in idle_holds:
            if hold in self._draining:
                self._draining.remove(hold)
                self._holds.give_back(blocks, hold)

    def revoke(
        self,
        cause: RevocationCause,
        reason: str,
        step: Step,
        *,
        adapter: int | None = None,
        outdated: Collection[str] = (),
    ) -> None:
        """Revokes offers: ownership tokens are cleared first, then blocks are freed (rule R12). Requests that are still
        computed keep their blocks.

        Args:
            adapter: only offers computed with this LoRA adapter, or with any adapter (`ANY_ADAPTER`); None for all.
            outdated: requests that have blocks, whether they have computed anything here or not.
        """
        revocation = Revocation(cause, reason)
        self.kept.revoke(revocation, step, adapter=adapter)
        running = (one for one in self._running.values() if is_meant(adapter, one.request.adapter))
        self._revoke([one for one in running if one.has_computed or one.request_id in outdated], revocation, step)

    def finished(
        self, request: Request, is_whole: bool, block_ids: BlockIds, blocks: BlockPool, step: Step
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; ``is_whole`` if its whole prompt was computed.

        Returns: whether vLLM must keep its blocks until `KeptOffers.ended` is told of it, and the parameters for
            decode's request.
        """
        one = self._running.pop(PrefillRequestId(request.request_id), None)
        if one is None:
            return False, None
        if is_whole and one.still_has(block_ids, self._terms.groups):
            if self._terms.mode.is_push and (blocks.are_shared or not one.is_streamed):
                self._offer(one, step)
            step.tell(Finish(one.request_id))
            self.kept.keep(one.request_id, request.adapter, block_ids)
            return True, self._params(one, request)
        if is_whole and not one.is_revoked:
            lost = HandOverFailed(FailureCause.RANGE, "it no longer has the blocks of its prompt")
            self._failures.not_offered(one.request_id, one.refused or lost)
        # It may have arrived since the last step.
        step.withhold(one.request_id)
        if one.is_offered:
            reason = "prefill's request ended before it was computed"
            step.tell(Stop(one.request_id, reason, is_kept=one.is_read))
        if one.is_read:
            self.kept.keep(one.request_id, request.adapter, block_ids, is_taken_back=True)
            return True, None
        return False, None

    def offer_cached(
        self, request: Request, num_tokens: int, block_ids: BlockIds, blocks: BlockPool, step: Step
    ) -> dict[str, Any] | None:
        """Offers the beginning of a prompt, which is cached, as that of a request that has ended.

        Returns: the parameters for decode's request, when a step has told the workers; None if it cannot be offered.
        """
        if any(num_tokens % group.table_block_size for group in self._terms.groups.all):
            # From 0.33 on vLLM finds beginnings of blocks, too: their request may still fill them.
            return None
        request_id = PrefillRequestId(request.request_id)
        name, digest = read_offer({"do_remote_decode": True}, request_id), request.digest(num_tokens)
        one = OfferRequest(request_id, request, name, digest, num_tokens, False, block_ids, cached_tokens=num_tokens)
        one.compute(num_tokens, blocks, self.incarnation, self._terms)
        if not one.still_has(block_ids, self._terms.groups):
            return None
        self._offer(one, step)
        step.tell(Finish(request_id))
        self.kept.keep(request_id, request.adapter, block_ids)
        return self._params(one, request)

    # -------------------------------------------------------------------------------------------------------- inside

    def _advance(self, one: OfferRequest, computed: Progress, blocks: BlockPool, step: Step) -> None:
        self._timelines.enter(one.request_id, State.PREFILL_COMPUTING)
        if one.is_past_prompt(computed):
            if self._terms.groups.have_states:
                reason = "its states are about to be overwritten by those of later tokens"
                self._revoke([one], Revocation(RevocationCause.STATES, reason), step)
            return
        one.take_blocks(computed)
        if one.is_revoked:
            return
        one.compute(computed.num_computed_tokens, blocks, self.incarnation, self._terms)
        # Tokens that another connector loads may turn out invalid when this step has ended, so they are not read early.
        is_held = self.is_read_early and one.is_streamed and not blocks.are_shared
        if is_held or (one.manifest is not None and not self._terms.mode.is_push):
            self._offer(one, step, is_held=is_held)

    def _revoke(self, running: Iterable[OfferRequest], revocation: Revocation, step: Step) -> None:
        """Takes back what was offered of requests, which are still computed, and offers no more of them."""
        revoked = [one for one in running if not one.is_revoked]
        for one in revoked:
            one.is_revoked, one.manifest = True, None
        request_ids = [one.request_id for one in revoked]
        step.withhold(*request_ids)
        step.tell(*(Revoke(request_id, revocation) for request_id in request_ids))

    def _offer(self, one: OfferRequest, step: Step, *, is_held: bool = False) -> None:
        one.offer(step, self._terms.groups, self._timelines.trace_of(one.request_id), is_held=is_held)

    def _params(self, one: OfferRequest, request: Request) -> dict[str, Any]:
        assert one.manifest is not None
        return prefill_params(
            self._own,
            one.manifest,
            transfer_id=(request.params or {}).get("transfer_id"),
            transfer_mode=self._terms.mode,
            cached_tokens=one.cached_tokens or 0,
        )
