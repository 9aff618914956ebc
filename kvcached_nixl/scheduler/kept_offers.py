# SPDX-License-Identifier: Apache-2.0
"""Prefill: requests that have ended, and whose blocks are kept for decode, and what may not begin because of them. One
per engine, on the engine's thread.

    kept ─── every rank has reported that no peer needs it ───────────────────────────────► its blocks are free
      ├─ taken back: weights have changed, a pause, a cleared cache ── every rank has reported it ──────► free
      ├─ a WRITE that was stopped does not end ── its blocks are held until every rank has reported it ──► free
      └─ asked to give way, because memory is short ─┬─ every rank has reported it ─────────────────────► free
                                                     └─ spared: decode waits for it or fetches it ──────► kept

What is taken back is revoked whether decode fetches it or not (rule R12); what gives way is not, if decode fetches it.
In each case blocks are freed only when every rank has reported it (rule R2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import MappingProxyType

from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.scheduler.context import EngineContext, is_meant
from kvcached_nixl.wire.causes import RevocationCause
from kvcached_nixl.wire.manifest import NULL_BLOCK_ID
from kvcached_nixl.wire.step import AwaitClaim, BlockIds, Finish, OfferUpdate, Revocation, Revoke, report_numbers

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
class _Kept:
    """A request that has ended, and whose blocks are kept.

    Attributes:
        since_seconds: when it ended.
        is_taken_back: nobody may fetch it any more.
        hold: number of the hold with its blocks, once vLLM has freed the request.
        asked: numbers of its revocations that workers may report as spared.
        asked_until_seconds: it counts as giving its blocks back, until then.
        spared_until_seconds: it did not give way, and counts as wanted until then.
        is_for_others: it was asked to give way for others than this engine.
    """

    adapter: int
    num_blocks: int
    since_seconds: float
    is_taken_back: bool = False
    hold: int | None = None
    asked: list[int] = field(default_factory=list)
    asked_until_seconds: float = -math.inf
    spared_until_seconds: float = -math.inf
    is_for_others: bool = False

    def gives_back(self, now_seconds: float) -> bool:
        return self.is_taken_back or now_seconds < self.asked_until_seconds

    def is_wanted(self, now_seconds: float) -> bool:
        return self.asked_until_seconds <= now_seconds < self.spared_until_seconds


class KeptOffers:
    """See the module. ``revoked_at``: when offers are to be revoked, while the engine is paused."""

    def __init__(self, engine: EngineContext) -> None:
        self._engine = engine
        # Oldest first.
        self._kept: dict[PrefillRequestId, _Kept] = {}
        self._closed: str | None = None
        self.revoked_at = Deadlines[PrefillRequestId]()
        self._numbers = report_numbers()
        # By the numbers of revocations that may be reported as spared.
        self._asked: dict[int, _Kept] = {}
        self._stuck: set[PrefillRequestId] = set()
        self._fetched_seconds = -math.inf

    def keep(
        self, request_id: PrefillRequestId, adapter: int, block_ids: BlockIds, *, is_taken_back: bool = False
    ) -> None:
        """A request has ended, and vLLM keeps its blocks until `ended` is told of it. If ``is_taken_back``, decode may
        not fetch it: its workers may only be reading it yet."""
        now = self._engine.clock.now_seconds()
        num_blocks = sum(len({*group} - {NULL_BLOCK_ID}) for group in block_ids)
        self._kept[request_id] = _Kept(adapter, num_blocks, now, is_taken_back)
        if self._closed is not None and not is_taken_back:
            self.revoked_at[request_id] = now + GRACE_SECONDS

    def keeps(self, request_id: str) -> bool:
        return PrefillRequestId(request_id) in self._kept

    @property
    def are_fetchable(self) -> bool:
        """Whether one of them was not taken back."""
        return not all(one.is_taken_back for one in self._kept.values())

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def kept_now(self) -> tuple[int, int, float]:
        """Returns how many requests are kept, their blocks, and the seconds since the first one ended. May be called
        from any thread."""
        kept, now = list(self._kept.values()), self._engine.clock.now_seconds()
        oldest_seconds = max([0.0, *(now - one.since_seconds for one in kept)])
        return len(kept), sum(one.num_blocks for one in kept), oldest_seconds

    @property
    def is_left_waiting(self) -> bool:
        """Whether decode leaves so much KV waiting that nothing more should be computed for it unasked."""
        since_seconds = self._engine.clock.now_seconds() - UNCLAIMED_SECONDS
        free = (one for one in self._kept.values() if one.hold is None and not one.is_taken_back)
        left = [one for one in free if one.since_seconds < since_seconds]
        num_tokens = sum(one.num_blocks for one in left) * self._engine.groups.tokens_per_block
        return num_tokens >= self._engine.stock.max_num_batched_tokens

    def revoke(self, revocation: Revocation, *, adapter: int | None = None) -> None:
        """Takes offers back, whether decode fetches them or not: as `PrefillOffers.revoke`."""
        meant = [request_id for request_id, one in self._kept.items() if is_meant(adapter, one.adapter)]
        self._take_back(meant, revocation)

    def close(self, reason: str, *, grace_seconds: float) -> None:
        """Revokes requests that have ended, or end before `reopen`; each after ``grace_seconds``."""
        self._closed = reason
        due = self._engine.clock.now_seconds() + grace_seconds
        self.revoked_at.move({request_id: due for request_id in self._kept})
        self.turn()

    def reopen(self) -> None:
        """Undoes `close`: requests that end from now on are kept as long as their leases last."""
        self._closed = None
        self.revoked_at.clear()

    def turn(self) -> None:
        """Revokes the offers whose grace has passed."""
        due = self.revoked_at.take_due(self._engine.clock.now_seconds())
        self._take_back(due, Revocation(RevocationCause.PAUSED, self._closed or ""))

    def _take_back(self, request_ids: Iterable[PrefillRequestId], revocation: Revocation) -> None:
        taken = []
        for request_id in request_ids:
            self.revoked_at.pop(request_id, None)
            if not self._kept[request_id].is_taken_back:
                self._kept[request_id].is_taken_back = True
                self._engine.step.tell(Revoke(request_id, revocation))
                taken.append(request_id)
        if taken:
            # An offer that the workers were not told of yet must not reach them before its revocation.
            self._engine.step.withhold(*taken, even_empty=True)

    def give_way(
        self,
        cause: RevocationCause,
        num_blocks: int,
        *,
        keeps_wanted: bool = False,
        heeds_fetches: bool = True,
        computing: frozenset[PrefillRequestId] = frozenset(),
    ) -> None:
        """Takes back offers that no rank of decode fetches yet, oldest first, until they have ``num_blocks`` blocks
        together with those that are being given back already. Those for which decode has a request are taken back
        last; if ``keeps_wanted``, not at all. ``computing``: as in `Revocation`.

        As long as decode fetches offers, memory mostly comes back by itself: if ``heeds_fetches``, none gives way until
        a while after the last one was fetched. So two full engines that prefill for each other do not wait for each
        other, and a prefill that is only faster than its decode keeps what it has computed."""
        now, step = self._engine.clock.now_seconds(), self._engine.step
        # Those that are held end when a transfer does.
        kept = {request_id: one for request_id, one in self._kept.items() if one.hold is None}
        num_blocks -= sum(one.num_blocks for one in kept.values() if one.gives_back(now))
        # What the workers are told of in this very step is not old, nor may it follow its revocation.
        told = {one.request_id for one in step.of(Finish)} | {one.request_id for one in step.of(OfferUpdate)}
        # Those that were spared come last.
        for request_id, one in sorted(kept.items(), key=lambda item: item[1].is_wanted(now)):
            is_wanted = one.is_wanted(now)
            if num_blocks <= 0 or (is_wanted and keeps_wanted):
                return
            last_seconds = max(one.since_seconds, self._fetched_seconds if heeds_fetches else -math.inf)
            is_young = now < last_seconds + self._engine.settings.give_way_after_seconds
            if one.gives_back(now) or request_id in told or is_young:
                continue
            number = next(self._numbers)
            step.tell(Revoke(request_id, Revocation(cause, _GIVES_WAY[cause], not is_wanted, number, computing)))
            one.asked_until_seconds = now + ASK_AGAIN_SECONDS
            one.spared_until_seconds = one.asked_until_seconds + SPARED_SECONDS
            one.asked.append(number)
            self._asked[number] = one
            one.is_for_others |= cause is not RevocationCause.BLOCKS
            num_blocks -= one.num_blocks

    def spared(self, numbers: Iterable[int]) -> bool:
        """Workers have not taken these offers back, because decode waits for them or fetches them. Returns whether
        there are any."""
        found = [self._asked.pop(number) for number in numbers if number in self._asked]
        now = self._engine.clock.now_seconds()
        for one in found:
            one.asked_until_seconds, one.is_for_others = now, False
            one.spared_until_seconds = now + SPARED_SECONDS
        return bool(found)

    def stuck(self, request_ids: Iterable[PrefillRequestId]) -> None:
        """Workers have stopped these, and a WRITE of them is in flight all the same: decode stands still, or has
        vanished."""
        self._stuck |= self._kept.keys() & set(request_ids)

    def let_go(self) -> set[str]:
        """Requests, since the last call, that vLLM may free; their blocks are held until `ended` names them."""
        found, self._stuck = self._stuck, set()
        if self._closed is not None:
            # A pause waits until vLLM has freed all requests.
            found |= {request_id for request_id, one in self._kept.items() if one.is_taken_back}
        found = {request_id for request_id in found if self._kept[request_id].hold is None}
        for request_id in found:
            self._kept[request_id].hold = self._engine.holds.take(request_id)
        return set(found)

    def fetched(self) -> None:
        """Decode has fetched an offer."""
        self._fetched_seconds = self._engine.clock.now_seconds()

    def ended(self, sent: Iterable[str]) -> int:
        """All ranks have reported that no peer needs these requests; vLLM frees their blocks now. Returns how many
        blocks are given back to others."""
        num_for_others = 0
        for request_id in map(PrefillRequestId, sent):
            one = self._kept.pop(request_id, None)
            if one is None:
                continue
            if one.hold is not None:
                self._engine.holds.give_back(one.hold)
            num_for_others += one.num_blocks if one.is_for_others else 0
            for number in one.asked:
                self._asked.pop(number, None)
            self.revoked_at.pop(request_id, None)
        return num_for_others


class StartGate:
    """Push: which prompts prefill computes before decode has blocks for them.

    A router that asks both sides at once has decode register before prefill begins. Where decode has no room, it
    registers late or never, and prefill would fill its own memory with KV that nobody takes. So while decode leaves
    that much waiting (`KeptOffers.is_left_waiting`), only prompts begin that a rank of decode has registered for. The
    others wait in vLLM's queue, which asks again in every step, without blocks. Workers report when decode has
    registered, and at once where decode registers only after prefill's answer. They are asked again from time to time,
    and report those that decode does not want any more, too: see `OfferRegistry.await_claim`.

    Attributes:
        held: prompts that wait, and when workers are to be asked again.
    """

    def __init__(self, engine: EngineContext, kept: KeptOffers) -> None:
        self._engine = engine
        self._kept = kept
        # `KeptOffers.is_left_waiting`, once it was looked up for the step being built.
        self._needs_claim: bool | None = None
        self._numbers = report_numbers()
        self.held = Deadlines[PrefillRequestId]()
        # Those that may begin, until they do, or end.
        self._claimed: set[PrefillRequestId] = set()
        self._of_number: dict[int, PrefillRequestId] = {}

    def may_start(self, request_id: PrefillRequestId) -> bool:
        """Whether a prompt may begin now. If not, workers are asked to report when decode has registered for it."""
        if self._needs_claim is None:
            self._needs_claim = self._kept.is_left_waiting
        if not self._needs_claim or request_id in self._claimed:
            self.held.pop(request_id, None)
            return True
        if request_id not in self.held:
            number = next(self._numbers)
            self._of_number[number] = request_id
            self.held[request_id] = self._engine.clock.now_seconds() + self._engine.allocation_seconds
            self._engine.step.tell(AwaitClaim(request_id, number))
        return False

    def claimed(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            request_id = self._of_number.pop(number, None)
            if request_id is not None and self.held.pop(request_id, None) is not None:
                self._claimed.add(request_id)

    def turn(self, begun: Iterable[str]) -> None:
        """A step was built, which computes the requests ``begun``."""
        self._needs_claim = None
        self.gone(begun)
        now = self._engine.clock.now_seconds()
        asked = self.held.take_due(now)
        if asked:
            self.held.move(dict.fromkeys(asked, now + self._engine.allocation_seconds))
            again = [AwaitClaim(one, number) for number, one in self._of_number.items() if one in asked]
            self._engine.step.tell(*again)

    def gone(self, request_ids: Iterable[str]) -> None:
        if not (self.held or self._claimed or self._of_number):
            return
        gone = set(map(PrefillRequestId, request_ids))
        for request_id in gone:
            self.held.pop(request_id, None)
        self._claimed -= gone
        self._of_number = {number: one for number, one in self._of_number.items() if one not in gone}
