# SPDX-License-Identifier: Apache-2.0
"""Prefill: one running request whose KV is to be offered to decode: its blocks, its progress, and its manifest."""

from __future__ import annotations

from dataclasses import dataclass

from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.scheduler.engine import BlockPool, Progress, Request
from kvcached_nixl.scheduler.terms import Terms
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.kv_groups import NULL_BLOCK_ID, KVGroups
from kvcached_nixl.wire.manifest import PROTOCOL, BlockRange, Manifest
from kvcached_nixl.wire.step import BlockIds, OfferUpdate, Step

__all__ = ["OfferRequest"]


@dataclass
class OfferRequest:
    """A running request of prefill whose KV is, or will be, offered to decode. Used on the engine's thread only.

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
        is_streamed: tokens are offered as soon as a step has computed them, if workers read early (``is_read_early``).
            Not after a preemption: its held blocks would not be free for the request that needed them, which would be
            preempted, too, and so on without end. Nor if blocks leave a sliding window while the prompt is computed:
            vLLM gives them to other requests immediately.
    """

    request_id: PrefillRequestId
    request: Request
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

    # ------------------------------------------------------------------------------------------------ its blocks

    @property
    def has_computed(self) -> bool:
        """Whether it has KV, which could be out of date."""
        return bool(self.block_ids or self.ready_tokens)

    def is_past_prompt(self, progress: Progress) -> bool:
        """Whether its prompt was computed by an earlier step, and this one computes what comes after it."""
        is_past = progress.num_computed_tokens >= self.num_tokens
        return self.manifest is not None and not progress.replaces and is_past

    def begins(self, progress: Progress) -> bool:
        """Whether the step is the first one, or the first one after a preemption."""
        return progress.replaces or not self.block_ids

    def take_blocks(self, progress: Progress) -> None:
        """Takes the blocks that it is given for a step."""
        if self.begins(progress):
            self.block_ids = progress.block_ids
            if self.cached_tokens is None:
                self.cached_tokens = progress.begin_token
        elif progress.block_ids:
            pairs = zip(self.block_ids, progress.block_ids, strict=True)
            self.block_ids = tuple([*old, *new] for old, new in pairs)

    def lose_blocks(self) -> None:
        """It is preempted."""
        self.block_ids, self.ready_tokens, self.manifest = (), 0, None
        self.is_read = self.is_streamed = False

    def still_has(self, block_ids: BlockIds, groups: KVGroups) -> bool:
        """Whether the blocks that its manifest names are among these, which it ends with."""
        if self.manifest is None or len(self.manifest.groups) != len(block_ids):
            return False
        first_tokens = tuple(group.first_token for group in self.manifest.groups)
        now = groups.ranges(block_ids, first_tokens, self.manifest.num_tokens)
        return now == self.manifest.groups and not any(NULL_BLOCK_ID in group.block_ids for group in now)

    # ---------------------------------------------------------------------------------------------- its manifest

    def compute(self, num_computed_tokens: int, blocks: BlockPool, incarnation: str, terms: Terms) -> None:
        """A step computes it so far. Makes its manifest if that is its whole prompt."""
        self.ready_tokens = min(num_computed_tokens, self.num_tokens)
        self.manifest = self.refused = None
        if self.ready_tokens < self.num_tokens:
            return
        if self.request.adapter and self.request.digest(self.num_tokens) != self.digest:
            self.refused = HandOverFailed(FailureCause.REVOKED, "its adapter was replaced while it was computed")
            return
        # If decode recomputes the last token, the window of that token decides which blocks it needs.
        recomputes = terms.groups.have_windows and self.num_tokens == self.request.num_prompt_tokens
        first_tokens = blocks.first_tokens(self.num_tokens - recomputes)
        try:
            self.manifest = Manifest(
                protocol=PROTOCOL,
                incarnation=incarnation,
                request_id=self.request_id,
                digest=self.digest,
                num_tokens=self.num_tokens,
                block_sizes=terms.groups.block_sizes,
                context_parallel=(1, 1),
                groups=terms.groups.ranges(self.block_ids, first_tokens, self.num_tokens),
                lease_seconds=terms.lease_seconds,
                num_media=self.request.num_media,
            )
        except ValueError as error:
            reason = f"its blocks do not match its {self.num_tokens} tokens: {error}"
            self.refused = HandOverFailed(FailureCause.RANGE, reason)

    # --------------------------------------------------------------------------------- what the workers are told

    def offer(self, step: Step, groups: KVGroups, trace: str, *, is_held: bool = False) -> None:
        """Tells the workers how far it is computed.

        Args:
            trace: that it belongs to; "" if it is not traced.
            is_held: they may read its blocks before it has ended: its blocks are held if it loses them.
        """
        self.is_offered = True
        self.is_read = self.is_read or (is_held and self.ready_tokens > 0)
        ranges: tuple[BlockRange, ...] = ()
        if self.manifest is not None:
            ranges = self.manifest.groups
        elif self.block_ids:
            ranges = groups.growing(self.block_ids, self.num_tokens)
        step.tell(
            OfferUpdate(
                self.request_id,
                self.name,
                self.digest,
                self.num_tokens,
                ranges,
                self.ready_tokens,
                self.manifest,
                is_held,
                trace,
            )
        )
