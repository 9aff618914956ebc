# SPDX-License-Identifier: Apache-2.0
"""Decode: what one request fetches from prefill, whether that matches its prompt, and which blocks it fills."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcached_nixl.scheduler.engine import Request
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.manifest import BlockRange
from kvcached_nixl.wire.params import FetchParams
from kvcached_nixl.wire.step import BlockIds

__all__ = ["ANY_ADAPTER", "NULL_BLOCK_ID", "Terms", "FetchRequest", "is_meant"]

ANY_ADAPTER = -1
"""In place of a LoRA adapter's number: any adapter."""

NULL_BLOCK_ID = 0
"""vLLM's placeholder block: it holds no token's KV. Every request with a sliding window has it in its block table."""


def is_meant(adapter: int | None, used: int) -> bool:
    """Whether a selection covers what was computed with the adapter ``used`` (0 for none). ``adapter`` selects one
    adapter by its number, any adapter (``ANY_ADAPTER``), or everything (None)."""
    return adapter is None or (bool(used) and adapter in (used, ANY_ADAPTER))


@dataclass(frozen=True)
class Terms:
    """Settings that apply to every hand-over of an engine.

    Attributes:
        block_sizes: per KV-cache group, tokens in a logical block.
        mode: who starts a transfer.
        drops_blocks: some KV-cache group frees blocks while a request is computed (a sliding window).
        recomputes: ``kv_load_failure_policy`` is "recompute".
        lease_seconds: the lease that prefill grants; decode assumes it where there is no manifest to say otherwise.
        timeout_seconds: time after which a hand-over fails.
    """

    block_sizes: tuple[int, ...]
    mode: TransferMode
    drops_blocks: bool
    recomputes: bool
    lease_seconds: float
    timeout_seconds: float

    @property
    def step_tokens(self) -> int:
        """A hand-over begins at a multiple of this many tokens: where blocks of all KV-cache groups begin."""
        return math.lcm(*self.block_sizes)


@dataclass
class FetchRequest:
    """A decode request whose parameters name a prefill. One per request, used on the engine's thread only.

    Attributes:
        fetch: its parameters, which name the prefill; None if they cannot be used.
        arrived_at_seconds: when its timeout starts (rule R4).
        adapter: the engine's number of its LoRA adapter; 0 for none.
        lacks_media: its prompt has placeholders for images, sounds, ... that did not come with it, so computing it here
            would give a wrong answer. Set by `check`.
        refused: why its KV is not handed over.
        is_checked: `check` has compared its prompt with the manifest.
        is_tried: it was given blocks, or refused. From then on it is computed here, e.g. after a preemption.
        digest: of the first ``num_tokens`` tokens, which prefill has.
        end_token: one past the last token to fetch.
    """

    fetch: FetchParams | None
    arrived_at_seconds: float
    adapter: int = 0
    lacks_media: bool = False
    refused: HandOverFailed | None = None
    is_checked: bool = False
    is_tried: bool = False
    digest: str = ""
    num_tokens: int = 0
    end_token: int = 0

    @property
    def may_be_computed(self) -> bool:
        """Whether decode has everything it needs to compute the prompt itself. If the digests are equal, prefill has
        computed the same prompt: what looks like a placeholder for an image is text in it."""
        manifest = None if self.fetch is None else self.fetch.manifest
        return not self.lacks_media or (manifest is not None and manifest.digest == self.digest)

    def check(self, request: Request, terms: Terms) -> None:
        """Compares the manifest with the prompt, and sets ``refused``, or how many tokens to fetch. Idempotent."""
        if self.is_checked:
            return
        self.is_checked = True
        self.end_token = self.num_tokens = num_tokens = request.num_prompt_tokens
        self.lacks_media = request.lacks_media
        if self.fetch is None:
            return
        manifest = self.fetch.manifest
        if manifest is not None:
            self.num_tokens = num_tokens = manifest.num_tokens
            self.end_token = min(num_tokens, request.num_prompt_tokens)
            if num_tokens > request.num_prompt_tokens:
                reason = f"prefill computed {num_tokens} tokens, and the prompt has {request.num_prompt_tokens}"
                self.refused = HandOverFailed(FailureCause.DIGEST, reason)
                return
        self.digest = request.digest(num_tokens)
        self.lacks_media |= manifest is not None and manifest.num_media > request.num_media
        if manifest is not None and manifest.digest != self.digest:
            self.refused = HandOverFailed(
                FailureCause.DIGEST, f"prefill computed another prompt of {num_tokens} tokens"
            )
            if self.lacks_media:
                reason = f"prefill's prompt has {manifest.num_media} images, sounds, ..., decode's {request.num_media}"
                self.refused = HandOverFailed(FailureCause.MEDIA, f"{reason}; send them to decode, too")
        if terms.drops_blocks:
            # Decode recomputes the last token, and that token's window begins one token before the next token's.
            self.end_token = min(self.end_token, request.num_prompt_tokens - 1)

    def groups(self, block_ids: BlockIds, first_token: int, terms: Terms) -> tuple[BlockRange, ...]:
        """Returns the blocks to fill, per KV-cache group. Blocks that a sliding window has passed are not among them.

        Raises:
            HandOverFailed: decode has no blocks for some of the tokens, or prefill has not kept theirs.
        """
        found = []
        assert self.fetch is not None
        theirs = self.fetch.manifest.groups if self.fetch.manifest is not None else None
        for place, (group, size) in enumerate(zip(block_ids, terms.block_sizes, strict=True)):
            begin, end = first_token // size, -(-self.end_token // size)
            while begin < end and begin < len(group) and group[begin] == NULL_BLOCK_ID:
                begin += 1
            blocks = tuple(group[begin:end])
            # A group may need no block: a chunk of chunked attention that begins with the prompt's last token.
            is_whole = len(blocks) == end - begin and (blocks or terms.drops_blocks) and NULL_BLOCK_ID not in blocks
            if not is_whole or (begin * size > first_token and not terms.drops_blocks):
                raise HandOverFailed(
                    FailureCause.RANGE, f"it has no blocks for the tokens {first_token} to {self.end_token}"
                )
            if theirs is not None and (len(theirs) != len(block_ids) or theirs[place].first_token > begin * size):
                raise HandOverFailed(FailureCause.RANGE, f"prefill has not kept the tokens from {begin * size} on")
            found.append(BlockRange(begin * size, blocks))
        if not any(one.block_ids for one in found):
            raise HandOverFailed(
                FailureCause.RANGE, f"it has no blocks for the tokens {first_token} to {self.end_token}"
            )
        return tuple(found)
