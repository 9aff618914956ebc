# SPDX-License-Identifier: Apache-2.0
"""Prefill: what of its requests decode may have. Once per engine, on its thread.

It follows each request through vLLM's scheduler. When the last of its prompt is scheduled, all that the hand-over says
of itself is known (`wire.manifest`), and the workers are told; when it has ended, the client is. Blocks are given back
to vLLM only when every rank has said that nobody needs them (rule R2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvcached_nixl.clock import Clock
from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.scheduler.engine import Blocks, Progress, Request
from kvcached_nixl.scheduler.failures import Failures
from kvcached_nixl.scheduler.fetch_request import NULL_BLOCK_ID, Terms, is_meant
from kvcached_nixl.scheduler.holds import Holds
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.manifest import PROTOCOL, Manifest, ranges_of
from kvcached_nixl.wire.params import RemotePrefill, asks, prefill_params, read_offer
from kvcached_nixl.wire.step import BlockIds, OfferUpdate, Step

__all__ = ["PrefillOffers"]

GRACE_SECONDS = 1.0
"""How long decode has for what ends while the engine waits for its last requests (``/pause?mode=wait``)."""


@dataclass
class _Sending:
    """A request of prefill whose KV decode may have.

    Attributes:
        ready_tokens: how many the workers were told of, or would have been.
        manifest: when its whole prompt is scheduled.
        refused: why there is none then.
        is_offered: the workers know of it, with or without tokens, and whatever it has lost since.
        is_read: they know of tokens in blocks that it still has, and may be reading them before it has ended.
        is_revoked: it was taken back while it was computed, so decode may have none of it any more.
        is_streamed: what a step has computed is offered at once, if it is read early. Not when it was preempted: blocks
            that are held make no room for whoever needed it, who would be preempted, too, and so on for ever. Nor where
            blocks leave a window while the prompt is computed: they are somebody else's at once.
    """

    request: Request
    name: str
    digest: str
    num_tokens: int
    block_ids: BlockIds = ()
    ready_tokens: int = 0
    manifest: Manifest | None = None
    refused: HandOverFailed | None = None
    is_offered: bool = False
    is_read: bool = False
    is_revoked: bool = False
    is_streamed: bool = True


class PrefillOffers:
    """See the module.

    Args:
        own: what a peer needs to find this engine's ranks.
        start: drawn when this engine started.

    Attributes:
        start: as above; drawn anew when the engine's weights have changed.
        stale: there may be blocks in the prefix cache, which requests may begin with, that others than these have
            computed: the model's weights (None), a LoRA adapter, any LoRA adapter.
        is_read_early: the workers read what a step has computed before its request has ended: to write it (push), or to
            copy it into a slab.
    """

    def __init__(
        self, own: RemotePrefill, incarnation: str, terms: Terms, clock: Clock, holds: Holds, failures: Failures
    ) -> None:
        self._own = own
        self.incarnation = incarnation
        self._terms = terms
        self._clock = clock
        self._holds = holds
        self._sending: dict[PrefillRequestId, _Sending] = {}
        # Those that have ended -> the adapter that they were computed with.
        self._kept: dict[PrefillRequestId, int] = {}
        self._taken_back: set[PrefillRequestId] = set()
        # Of those, what vLLM has freed already -> its hold.
        self._let_go: dict[PrefillRequestId, int] = {}
        self._closed: str | None = None
        self.stale: set[int | None] = set()
        self._revoked_at = Deadlines[PrefillRequestId]()
        self._draining: set[int] = set()
        self._failures = failures
        self.is_read_early = terms.pushes

    @property
    def num_kept(self) -> int:
        """Requests that have ended, and whose blocks are kept."""
        return len(self._kept)

    @property
    def due_at_seconds(self) -> float | None:
        """When the next one is taken back."""
        return self._revoked_at.first_seconds

    def is_stale(self, used: int) -> bool:
        """Whether what the prefix cache has for an adapter (0 for none) may be of other weights."""
        return any(is_meant(one, used) for one in self.stale)

    # --------------------------------------------------------------------------------------------------- taking it back

    def revoke(self, reason: str, step: Step, *, adapter: int | None = None, running: bool = True) -> None:
        """Decode may have nothing more of what was offered: tokens of ownership go first, then blocks (rule R12).

        Args:
            adapter: only what was computed with it, or with any; None for all.
            running: such as are still computed, too. What of them is computed already stays theirs.
        """
        for request_id, used in self._kept.items():
            if is_meant(adapter, used):
                self._take_back(request_id, reason, step)
        for request_id, sending in self._sending.items() if running else ():
            # Of what has not begun nothing is known yet that could be out of date.
            if is_meant(adapter, sending.request.adapter) and (sending.block_ids or sending.ready_tokens):
                self._withdraw(request_id, sending, reason, step)

    def close(self, reason: str, step: Step, *, grace_seconds: float) -> None:
        """Take back what has ended, or ends from now on, after so many seconds, until `reopen`."""
        self._closed = reason
        due = self._clock.now_seconds() + grace_seconds
        self._revoked_at.move({request_id: due for request_id in self._kept})
        self.turn(step)

    def reopen(self) -> None:
        """What ends from now on is kept as long as its lease lasts."""
        self._closed = None
        self._revoked_at.clear()

    def turn(self, step: Step) -> None:
        """Take back what is due."""
        for request_id in self._revoked_at.take_due(self._clock.now_seconds()):
            if request_id in self._kept:
                self._take_back(request_id, self._closed or "", step)

    def _take_back(self, request_id: PrefillRequestId, reason: str, step: Step) -> None:
        self._revoked_at.pop(request_id, None)
        if request_id in self._taken_back:
            return
        self._taken_back.add(request_id)
        step.revoked[request_id] = reason
        # Not computed yet, or not told: nobody shall hear of it first.
        step.offered = [one for one in step.offered if one.request_id != request_id]

    def _withdraw(self, request_id: PrefillRequestId, sending: _Sending, reason: str, step: Step) -> None:
        if not sending.is_revoked:
            sending.is_revoked, sending.manifest = True, None
            step.offered = [one for one in step.offered if one.request_id != request_id or not one.ready_tokens]
            step.revoked[request_id] = reason

    # ------------------------------------------------------------------------------------------------- what vLLM asks

    def arrived(self, request: Request, step: Step) -> None:
        """A request has entered the engine. One that names no decode is not looked at again."""
        params, request_id = request.params, PrefillRequestId(request.request_id)
        if params is None or not asks(params, "do_remote_decode") or request_id in self._sending:
            return
        # Both roles at once: decode's half refuses it.
        if asks(params, "do_remote_prefill"):
            return
        try:
            name = read_offer(params, request.request_id)
        except HandOverFailed as failure:
            self._failures.not_offered(request_id, failure)
            return
        if request.is_session:
            reason = (
                "it is a streaming session (resumable), whose blocks go on being filled with later input; expected a "
                "complete prompt. It is computed as without kv_transfer_params. Send them with requests of one "
                "prompt each"
            )
            self._failures.not_offered(request_id, HandOverFailed(FailureCause.PARAMETERS, reason))
            return
        num_tokens = request.num_prompt_tokens
        sending = _Sending(request, name, request.digest(num_tokens), num_tokens)
        sending.is_streamed = not self._terms.drops_blocks
        self._sending[request_id] = sending
        if self._terms.pushes:
            # Whoever registers for it need not wait to learn whether there is such a request.
            self._offer(request_id, sending, step)

    def scheduled(self, progress: Iterable[Progress], blocks: Blocks, step: Step) -> None:
        """What is computed in the step that is being built."""
        for one in progress:
            step.is_idle = False
            sending = self._sending.get(PrefillRequestId(one.request_id))
            if sending is not None:
                self._advance(PrefillRequestId(one.request_id), sending, one, blocks, step)

    def is_read(self, request_id: str) -> bool:
        """Whether the workers may be reading the blocks of a request that is still computed."""
        sending = self._sending.get(PrefillRequestId(request_id))
        return sending is not None and sending.is_read

    def keeps(self, request_id: str) -> bool:
        """Whether a request has ended, and its blocks are kept for decode."""
        return PrefillRequestId(request_id) in self._kept

    def is_named(self, request_id: str) -> bool:
        """Whether a manifest names the blocks of a request."""
        sending = self._sending.get(PrefillRequestId(request_id))
        return sending is not None and sending.manifest is not None

    def preempted(self, request_id: str, blocks: Blocks, step: Step) -> None:
        """A request loses its blocks; they are held until nothing reads them."""
        sending = self._sending[PrefillRequestId(request_id)]
        sending.block_ids, sending.ready_tokens, sending.manifest = (), 0, None
        sending.is_read = sending.is_streamed = False
        hold = self._holds.take(blocks, request_id)
        self._draining.add(hold)
        step.preempted.append((PrefillRequestId(request_id), hold))

    def finished(
        self, request: Request, is_whole: bool, block_ids: BlockIds, blocks: Blocks, step: Step
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; ``is_whole`` if its prompt was computed to the end.

        Returns: whether its blocks must be kept until `ended` names it, and the parameters for decode's request.
        """
        request_id = PrefillRequestId(request.request_id)
        sending = self._sending.pop(request_id, None)
        if sending is None:
            return False, None
        if is_whole and self._is_kept(sending, block_ids):
            assert sending.manifest is not None
            if self._terms.pushes and (blocks.are_shared or not sending.is_streamed):
                self._offer(request_id, sending, step)
            step.finished.append(request_id)
            self._kept[request_id] = request.adapter
            if self._closed is not None:
                self._revoked_at[request_id] = self._clock.now_seconds() + GRACE_SECONDS
            transfer_id = (request.params or {}).get("transfer_id")
            mode = "push" if self._terms.pushes else "pull"
            params = prefill_params(self._own, sending.manifest, transfer_id=transfer_id, transfer_mode=mode)
            return True, params
        if is_whole and not sending.is_revoked:
            lost = HandOverFailed(FailureCause.RANGE, "it does not have the blocks of its prompt any more")
            self._failures.not_offered(request_id, sending.refused or lost)
        # It may have arrived since the last step. Whoever has registered for it hears that it was there and is gone.
        step.offered = [one for one in step.offered if one.request_id != request_id or not one.ready_tokens]
        if sending.is_offered:
            step.stopped[request_id] = "prefill's request ended before it was computed"
        if sending.is_read:
            self._kept[request_id] = request.adapter
            self._taken_back.add(request_id)
            return True, None
        if sending.is_offered:
            step.unkept.add(request_id)
        return False, None

    def let_go(self, blocks: Blocks) -> set[str]:
        """Requests that vLLM may free, since the last call; their blocks are held until `ended` names them.

        A pause waits for all requests, and what decode vanished with is in flight for long.
        """
        if self._closed is None:
            return set()
        found = {one for one in self._taken_back if one in self._kept and one not in self._let_go}
        self._let_go |= {one: self._holds.take(blocks, one) for one in found}
        return set(found)

    def ended(self, sent: Iterable[str], quiet: Iterable[int], blocks: Blocks) -> None:
        """What all ranks have reported: requests whose blocks vLLM frees now, and holds, which are given back."""
        for hold in quiet:
            if hold in self._draining:
                self._draining.remove(hold)
                self._holds.give_back(blocks, hold)
        for request_id in map(PrefillRequestId, sent):
            held = self._let_go.pop(request_id, None)
            if held is not None:
                self._holds.give_back(blocks, held)
            self._kept.pop(request_id, None)
            self._taken_back.discard(request_id)
            self._revoked_at.pop(request_id, None)

    # -------------------------------------------------------------------------------------------------------- inside

    def _advance(
        self, request_id: PrefillRequestId, sending: _Sending, one: Progress, blocks: Blocks, step: Step
    ) -> None:
        is_done = sending.manifest is not None and not one.replaces and one.num_computed_tokens >= sending.num_tokens
        if one.replaces or not sending.block_ids:
            sending.block_ids = one.block_ids
            if one.begin_token and self.is_stale(sending.request.adapter):
                self._withdraw(request_id, sending, "it begins with what other weights have computed", step)
        elif one.block_ids and not is_done:
            sending.block_ids = tuple([*old, *new] for old, new in zip(sending.block_ids, one.block_ids, strict=True))
        if is_done or sending.is_revoked:
            return
        sending.ready_tokens = min(one.num_computed_tokens, sending.num_tokens)
        sending.manifest = self._manifest(request_id, sending, blocks)
        # What another connector has loaded may be taken back when this step has ended.
        is_held = self.is_read_early and sending.is_streamed and not blocks.are_shared
        if is_held or (sending.manifest is not None and not self._terms.pushes):
            self._offer(request_id, sending, step, is_held=is_held)

    def _manifest(self, request_id: PrefillRequestId, sending: _Sending, blocks: Blocks) -> Manifest | None:
        if sending.ready_tokens < sending.num_tokens:
            return None
        if sending.request.adapter and sending.request.digest(sending.num_tokens) != sending.digest:
            sending.refused = HandOverFailed(FailureCause.REVOKED, "its adapter was replaced meanwhile")
            return None
        # Where decode computes the last token again, its window begins there.
        first_tokens = blocks.first_tokens(sending.num_tokens - self._terms.drops_blocks)
        try:
            return Manifest(
                protocol=PROTOCOL,
                incarnation=self.incarnation,
                request_id=request_id,
                digest=sending.digest,
                num_tokens=sending.num_tokens,
                block_size=self._terms.block_size,
                context_parallel=(1, 1),
                groups=ranges_of(sending.block_ids, first_tokens, sending.num_tokens, self._terms.block_size),
                lease_seconds=self._terms.lease_seconds,
                num_media=sending.request.num_media,
            )
        except ValueError as error:
            reason = f"its blocks are not those of its {sending.num_tokens} tokens: {error}"
            sending.refused = HandOverFailed(FailureCause.RANGE, reason)
            return None

    def _is_kept(self, sending: _Sending, block_ids: BlockIds) -> bool:
        """Whether the request still has the blocks that its manifest names."""
        if sending.manifest is None or len(sending.manifest.groups) != len(block_ids):
            return False
        size = self._terms.block_size
        for group, now in zip(sending.manifest.groups, block_ids, strict=True):
            begin = group.first_token // size
            blocks = tuple(now[begin : begin + len(group.block_ids)])
            if blocks != group.block_ids or NULL_BLOCK_ID in blocks:
                return False
        return True

    def _offer(self, request_id: PrefillRequestId, sending: _Sending, step: Step, *, is_held: bool = False) -> None:
        sending.is_offered = True
        sending.is_read = sending.is_read or (is_held and sending.ready_tokens > 0)
        step.offered.append(
            OfferUpdate(
                request_id,
                sending.name,
                sending.digest,
                sending.num_tokens,
                sending.block_ids,
                sending.ready_tokens,
                sending.manifest,
                is_held,
            )
        )
