# SPDX-License-Identifier: Apache-2.0
"""Decode: what one request fetches from prefill, whether that fits its prompt, and its attempt to fetch it.

    WAITING ─── every rank has reported ─────────────────────────────────────────► forgotten: the KV has arrived
       │
       └─ failed, timed out, revoked, aborted ─► OVER, its blocks held ── every rank has reported ─► blocks are free

A request ends at once when its attempt does. Its blocks do not: they are taken from it, and free when no rank has a
transfer into them in flight (rules R2 and R9).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.ids import DecodeRequestId, LogicalBlock
from kvcached_nixl.scheduler.context import EngineContext
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.manifest import FEWEST_TOKENS, NULL_BLOCK_ID, BlockRange, Keeps, KVGroup, Manifest
from kvcached_nixl.wire.messages import draw_attempt, is_nameable
from kvcached_nixl.wire.params import FetchParams
from kvcached_nixl.wire.step import BlockIds, LeaseRenewal, UnneededOffer

if TYPE_CHECKING:
    from kvcached_nixl.vllm.adapter.requests import RequestView

logger = logging.getLogger(SERVER_LOGGER)


@dataclass(eq=False)
class FetchRequest:
    """A decode request whose parameters name a prefill. One per request, used on the engine's thread only.

    Attributes:
        fetch: its parameters, which name the prefill; None if they cannot be used.
        refused: why its KV is not handed over.
        computes: it may be computed here in place of its KV.
        cached_tokens: of its prompt, in prefill's prefix cache, as far as it is known.
        is_asked: decode has asked for it itself: its client has sent all of its prompt here.
        lacks_media: its prompt has placeholders for images, sounds, ... that a router may have sent to prefill only, so
            computing it here would give a wrong answer. Set by `check`.
        is_checked: `check` has compared its prompt with the manifest.
        is_tried: it was given blocks, or refused. From then on it is computed here, e.g. after a preemption.
        digest: of the first ``num_tokens`` tokens, which prefill has.
        first_token, end_token: the tokens to fetch; the latter is one past the last.
        attempt: its number; 0 before it was given blocks.
        begun_seconds: when it was given them.
        since_seconds: when its timeout began.
        is_waiting: it has blocks, and waits for the KV.
    """

    engine: EngineContext
    request: RequestView
    fetch: FetchParams | None
    refused: HandOverFailed | None
    computes: bool = True
    cached_tokens: int = 0
    is_asked: bool = False
    lacks_media: bool = False
    is_checked: bool = False
    is_tried: bool = False
    digest: str = ""
    num_tokens: int = 0
    first_token: int = 0
    end_token: int = 0
    attempt: int = 0
    begun_seconds: float = 0.0
    since_seconds: float = 0.0
    is_waiting: bool = False

    def __post_init__(self) -> None:
        self.request_id = DecodeRequestId(self.request.request_id)

    @property
    def may_be_computed(self) -> bool:
        """Whether decode has everything it needs to compute the prompt itself. If the digests are equal, prefill has
        computed the same prompt: what looks like a placeholder for an image is text in it."""
        return self.computes and (not self.lacks_media or self.has_own_offer)

    @property
    def recomputes(self) -> bool:
        """Whether it is computed here if it gets no KV."""
        return self.engine.stock.recomputes and self.may_be_computed

    @property
    def may_go_on(self) -> bool:
        """Whether what is left may be computed where the KV is here already, so that none is fetched."""
        return (self.computes or self.refused is None) and (not self.lacks_media or self.has_own_offer)

    @property
    def manifest(self) -> Manifest | None:
        """Of prefill's request that its parameters name; None if they name none."""
        return None if self.fetch is None else self.fetch.manifest

    @property
    def has_own_offer(self) -> bool:
        """Whether its parameters name the offer of a prompt that has the same digest."""
        return self.manifest is not None and self.manifest.digest == self.digest

    @property
    def prefill_request_id(self) -> str:
        return "" if self.manifest is None else self.manifest.request_id

    def check(self) -> None:
        """Compares the manifest with the prompt, and sets ``refused``, or how many tokens to fetch. Idempotent."""
        if self.is_checked:
            return
        self.is_checked = True
        request, groups, most_tokens = self.request, self.engine.groups, self._most_tokens()
        self.end_token = self.num_tokens = num_tokens = most_tokens
        manifest = self.manifest
        if not self.is_asked:
            num_media = 0 if manifest is None else manifest.num_media
            self.lacks_media = request.lacks_media or num_media > request.num_media
        if self.fetch is None:
            return
        if manifest is not None:
            self.num_tokens = num_tokens = manifest.num_tokens
            self.end_token = min(num_tokens, most_tokens)
            if num_tokens > most_tokens:
                # Of what there is: without a digest, its release would count for whatever offer the parameters name.
                self.digest = request.digest(most_tokens)
                reason = f"prefill computed {num_tokens} tokens, and the prompt has {request.num_prompt_tokens}"
                if groups.have_states:
                    reason += ", of which decode has to compute the last one"
                self.refused = HandOverFailed(FailureCause.DIGEST, reason)
                return
        self.digest = request.digest(num_tokens)
        if manifest is not None and manifest.digest != self.digest:
            self.refused = HandOverFailed(
                FailureCause.DIGEST, f"prefill computed another prompt of {num_tokens} tokens"
            )
            if self.lacks_media:
                reason = f"prefill's prompt has {manifest.num_media} images, sounds, ..., decode's {request.num_media}"
                self.refused = HandOverFailed(FailureCause.MEDIA, f"{reason}; send them to decode, too")
        if groups.have_windows:
            # Decode recomputes the last token, and that token's window begins one token before the next token's.
            self.end_token = min(self.end_token, request.num_prompt_tokens - 1)

    def check_start(self, num_computed_tokens: int) -> None:
        """Sets ``refused`` if KV cannot be loaded behind what decode has in its prefix cache, or may not be of decode's
        weights. Called after `check`."""
        step_tokens = self.engine.groups.step_tokens
        if self.refused is not None:
            return
        if not self.engine.knows_weights:
            reason = "decode's weights may have changed, and could not be read since"
            self.refused = HandOverFailed(FailureCause.REVOKED, reason)
        elif num_computed_tokens % step_tokens:
            reason = f"its first {num_computed_tokens} tokens end inside a block of {step_tokens}"
            self.refused = HandOverFailed(FailureCause.RANGE, reason)
        elif self.engine.blocks.is_producer:
            # vLLM's ``defer_block_free`` is for consumers.
            reason = (
                "kv_transfer_params have do_remote_prefill, but this engine's kv_role is kv_producer: its blocks may "
                "still be written when they are allocated again. Send the request to a server with kv_consumer, or "
                "start this one with kv_both"
            )
            self.refused = HandOverFailed(FailureCause.PARAMETERS, reason)

    def groups(self, block_ids: BlockIds, num_external_tokens: int) -> tuple[BlockRange, ...]:
        """Returns the blocks to fill, per KV-cache group, but for those that a sliding window has passed.

        Raises:
            HandOverFailed: its KV is not handed over, vLLM wants other tokens than it was told of, decode has no blocks
                for some of them, or prefill has not kept theirs.
        """
        if self.refused is not None:
            raise self.refused
        if self.first_token + num_external_tokens != self.end_token:
            reason = f"vLLM loads {num_external_tokens} of the tokens {self.first_token} to {self.end_token}"
            raise HandOverFailed(FailureCause.RANGE, reason)
        # It may be long since `check`, and decode goes on with the new adapter.
        if self.request.adapter and self.request.digest(self.num_tokens) != self.digest:
            raise HandOverFailed(FailureCause.REVOKED, "its adapter was replaced while it waited for blocks")
        groups = self.engine.groups
        pairs = zip(groups.all, block_ids, strict=True)
        found = [self._range(group, blocks) for group, blocks in pairs]
        # A group may need no block: a chunk of chunked attention that begins with the prompt's last token.
        is_complete = all(one.block_ids or groups.have_windows for one in found)
        if not is_complete or not any(one.block_ids for one in found):
            raise self._no_blocks()
        if self.manifest is not None:
            theirs = self.manifest.groups
            if len(theirs) != len(found):
                reason = f"prefill has {len(theirs)} KV-cache groups; expected {len(found)}"
                raise HandOverFailed(FailureCause.RANGE, reason)
            for one, their in zip(found, theirs, strict=True):
                if their.first_token > one.first_token:
                    reason = f"prefill has not kept the tokens from {one.first_token} on"
                    raise HandOverFailed(FailureCause.RANGE, reason)
        return tuple(found)

    def _range(self, group: KVGroup, blocks: list[LogicalBlock]) -> BlockRange:
        first = self.first_token // group.block_size * group.block_size
        if group.keeps is Keeps.WINDOW:
            while first < self.end_token and blocks[first // group.block_size :][:1] == [NULL_BLOCK_ID]:
                first += group.block_size
        found = group.range(blocks, first, self.end_token)
        end_token = found.first_token + len(found.block_ids) * group.block_size
        if end_token < self.end_token or NULL_BLOCK_ID in found.block_ids:
            raise self._no_blocks()
        return found

    def _no_blocks(self) -> HandOverFailed:
        reason = f"it has no blocks for the tokens {self.first_token} to {self.end_token}"
        return HandOverFailed(FailureCause.RANGE, reason)

    def renew(self) -> None:
        """Starts renewing the lease of what it fetches, if a heartbeat can name that."""
        assert self.fetch is not None
        fetch, manifest = self.fetch, self.manifest
        lease_seconds = self.engine.settings.kv_lease_duration_seconds if manifest is None else manifest.lease_seconds
        if is_nameable(fetch.lease_name):
            self.engine.step.tell(LeaseRenewal(self.request_id, fetch.prefill, fetch.lease_name, lease_seconds))
        else:
            logger.warning(
                "Request %s waits for the KV of %.80r, which a heartbeat cannot name: expected no comma, and at most 4 "
                "KB. Its lease cannot be renewed and lasts as long as prefill first granted. Send it with another "
                "X-Request-Id.",
                self.request_id,
                fetch.lease_name,
            )

    def release(self, attempt: int | None = None) -> None:
        """Tells prefill that decode does not need the offer's KV (vllm#41269): at once, or when ``attempt`` is over."""
        fetch = self.fetch
        # The end of a registration frees its offer. A release by name might count for a later request of that name.
        if fetch is not None and (attempt is None or fetch.manifest is not None):
            unneeded = UnneededOffer(fetch.prefill, self.prefill_request_id, fetch.name, self.digest, attempt)
            self.engine.step.tell(unneeded)

    def release_computed(self) -> None:
        """Tells prefill that its offer is not needed, if the request is computed here, and the offer is of its prompt:
        at once, or when its attempt is over. One that fails may be sent to another decode engine, with the same offer.
        """
        if self.recomputes and self.has_own_offer:
            self.release(self.attempt or None)

    def not_received(self, failure: HandOverFailed) -> None:
        """It does not get its KV: counted, and its client is told if it ends."""
        self.engine.failures.not_received(
            self.request_id, failure, attempt=self.attempt or None, prefill_request_id=self.prefill_request_id
        )

    def _most_tokens(self) -> int:
        """How many of its tokens prefill may have. States are handed over behind all tokens but the last, and decode
        computes that one with them; some prompts prefill leaves whole (`patches.arrival`), and decode computes them."""
        num_tokens = self.request.num_prompt_tokens
        if not self.engine.groups.have_states:
            return num_tokens
        return 0 if num_tokens < FEWEST_TOKENS or self.request.ends_in_media else num_tokens - 1


class FetchAttempts:
    """Requests that were given blocks, by the numbers of their attempts; see the module.

    Attributes:
        waiting: those that have their blocks and wait only for KV, in the order in which they were given them. Read on
            other threads, too.
        deadlines: of those, by the numbers of their attempts.
        num_quarantined_blocks: blocks held for requests that ended without KV.
    """

    def __init__(self, engine: EngineContext) -> None:
        self._engine = engine
        # Those of which not every rank has reported the end.
        self._attempts: dict[int, FetchRequest] = {}
        self.waiting: dict[DecodeRequestId, FetchRequest] = {}
        self.deadlines = Deadlines[int]()
        self._kept_by_others: dict[DecodeRequestId, set[int]] = {}
        self.num_quarantined_blocks = 0

    def find_waiting(self, number: int) -> FetchRequest | None:
        one = self._attempts.get(number)
        return one if one is not None and one.is_waiting else None

    def start(self, one: FetchRequest) -> None:
        """A request was given blocks, and waits. Its timeout begins."""
        one.attempt, one.is_waiting = draw_attempt(), True
        # Before others can see it.
        one.begun_seconds = one.since_seconds = self._engine.clock.now_seconds()
        self._attempts[one.attempt] = self.waiting[one.request_id] = one
        self.known([one.attempt])

    def known(self, numbers: Iterable[int]) -> None:
        """Prefill has not computed what these wait for yet, and will: their timeouts begin again."""
        now = self._engine.clock.now_seconds()
        for one in filter(None, map(self.find_waiting, numbers)):
            one.since_seconds = now
            self.deadlines[one.attempt] = now + self._engine.settings.handover_timeout_seconds

    def stop_waiting(self, one: FetchRequest) -> None:
        """The request goes on without its attempt, or has ended."""
        one.is_waiting = False
        self.deadlines.pop(one.attempt, None)
        del self.waiting[one.request_id]

    def hold(self, one: FetchRequest) -> None:
        """Takes the blocks from the request, until every rank has reported that nothing is in flight into them."""
        before = self._engine.holds.num_blocks
        self._engine.holds.take(one.request_id, one.attempt)
        self.num_quarantined_blocks += self._engine.holds.num_blocks - before

    def all_ranks_ended(self, number: int) -> FetchRequest | None:
        """No rank has a transfer of the attempt in flight. Frees its blocks, if they are held. Returns its request, if
        that still waits: all its KV has arrived."""
        one = self._attempts.pop(number, None)
        if one is None:
            return None
        if one.is_waiting:
            self.stop_waiting(one)
            return one
        if number not in self._kept_by_others.get(one.request_id, ()):
            self._give_back(number)
        return None

    def kept(self, request_id: DecodeRequestId) -> None:
        """Another connector keeps the blocks of a request that has just ended: they are free when both release them."""
        attempts = (one for one in self._attempts.values() if one.request_id == request_id and not one.is_waiting)
        held = {one.attempt for one in attempts}
        if held:
            self._kept_by_others[request_id] = held

    def let_go(self, request_ids: Iterable[str]) -> None:
        """Other connectors have released the blocks of these requests."""
        for request_id in map(DecodeRequestId, request_ids):
            for number in self._kept_by_others.pop(request_id, ()):
                if number not in self._attempts:
                    self._give_back(number)

    def _give_back(self, number: int) -> None:
        before = self._engine.holds.num_blocks
        self._engine.holds.give_back(number)
        self.num_quarantined_blocks -= before - self._engine.holds.num_blocks
