# SPDX-License-Identifier: Apache-2.0
"""Prefill: which KV of its requests it offers to decode. One per engine, on the engine's thread.

It follows each request through vLLM's scheduler. When the last tokens of a prompt are scheduled, its manifest is
complete (`wire.manifest`) and the workers are told; when the request has ended, the client gets it. Blocks are freed
only when every rank has reported that no peer needs them (rule R2).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvcached_nixl.clock import Clock
from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.scheduler.engine import BlockPool, Progress, Request
from kvcached_nixl.scheduler.failures import Failures
from kvcached_nixl.scheduler.fetch_request import Terms, is_meant
from kvcached_nixl.scheduler.holds import Holds
from kvcached_nixl.scheduler.timelines import Timelines
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed, RevocationCause
from kvcached_nixl.wire.kv_groups import NULL_BLOCK_ID
from kvcached_nixl.wire.manifest import PROTOCOL, BlockRange, Manifest
from kvcached_nixl.wire.params import RemotePrefill, asks, prefill_params, read_offer
from kvcached_nixl.wire.step import BlockIds, OfferUpdate, Revocation, Step
from kvcached_nixl.wire.timeline import State

__all__ = ["PrefillOffers"]

ASK_AGAIN_SECONDS = 1.0
"""How long an offer that is to give way counts as giving its blocks back. Decode may be fetching it, and not end."""
SPARED_SECONDS = 5.0
"""How long an offer that did not give way counts as wanted: decode may give it up without a word."""
UNCLAIMED_SECONDS = 1.0
"""How long KV is kept for a decode that only has not been written yet."""
GRACE_SECONDS = 1.0
"""How long decode may still fetch a request that ends while the engine pauses with ``/pause?mode=wait``."""


_GIVES_WAY = MappingProxyType(
    {
        RevocationCause.BLOCKS: "nobody has fetched it, and prefill needs its blocks for another request",
        RevocationCause.LIMIT: "nobody has fetched it, and prefill uses more memory than kvcached's limit allows",
        RevocationCause.NEIGHBOUR: "nobody has fetched it, and another engine on prefill's device waits for memory",
    }
)


@dataclass
class _Sending:
    """A running request of prefill whose KV is, or will be, offered to decode.

    Attributes:
        ready_tokens: how many tokens its last step computes, whether the workers were told of them or not.
        cached_tokens: of its prompt, when it was first scheduled; the client's ``usage`` says it.
        manifest: set when its whole prompt is scheduled.
        refused: why there is no manifest then.
        is_offered: the workers know of it, with or without tokens. Stays true if it is preempted or revoked.
        is_read: the workers know of tokens in blocks that it still has, and may be reading them before it has ended.
        is_revoked: its offer was revoked while it was computed, so decode may fetch none of it any more.
        is_streamed: tokens are offered as soon as a step has computed them, if workers read early (``is_read_early``).
            Not after a preemption: its held blocks would not be free for the request that needed them, which would be
            preempted, too, and so on without end. Nor if blocks leave a sliding window while the prompt is computed:
            vLLM gives them to other requests immediately.
    """

    request: Request
    name: str
    digest: str
    num_tokens: int
    block_ids: BlockIds = ()
    ready_tokens: int = 0
    cached_tokens: int | None = None
    manifest: Manifest | None = None
    refused: HandOverFailed | None = None
    is_offered: bool = False
    is_read: bool = False
    is_revoked: bool = False
    is_streamed: bool = True


@dataclass(frozen=True)
class _Kept:
    """A request that has ended, and whose blocks are kept.

    Attributes:
        adapter: the one that it was computed with.
        since_seconds: when it ended.
    """

    adapter: int
    num_blocks: int
    since_seconds: float


class PrefillOffers:
    """Prefill's half of `SchedulerFacade`; see the module's docstring.

    Args:
        own: what a peer needs to find this engine's ranks.
        incarnation: drawn when this engine starts.

    Attributes:
        incarnation: as above; drawn again when the engine's weights change.
        stale: weights that have changed while the prefix cache may still hold KV of the earlier ones, which requests
            may reuse: the model's (None), a LoRA adapter's number, or any adapter (`ANY_ADAPTER`).
        is_read_early: workers read computed tokens before the request has ended: to write them (push), or to copy them
            into a slab.
    """

    def __init__(
        self,
        own: RemotePrefill,
        incarnation: str,
        terms: Terms,
        clock: Clock,
        holds: Holds,
        failures: Failures,
        timelines: Timelines,
    ) -> None:
        self._own = own
        self.incarnation = incarnation
        self._terms = terms
        self._clock = clock
        self._holds = holds
        self._sending: dict[PrefillRequestId, _Sending] = {}
        self._kept: dict[PrefillRequestId, _Kept] = {}
        self._taken_back: set[PrefillRequestId] = set()
        # Revoked requests that vLLM has freed already -> the hold with their blocks.
        self._let_go: dict[PrefillRequestId, int] = {}
        self._closed: str | None = None
        self.stale: set[int | None] = set()
        self._revoked_at = Deadlines[PrefillRequestId]()
        self._giving_way = Deadlines[PrefillRequestId]()
        # Numbers of revocations that may be reported as spared.
        self._asked: dict[int, PrefillRequestId] = {}
        self._numbers = itertools.count(1)
        # Those of the requests in `_kept` that did not give way, because decode waits for them or fetches them.
        self._spared = Deadlines[PrefillRequestId]()
        # Those whose memory is for others than this engine.
        self._for_others: set[PrefillRequestId] = set()
        self._draining: set[int] = set()
        self._failures = failures
        self._timelines = timelines
        self.is_read_early = terms.mode.is_push

    @property
    def num_kept(self) -> int:
        """Requests that have ended, and whose blocks are kept."""
        return len(self._kept)

    @property
    def is_left_waiting(self) -> bool:
        """Whether decode leaves so much KV waiting that nothing more should be computed for it unasked."""
        now = self._clock.now_seconds()
        num_blocks = sum(
            one.num_blocks
            for request_id, one in self._kept.items()
            if now > one.since_seconds + UNCLAIMED_SECONDS and request_id not in self._taken_back
        )
        return num_blocks * self._terms.groups.tokens_per_block >= self._terms.most_unclaimed_tokens

    def has_begun(self, request_id: str) -> bool:
        """Whether a request is not to be offered, or has been computed in part."""
        sending = self._sending.get(PrefillRequestId(request_id))
        return sending is None or sending.cached_tokens is not None

    def kept_now(self) -> tuple[int, int, float]:
        """Returns how many requests are kept, their blocks, and the seconds since the first one ended. May be called
        from any thread."""
        kept = list(self._kept.values())
        now = self._clock.now_seconds()
        oldest_seconds = max((now - one.since_seconds for one in kept), default=0.0)
        return len(kept), sum(one.num_blocks for one in kept), max(0.0, oldest_seconds)

    @property
    def due_at_seconds(self) -> float | None:
        """When the next offer is to be revoked; None if none is."""
        return self._revoked_at.first_seconds

    def is_stale(self, used: int) -> bool:
        """Whether the prefix cache may hold KV for an adapter (0 for none) that other weights have computed."""
        return any(is_meant(one, used) for one in self.stale)

    # ------------------------------------------------------------------------------------------------------ revocation

    def revoke(self, cause: RevocationCause, reason: str, step: Step, *, adapter: int | None = None) -> None:
        """Revokes offers: ownership tokens are cleared first, then blocks are freed (rule R12). Requests that are still
        computed keep their blocks.

        Args:
            adapter: only offers computed with this LoRA adapter, or with any adapter (`ANY_ADAPTER`); None for all.
        """
        revocation = Revocation(cause, reason)
        for request_id, kept in self._kept.items():
            if is_meant(adapter, kept.adapter):
                self._take_back(request_id, revocation, step)
        for request_id, sending in self._sending.items():
            # A request that has not begun has computed nothing that could be out of date.
            if is_meant(adapter, sending.request.adapter) and (sending.block_ids or sending.ready_tokens):
                self._withdraw(request_id, sending, revocation, step)

    def give_way(self, cause: RevocationCause, num_blocks: int, step: Step, *, keeps_wanted: bool = False) -> None:
        """Takes back offers that no rank of decode fetches yet, oldest first, until they have ``num_blocks`` blocks
        together with those that are being given back already.

        A worker leaves an offer as it is if decode fetches it. If decode has a request that waits for it, the others
        are taken back first.

        Args:
            keeps_wanted: those for which decode has a request are not taken back at all.
        """
        now = self._clock.now_seconds()
        self._spared.take_due(now)
        self._spared.move({one: now + SPARED_SECONDS for one in self._giving_way.take_due(now)})
        coming = {*self._giving_way, *self._taken_back} & self._kept.keys()
        num_blocks -= sum(self._kept[one].num_blocks for one in coming)
        # What the workers are told of in this very step is not old, nor may it follow its revocation.
        told = {*step.finished, *(one.request_id for one in step.offered)}
        # Those that were spared come last.
        for request_id, kept in sorted(self._kept.items(), key=lambda one: one[0] in self._spared):
            if num_blocks <= 0 or (is_last := request_id in self._spared) and keeps_wanted:
                return
            is_young = now < kept.since_seconds + self._terms.patience_seconds
            if request_id in coming or request_id in told or is_young:
                continue
            number = next(self._numbers)
            step.revoked[request_id] = Revocation(cause, _GIVES_WAY[cause], not is_last, number)
            self._giving_way[request_id] = now + ASK_AGAIN_SECONDS
            self._asked[number] = request_id
            if cause is not RevocationCause.BLOCKS:
                self._for_others.add(request_id)
            num_blocks -= kept.num_blocks

    def spared(self, numbers: Iterable[int]) -> bool:
        """Workers have not taken these offers back, because decode waits for them or fetches them. Returns whether
        there are any."""
        found = [self._asked.pop(number) for number in numbers if number in self._asked]
        for request_id in found:
            self._giving_way.pop(request_id, None)
            self._for_others.discard(request_id)
            if request_id in self._kept:
                self._spared[request_id] = self._clock.now_seconds() + SPARED_SECONDS
        return bool(found)

    def close(self, reason: str, step: Step, *, grace_seconds: float) -> None:
        """Revokes requests that have ended, or end before `reopen` is called; each after ``grace_seconds``."""
        self._closed = reason
        due = self._clock.now_seconds() + grace_seconds
        self._revoked_at.move({request_id: due for request_id in self._kept})
        self.turn(step)

    def reopen(self) -> None:
        """Undoes `close`: requests that end from now on are kept as long as their leases last."""
        self._closed = None
        self._revoked_at.clear()

    def turn(self, step: Step) -> None:
        """Revokes the offers whose grace has passed."""
        for request_id in self._revoked_at.take_due(self._clock.now_seconds()):
            if request_id in self._kept:
                self._take_back(request_id, Revocation(RevocationCause.PAUSED, self._closed or ""), step)

    def _kept_now(self, request: Request, block_ids: BlockIds) -> _Kept:
        num_blocks = sum(len({*group} - {NULL_BLOCK_ID}) for group in block_ids)
        return _Kept(request.adapter, num_blocks, self._clock.now_seconds())

    def _take_back(self, request_id: PrefillRequestId, revocation: Revocation, step: Step) -> None:
        self._revoked_at.pop(request_id, None)
        if request_id in self._taken_back:
            return
        self._taken_back.add(request_id)
        step.revoked[request_id] = revocation
        # An offer that the workers were not told of yet must not reach them before its revocation.
        step.offered = [one for one in step.offered if one.request_id != request_id]

    def _withdraw(self, request_id: PrefillRequestId, sending: _Sending, revocation: Revocation, step: Step) -> None:
        if not sending.is_revoked:
            sending.is_revoked, sending.manifest = True, None
            step.offered = [one for one in step.offered if one.request_id != request_id or not one.ready_tokens]
            step.revoked[request_id] = revocation

    # ---------------------------------------------------------------------------------------------- called from vLLM

    def arrived(self, request: Request, step: Step) -> None:
        """A request has entered the engine. Requests without ``do_remote_decode`` are ignored from here on."""
        params, request_id = request.params, PrefillRequestId(request.request_id)
        if params is None or not asks(params, "do_remote_decode") or request_id in self._sending:
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
        sending = _Sending(request, name, request.digest(num_tokens), num_tokens)
        sending.is_streamed = not self._terms.groups.have_windows
        self._sending[request_id] = sending
        self._timelines.begin(request, State.PREFILL_QUEUED)
        if self._terms.mode.is_push:
            # Decode's registration may arrive first: tell the workers that there is such a request.
            self._offer(request_id, sending, step)

    def scheduled(self, progress: Iterable[Progress], blocks: BlockPool, step: Step) -> None:
        """Offers the tokens that the step being built computes."""
        for one in progress:
            step.is_idle = False
            sending = self._sending.get(PrefillRequestId(one.request_id))
            if sending is not None:
                self._advance(PrefillRequestId(one.request_id), sending, one, blocks, step)

    def is_offering(self, request_id: str) -> bool:
        """Whether a request that has not ended is to be offered."""
        return PrefillRequestId(request_id) in self._sending

    def is_read(self, request_id: str) -> bool:
        """Whether the workers may be reading the blocks of a request that is still running."""
        sending = self._sending.get(PrefillRequestId(request_id))
        return sending is not None and sending.is_read

    def keeps(self, request_id: str) -> bool:
        """Whether a request has ended and its blocks are kept for decode."""
        return PrefillRequestId(request_id) in self._kept

    def is_named(self, request_id: str) -> bool:
        """Whether a manifest names the blocks of a request."""
        sending = self._sending.get(PrefillRequestId(request_id))
        return sending is not None and sending.manifest is not None

    def preempted(self, request_id: str, blocks: BlockPool, step: Step) -> None:
        """A request is preempted while workers may read its blocks: holds them until no rank reads them."""
        sending = self._sending[PrefillRequestId(request_id)]
        sending.block_ids, sending.ready_tokens, sending.manifest = (), 0, None
        sending.is_read = sending.is_streamed = False
        hold = self._holds.take(blocks, request_id)
        self._draining.add(hold)
        step.preempted.append((PrefillRequestId(request_id), hold))

    def finished(
        self, request: Request, is_whole: bool, block_ids: BlockIds, blocks: BlockPool, step: Step
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; ``is_whole`` if its whole prompt was computed.

        Returns: whether vLLM must keep its blocks until `ended` names it, and the parameters for decode's request.
        """
        request_id = PrefillRequestId(request.request_id)
        sending = self._sending.pop(request_id, None)
        if sending is None:
            return False, None
        if is_whole and self._is_kept(sending, block_ids):
            assert sending.manifest is not None
            if self._terms.mode.is_push and (blocks.are_shared or not sending.is_streamed):
                self._offer(request_id, sending, step)
            step.finished.append(request_id)
            self._kept[request_id] = self._kept_now(request, block_ids)
            if self._closed is not None:
                self._revoked_at[request_id] = self._clock.now_seconds() + GRACE_SECONDS
            transfer_id = (request.params or {}).get("transfer_id")
            params = prefill_params(
                self._own,
                sending.manifest,
                transfer_id=transfer_id,
                transfer_mode=self._terms.mode,
                cached_tokens=sending.cached_tokens or 0,
            )
            return True, params
        if is_whole and not sending.is_revoked:
            lost = HandOverFailed(FailureCause.RANGE, "it no longer has the blocks of its prompt")
            self._failures.not_offered(request_id, sending.refused or lost)
        # It may have arrived since the last step. The offer without tokens stays, so that ranks of decode that have
        # registered for it are told that it has ended.
        step.offered = [one for one in step.offered if one.request_id != request_id or not one.ready_tokens]
        if sending.is_offered:
            step.stopped[request_id] = "prefill's request ended before it was computed"
        if sending.is_read:
            self._kept[request_id] = self._kept_now(request, block_ids)
            self._taken_back.add(request_id)
            return True, None
        if sending.is_offered:
            step.unkept.add(request_id)
        return False, None

    def let_go(self, blocks: BlockPool) -> set[str]:
        """Revoked requests, since the last call, that vLLM may free; their blocks are held until `ended` names them.

        Only while the engine is paused: a pause waits until vLLM has freed all requests, and transfers of a decode
        engine that has vanished stay in flight for long.
        """
        if self._closed is None:
            return set()
        found = {one for one in self._taken_back if one in self._kept and one not in self._let_go}
        self._let_go |= {one: self._holds.take(blocks, one) for one in found}
        return set(found)

    def ended(self, sent: Iterable[str], quiet: Iterable[int], blocks: BlockPool) -> tuple[int, int]:
        """Takes what all ranks have reported: requests whose blocks vLLM frees now, and idle holds, which are freed.

        Returns: how many offers have ended that were not taken back, and how many blocks are given back to others.
        """
        num_served = num_for_others = 0
        for hold in quiet:
            if hold in self._draining:
                self._draining.remove(hold)
                self._holds.give_back(blocks, hold)
        for request_id in map(PrefillRequestId, sent):
            held = self._let_go.pop(request_id, None)
            if held is not None:
                self._holds.give_back(blocks, held)
            kept = self._kept.pop(request_id, None)
            is_taken_back = request_id in self._taken_back or request_id in self._giving_way
            num_served += kept is not None and not is_taken_back
            if kept is not None and request_id in self._for_others:
                num_for_others += kept.num_blocks
            self._for_others.discard(request_id)
            self._spared.pop(request_id, None)
            self._taken_back.discard(request_id)
            self._giving_way.pop(request_id, None)
            if self._asked:
                self._asked = {number: one for number, one in self._asked.items() if one != request_id}
            self._revoked_at.pop(request_id, None)
        return num_served, num_for_others

    # -------------------------------------------------------------------------------------------------------- inside

    def _advance(
        self, request_id: PrefillRequestId, sending: _Sending, one: Progress, blocks: BlockPool, step: Step
    ) -> None:
        is_done = sending.manifest is not None and not one.replaces and one.num_computed_tokens >= sending.num_tokens
        self._timelines.enter(request_id, State.PREFILL_COMPUTING)
        if is_done and self._terms.groups.have_states:
            reason = "its states are about to be overwritten by those of later tokens"
            self._withdraw(request_id, sending, Revocation(RevocationCause.STATES, reason), step)
        if one.replaces or not sending.block_ids:
            sending.block_ids = one.block_ids
            if sending.cached_tokens is None:
                sending.cached_tokens = one.begin_token
            if one.begin_token and self.is_stale(sending.request.adapter):
                reason = "it begins with KV that other weights have computed"
                self._withdraw(request_id, sending, Revocation(RevocationCause.WEIGHTS, reason), step)
        elif one.block_ids and not is_done:
            sending.block_ids = tuple([*old, *new] for old, new in zip(sending.block_ids, one.block_ids, strict=True))
        if is_done or sending.is_revoked:
            return
        sending.ready_tokens = min(one.num_computed_tokens, sending.num_tokens)
        sending.manifest = self._manifest(request_id, sending, blocks)
        # Tokens that another connector loads may turn out invalid when this step has ended, so they are not read early.
        is_held = self.is_read_early and sending.is_streamed and not blocks.are_shared
        if is_held or (sending.manifest is not None and not self._terms.mode.is_push):
            self._offer(request_id, sending, step, is_held=is_held)

    def _manifest(self, request_id: PrefillRequestId, sending: _Sending, blocks: BlockPool) -> Manifest | None:
        sending.refused = None
        if sending.ready_tokens < sending.num_tokens:
            return None
        if sending.request.adapter and sending.request.digest(sending.num_tokens) != sending.digest:
            sending.refused = HandOverFailed(FailureCause.REVOKED, "its adapter was replaced while it was computed")
            return None
        # If decode recomputes the last token, the window of that token decides which blocks it needs.
        first_tokens = blocks.first_tokens(sending.num_tokens - self._terms.groups.have_windows)
        try:
            return Manifest(
                protocol=PROTOCOL,
                incarnation=self.incarnation,
                request_id=request_id,
                digest=sending.digest,
                num_tokens=sending.num_tokens,
                block_sizes=self._terms.groups.block_sizes,
                context_parallel=(1, 1),
                groups=self._terms.groups.ranges(sending.block_ids, first_tokens, sending.num_tokens),
                lease_seconds=self._terms.lease_seconds,
                num_media=sending.request.num_media,
            )
        except ValueError as error:
            reason = f"its blocks do not match its {sending.num_tokens} tokens: {error}"
            sending.refused = HandOverFailed(FailureCause.RANGE, reason)
            return None

    def _is_kept(self, sending: _Sending, block_ids: BlockIds) -> bool:
        """Whether the request still has the blocks that its manifest names."""
        manifest = sending.manifest
        if manifest is None or len(manifest.groups) != len(block_ids):
            return False
        first_tokens = tuple(group.first_token for group in manifest.groups)
        now = self._terms.groups.ranges(block_ids, first_tokens, manifest.num_tokens)
        return now == manifest.groups and not any(NULL_BLOCK_ID in group.block_ids for group in now)

    def _offer(self, request_id: PrefillRequestId, sending: _Sending, step: Step, *, is_held: bool = False) -> None:
        sending.is_offered = True
        sending.is_read = sending.is_read or (is_held and sending.ready_tokens > 0)
        groups: tuple[BlockRange, ...] = ()
        if sending.manifest is not None:
            groups = sending.manifest.groups
        elif sending.block_ids:
            groups = self._terms.groups.growing(sending.block_ids, sending.num_tokens)
        step.offered.append(
            OfferUpdate(
                request_id,
                sending.name,
                sending.digest,
                sending.num_tokens,
                groups,
                sending.ready_tokens,
                sending.manifest,
                is_held,
                self._timelines.trace_of(request_id),
            )
        )
