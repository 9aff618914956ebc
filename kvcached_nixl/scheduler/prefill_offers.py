# SPDX-License-Identifier: Apache-2.0
"""Prefill: which KV of its running requests it offers to decode. One per engine, on the engine's thread.

It follows each request through vLLM's scheduler. When the last tokens of a prompt are scheduled, its manifest is
complete (`wire.manifest`) and the workers are told; when the request has ended, the client gets it. From then on the
request is one of the `KeptOffers`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.scheduler.context import EngineContext, Progress, is_meant
from kvcached_nixl.scheduler.kept_offers import KeptOffers, StartGate
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed, RevocationCause
from kvcached_nixl.wire.manifest import NULL_BLOCK_ID, PROTOCOL, BlockRange, Manifest
from kvcached_nixl.wire.params import asks, prefill_params, read_offer
from kvcached_nixl.wire.step import BlockIds, Finish, OfferUpdate, Preempt, Revocation, Revoke, Stop
from kvcached_nixl.wire.timeline import State

if TYPE_CHECKING:
    from kvcached_nixl.vllm.adapter.requests import RequestView


@dataclass(eq=False)
class OfferRequest:
    """A running request of prefill whose KV is, or will be, offered to decode.

    Attributes:
        name, digest, num_tokens: what decode may look for it by; ``digest`` covers the first ``num_tokens`` tokens.
        block_ids: those that it has now.
        ready_tokens: how many tokens its last step computes, whether the workers were told of them or not.
        cached_tokens: of its prompt, when it was first scheduled; the client's ``usage`` says it. None before.
        manifest: set when its whole prompt is scheduled.
        refused: why there is no manifest then.
        is_offered: the workers know of it, with or without tokens. Stays true if it is preempted or revoked.
        is_read: the workers know of tokens in blocks that it still has, and may be reading them before it has ended.
        is_revoked: its offer was revoked while it was computed, so decode may fetch none of it any more.
        is_streamed: tokens are offered as soon as a step has computed them, if workers read early. Not after a
            preemption: who needed its held blocks would be preempted, too, and so on without end. Nor if blocks leave
            a sliding window while the prompt is computed: vLLM gives them to other requests immediately. Nor if
            tokens may turn out invalid when their step has ended: another connector has loaded them, or vLLM refuses
            its output.
    """

    engine: EngineContext
    request: RequestView
    name: str
    digest: str
    num_tokens: int
    is_streamed: bool
    block_ids: BlockIds = ()
    ready_tokens: int = 0
    cached_tokens: int | None = None
    manifest: Manifest | None = None
    refused: HandOverFailed | None = None
    is_offered: bool = False
    is_read: bool = False
    is_revoked: bool = False

    def __post_init__(self) -> None:
        self.request_id = PrefillRequestId(self.request.request_id)

    def take_blocks(self, progress: Progress) -> None:
        if progress.replaces or not self.block_ids:
            # The first step, or the first one after a preemption.
            self.block_ids = progress.block_ids
            if self.cached_tokens is None:
                self.cached_tokens = progress.begin_token
        elif progress.block_ids:
            pairs = zip(self.block_ids, progress.block_ids, strict=True)
            self.block_ids = tuple([*old, *new] for old, new in pairs)

    def still_has(self, block_ids: BlockIds) -> bool:
        """Whether the blocks that its manifest names are among these, which it ends with."""
        if self.manifest is None or len(self.manifest.groups) != len(block_ids):
            return False
        first_tokens = tuple(group.first_token for group in self.manifest.groups)
        now = self.engine.groups.ranges(block_ids, first_tokens, self.manifest.num_tokens)
        return now == self.manifest.groups and not any(NULL_BLOCK_ID in group.block_ids for group in now)

    def compute(self, num_computed_tokens: int) -> None:
        """A step computes it so far. Makes its manifest if that is its whole prompt."""
        groups = self.engine.groups
        self.ready_tokens = min(num_computed_tokens, self.num_tokens)
        self.manifest = self.refused = None
        if self.ready_tokens < self.num_tokens:
            return
        if self.request.adapter and self.request.digest(self.num_tokens) != self.digest:
            self.refused = HandOverFailed(FailureCause.REVOKED, "its adapter was replaced while it was computed")
            return
        # If decode recomputes the last token, the window of that token decides which blocks it needs.
        recomputes = groups.have_windows and self.num_tokens == self.request.num_prompt_tokens
        first_tokens = self.engine.blocks.first_tokens(self.num_tokens - recomputes)
        try:
            self.manifest = Manifest(
                protocol=PROTOCOL,
                incarnation=self.engine.incarnation,
                request_id=self.request_id,
                digest=self.digest,
                num_tokens=self.num_tokens,
                block_sizes=groups.block_sizes,
                context_parallel=(1, 1),
                groups=groups.ranges(self.block_ids, first_tokens, self.num_tokens),
                lease_seconds=self.engine.settings.kv_lease_duration_seconds,
                num_media=self.request.num_media,
            )
        except ValueError as error:
            reason = f"its blocks do not match its {self.num_tokens} tokens: {error}"
            self.refused = HandOverFailed(FailureCause.RANGE, reason)

    def offer(self, *, is_held: bool = False) -> None:
        """Tells the workers how far it is computed. If ``is_held``, they may read its blocks before it has ended: its
        blocks are held if it loses them."""
        self.is_offered = True
        self.is_read = self.is_read or (is_held and self.ready_tokens > 0)
        ranges: tuple[BlockRange, ...] = ()
        if self.manifest is not None:
            ranges = self.manifest.groups
        elif self.block_ids:
            ranges = self.engine.groups.growing(self.block_ids, self.num_tokens)
        update = OfferUpdate(
            *(self.request_id, self.name, self.digest, self.num_tokens, ranges, self.ready_tokens, self.manifest),
            *(is_held, self.engine.timelines.trace_of(self.request_id)),
        )
        self.engine.step.tell(update)

    def params(self) -> dict[str, Any]:
        """The ``kv_transfer_params`` for decode's request, when a step has told the workers."""
        assert self.manifest is not None
        return prefill_params(
            self.engine.own,
            self.manifest,
            transfer_id=(self.request.params or {}).get("transfer_id"),
            transfer_mode=self.engine.settings.transfer_mode,
            cached_tokens=self.cached_tokens or 0,
        )


class PrefillOffers:
    """Prefill's half of `SchedulerFacade`; see the module's docstring.

    Attributes:
        kept: requests that have ended.
        gate: which of them may begin.
        is_read_early: workers read computed tokens before the request has ended: to write them (push), or to copy them
            into a slab.
    """

    def __init__(self, engine: EngineContext) -> None:
        self._engine = engine
        self.kept = KeptOffers(engine)
        self.gate = StartGate(engine, self.kept)
        self._running: dict[PrefillRequestId, OfferRequest] = {}
        self.is_read_early = engine.is_push

    def find(self, request_id: str) -> OfferRequest | None:
        """Returns a request that has not ended, if it is to be offered."""
        return self._running.get(PrefillRequestId(request_id))

    def is_read(self, request_id: str) -> bool:
        """Whether the workers may be reading the blocks of a request that is still running."""
        one = self.find(request_id)
        return one is not None and one.is_read

    def may_start(self, request_id: str) -> bool:
        """Whether a request may begin, or has been computed in part."""
        one = self.find(request_id)
        has_begun = one is None or one.cached_tokens is not None
        return has_begun or not self._engine.is_push or self.gate.may_start(PrefillRequestId(request_id))

    @property
    def are_awaited(self) -> bool:
        """Whether a prompt to be offered has no blocks. Its peer may have them already, and wait."""
        return len(self.computing) < len(self._running)

    @property
    def computing(self) -> frozenset[PrefillRequestId]:
        """Prompts to be offered that have blocks."""
        return frozenset(request_id for request_id, one in self._running.items() if one.block_ids)

    def arrived(self, request: RequestView) -> None:
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
            self._engine.failures.not_offered(request_id, failure)
            return
        if request.is_session:
            reason = (
                "it is a streaming session (resumable), whose blocks are filled further by later input; expected a "
                "complete prompt. It is computed as without kv_transfer_params. Send them with requests of one "
                "prompt each"
            )
            self._engine.failures.not_offered(request_id, HandOverFailed(FailureCause.PARAMETERS, reason))
            return
        if self._engine.groups.have_states and request.whole_because:
            self._engine.failures.not_offered(request_id, HandOverFailed(FailureCause.RANGE, request.whole_because))
            return
        num_tokens = request.num_prompt_tokens
        engine = self._engine
        is_streamed = not (engine.groups.have_windows or engine.blocks.are_shared or engine.awaits_outputs)
        one = OfferRequest(self._engine, request, name, request.digest(num_tokens), num_tokens, is_streamed)
        self._running[request_id] = one
        self._engine.timelines.begin(request, State.PREFILL_QUEUED)
        if self._engine.is_push:
            # Decode's registration may arrive first: tell the workers that there is such a request.
            one.offer()

    def scheduled(self, progress: Iterable[Progress]) -> None:
        """Offers the tokens that the step being built computes."""
        for computed in progress:
            self._engine.step.is_idle = False
            one = self.find(computed.request_id)
            if one is None:
                continue
            self._engine.timelines.enter(one.request_id, State.PREFILL_COMPUTING)
            is_past_prompt = computed.num_computed_tokens >= one.num_tokens and not computed.replaces
            if is_past_prompt and one.manifest is not None:
                # An earlier step has computed its prompt, and this one computes what comes after it.
                if self._engine.groups.have_states:
                    reason = "its states are about to be overwritten by those of later tokens"
                    self._revoke([one], Revocation(RevocationCause.STATES, reason))
                continue
            one.take_blocks(computed)
            if not one.is_revoked:
                one.compute(computed.num_computed_tokens)
                is_held = self.is_read_early and one.is_streamed
                if is_held or (one.manifest is not None and not self._engine.is_push):
                    one.offer(is_held=is_held)

    def preempted(self, request_id: str) -> None:
        """A request is preempted. If workers may read its blocks, they are held until no rank reads them."""
        one = self.find(request_id)
        if one is None:
            return
        one.block_ids = ()
        if not self.is_read(request_id):
            return
        one.ready_tokens, one.manifest = 0, None
        one.is_read = one.is_streamed = False
        hold = self._engine.holds.take(request_id)
        self._engine.step.tell(Preempt(one.request_id, hold))

    def revoke(
        self, cause: RevocationCause, reason: str, *, adapter: int | None = None, outdated: Collection[str] = ()
    ) -> None:
        """Revokes offers: ownership tokens are cleared first, then blocks are freed (rule R12). Requests that are still
        computed keep their blocks. ``adapter``: only those that `is_meant` selects by it. ``outdated`` ones have KV,
        whether it was computed here or not."""
        revocation = Revocation(cause, reason)
        self.kept.revoke(revocation, adapter=adapter)
        running = [one for one in self._running.values() if is_meant(adapter, one.request.adapter)]
        # What has no KV cannot be out of date.
        have_kv = [one for one in running if one.block_ids or one.ready_tokens or one.request_id in outdated]
        self._revoke(have_kv, revocation)

    def finished(self, request: RequestView, is_whole: bool, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; ``is_whole`` if its whole prompt was computed. Returns whether vLLM must keep its blocks
        until `KeptOffers.ended` is told of it, and the parameters for decode's request."""
        one = self._running.pop(PrefillRequestId(request.request_id), None)
        if one is None:
            return False, None
        step = self._engine.step
        if is_whole and one.still_has(block_ids):
            if self._engine.is_push and not one.is_streamed:
                one.offer()
            step.tell(Finish(one.request_id))
            self.kept.keep(one.request_id, request.adapter, block_ids)
            return True, one.params()
        if is_whole and not one.is_revoked:
            lost = HandOverFailed(FailureCause.RANGE, "it no longer has the blocks of its prompt")
            self._engine.failures.not_offered(one.request_id, one.refused or lost)
        # It may have arrived since the last step.
        step.withhold(one.request_id)
        if one.is_offered:
            reason = "prefill's request ended before it was computed"
            step.tell(Stop(one.request_id, reason, is_kept=one.is_read))
        if one.is_read:
            self.kept.keep(one.request_id, request.adapter, block_ids, is_taken_back=True)
        return one.is_read, None

    def offer_cached(self, request: RequestView, num_tokens: int, block_ids: BlockIds) -> dict[str, Any] | None:
        """Offers the beginning of a prompt, which is cached, as that of a request that has ended. Returns the
        parameters for decode's request, when a step has told the workers; None if it cannot be offered."""
        if any(num_tokens % group.table_block_size for group in self._engine.groups.all):
            # From 0.33 on vLLM finds beginnings of blocks, too: their request may still fill them.
            return None
        request_id = PrefillRequestId(request.request_id)
        name, digest = read_offer({"do_remote_decode": True}, request_id), request.digest(num_tokens)
        one = OfferRequest(self._engine, request, name, digest, num_tokens, False, block_ids, cached_tokens=num_tokens)
        one.compute(num_tokens)
        if not one.still_has(block_ids):
            return None
        one.offer()
        self._engine.step.tell(Finish(request_id))
        self.kept.keep(request_id, request.adapter, block_ids)
        return one.params()

    def _revoke(self, running: Iterable[OfferRequest], revocation: Revocation) -> None:
        """Takes back what was offered of requests, which are still computed, and offers no more of them."""
        revoked = [one for one in running if not one.is_revoked]
        for one in revoked:
            one.is_revoked, one.manifest = True, None
        request_ids = [one.request_id for one in revoked]
        self._engine.step.withhold(*request_ids)
        self._engine.step.tell(*(Revoke(request_id, revocation) for request_id in request_ids))
