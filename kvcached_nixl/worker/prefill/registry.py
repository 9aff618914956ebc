# SPDX-License-Identifier: Apache-2.0
"""Prefill's side of hand-overs: the offers, what becomes of them, and what decode says of them. Once per worker.

An *offer* is kept from prefill's first update of it until all ranks of decode have what they need, it is stopped, or
its lease has expired. In each case its ownership token is removed before its blocks are freed (rule R3).
Tokens that are ready and registered (`writer`) are written at once, so the blocks of one step are transferred
while the next step computes.

The cost of a turn depends on what is due in it, not on how many offers and registrations wait. Owned by the transfer
thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvcached_nixl.deadlines import Clock, Deadlines, HeardDeadlines, earliest
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed, RevocationCause
from kvcached_nixl.wire.messages import EXTENSION, INTERVAL, Peer, Reading, Release
from kvcached_nixl.wire.params import is_of_transfer
from kvcached_nixl.wire.step import OfferUpdate, Revocation
from kvcached_nixl.worker.prefill.offers import Offer, OfferMatcher
from kvcached_nixl.worker.prefill.writer import Writer
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.topology import kernel_blocks_of

WANTED_INTERVALS = 2
"""For so many intervals between heartbeats after the last one, decode counts as waiting for an offer."""
SPARED_SECONDS = 15.0
"""How long an offer that decode waits for is spared while another's prompt has no blocks because of it. Decode's own
requests mostly end sooner; engines may also wait for each other in a ring, which none of them sees."""


class Leases(HeardDeadlines[PrefillRequestId]):
    """When each lease ends, in the clock's seconds. ``lease_seconds``: after its request has ended."""

    def __init__(self, clock: Clock, *, lease_seconds: float) -> None:
        super().__init__(clock.now_seconds())
        self._clock = clock
        self._lease_seconds = lease_seconds

    def grant(self, request_id: PrefillRequestId) -> None:
        """The request has ended: its lease begins."""
        self[request_id] = self._clock.now_seconds() + self._lease_seconds

    def renew(self, request_ids: Iterable[PrefillRequestId]) -> None:
        """Handle a heartbeat: extends leases that exist, never shortens one, and never revives one that was removed.

        A lease exists until `take_due` removes it, even if its time has passed. Heartbeats are read before `take_due`
        is called, so a step of prefill may take any time if decode has sent heartbeats meanwhile; and the process may
        be stopped for any time (`HeardDeadlines`).
        """
        extended = self._clock.now_seconds() + EXTENSION * self._lease_seconds
        ends = self.data.get
        self.move({request_id: extended for request_id in request_ids if ends(request_id, extended) < extended})


class OfferRegistry:
    """See the module."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._clock: Clock = context.clock
        self._tokens = context.token_table
        settings = self._settings = context.settings
        self._outcomes = context.outcomes
        self._matcher = OfferMatcher(context)
        self._leases = Leases(context.clock, lease_seconds=settings.kv_lease_duration_seconds)
        # Names that decode has sent heartbeats of before there was an offer, and until when it counts as waiting.
        self._early = Deadlines[str]()
        self.writer = Writer(context, self._matcher, self._settle)

    def __len__(self) -> int:
        """Offers and registrations that are not finished."""
        return len(self._matcher.offers) + len(self.writer.tasks)

    @property
    def is_awaiting(self) -> bool:
        """Whether a rank of decode may send something urgent at any moment, or waits for something it has sent."""
        return bool(self.writer.tasks) or (self._settings.transfer_mode.is_push and bool(self._matcher.offers))

    # ---------------------------------------------------------------------------------- commands of prefill's scheduler

    def offer(self, update: OfferUpdate) -> None:
        """Take an update: its ready tokens are computed and visible to transfers. If they are fewer than before, the
        missing ones are being computed again and must not be used."""
        offer = self._matcher.offers.get(update.request_id)
        if offer is None:
            offer = Offer(update)
            offer.wanted_until_seconds = self._early.pop(update.name, 0.0)
            for tp_rank, tp_size in self._matcher.add(offer).items():
                self._settle_rank(offer, tp_rank, tp_size)
        elif offer.update.name != update.name or not offer.means(update):
            # Its blocks are not what decode was told of. Its end is reported as that of any other.
            self._tokens.remove(update.request_id)
            self._let_down(offer, HandOverFailed(FailureCause.REVOKED, "another request came under its id"))
            return
        if update.ready_tokens < offer.update.ready_tokens:
            for task in list(offer.write_tasks.values()):
                if task.next_token > update.ready_tokens:
                    reason = "prefill computes some of its tokens again"
                    self.writer.stop(task, HandOverFailed(FailureCause.STOPPED, reason))
        # An offer without tokens has no blocks yet.
        blocks = kernel_blocks_of(update.groups, self._context.local.groups) if update.groups else ()
        offer.update, offer.blocks = update, blocks
        self.writer.source.told(offer)
        for task in list(offer.write_tasks.values()):
            self.writer.advance(task)

    def finish(self, request_id: PrefillRequestId) -> None:
        """The request computes no more tokens. Its blocks are kept until decode has them or the lease expires."""
        offer = self._matcher.offers.get(request_id)
        if offer is None:
            self._outcomes.done(request_id)
            return
        offer.finished = True
        self.writer.source.told(offer)
        self._leases.grant(request_id)
        for task in list(offer.write_tasks.values()):
            self.writer.advance(task)
        self._settle(offer)

    def await_claim(self, request_id: PrefillRequestId, number: int) -> None:
        """Prefill has not begun this request, and does so when that is marked as claimed: a rank of decode has
        registered for it, or needs nothing of it any more. At once if decode is asked only after prefill has answered:
        the last registration with such a name was for a request that had ended. Called again for one that decode may no
        longer want."""
        offer = self._matcher.offers.get(request_id)
        if (
            offer is None
            or is_of_transfer(offer.update.name) not in self.writer.asked_at_once
            or offer.write_tasks
            or offer.settled
            or offer.stopped
            or (offer.claim and self._clock.now_seconds() >= offer.wanted_until_seconds)
        ):
            self._outcomes.claimed(number)
        else:
            offer.claim = number

    def renew(self, agent: str, names: Iterable[str]) -> None:
        """Handle a heartbeat: this agent of decode still wants these requests."""
        name_of = {request_id: name for name in names for request_id in self._matcher.renewed_by(name)}
        self._leases.renew(name_of)
        for request_id, name in name_of.items():
            offer = self._matcher.offers.get(request_id)
            if offer is None:
                self._early[name] = self._wanted_until_seconds
            else:
                offer.wanted_by.add(agent)
                offer.wanted_until_seconds = self._wanted_until_seconds

    def stop(self, request_id: PrefillRequestId, reason: str, *, is_kept: bool = True) -> None:
        """The request has ended early: post nothing more of it, and remove its ownership token at once. ``is_kept``:
        vLLM keeps its blocks until `done` is called."""
        # Even without an offer: the token is published before the device has finished the step, the offer made after.
        self._tokens.remove(request_id)
        offer = self._matcher.offers.get(request_id)
        if offer is None:
            if is_kept:
                self._outcomes.done(request_id)
            return
        offer.finished, offer.is_kept = True, offer.is_kept and is_kept
        self._let_down(offer, HandOverFailed(FailureCause.STOPPED, reason))

    def outlasts(self, request_id: PrefillRequestId, revocation: Revocation) -> bool:
        """Whether an offer is not taken back for lack of memory: a rank of decode has begun to fetch it, so its blocks
        are free soon; or waits for it, if those are spared.

        Push: who only waits has no room, and has perhaps given it to a prompt that has no blocks here. So an offer is
        not spared where prefill lacks blocks, and who waits for it has registered for such a prompt. For others'
        prompts it is not spared long: who waits may have given its room to one of another prefill."""
        offer = self._matcher.offers.get(request_id)
        if offer is None or not revocation.cause.is_of_memory:
            return False
        is_wanted = self._clock.now_seconds() < offer.wanted_until_seconds
        # Who has read and failed says nothing, but sends no heartbeats any more.
        is_read = is_wanted and bool(offer.readers - offer.settled)
        spares = revocation.spares_wanted and is_wanted
        if spares and revocation.cause is RevocationCause.BLOCKS:
            spares = self._is_spared(offer, revocation.computing)
        return bool(offer.write_tasks) or is_read or spares

    def revoke(self, request_id: PrefillRequestId, revocation: Revocation) -> None:
        """Decode may not have the request any more. Its blocks stay with it until it ends: its `finish` has been called
        already, or will be."""
        self._tokens.remove(request_id)
        offer = self._matcher.offers.get(request_id)
        if offer is not None:
            if not offer.stopped:
                self._outcomes.revoked(revocation.cause)
            self._let_down(offer, HandOverFailed(FailureCause.REVOKED, revocation.reason))

    def close(self, reason: str) -> None:
        """The engine ends: revoke all offers, and tell the ranks of decode that wait."""
        self._tokens.clear()
        for offer in list(self._matcher.offers.values()):
            self._let_down(offer, HandOverFailed(FailureCause.REVOKED, reason))
        for task in list(self.writer.tasks.values()):
            self.writer.stop(task, HandOverFailed(FailureCause.REVOKED, reason))

    def preempt(self, request_id: PrefillRequestId, hold: int) -> None:
        """The request was preempted and starts again in other blocks. Keep the old ones until ``hold_idle``: they may
        still be read.

        Tokens that were written stay written. Tokens that were only copied into slots are copied again, because other
        weights may compute them next time.
        """
        offer = self._matcher.offers.get(request_id)
        if offer is None:
            self._outcomes.hold_idle(hold)
            return
        offer.lose_blocks()
        offer.draining.append(hold)
        self.writer.source.forget(offer)
        self._settle(offer)

    # ----------------------------------------------------------------------------------------------- messages of decode

    def read(self, message: Reading) -> None:
        """A rank of decode reads an offer's blocks from now on."""
        offer = self._matcher.offers.get(PrefillRequestId(message.request_id))
        if offer is not None:
            offer.readers.add(message.tp_rank)
            offer.wanted_until_seconds = self._wanted_until_seconds
            offer.follow(self._clock.now_seconds())

    def release(self, message: Release) -> None:
        """A rank of decode needs nothing more of an offer."""
        offer = self._matcher.released_by(message)
        if offer is not None:
            # Else it was in decode's cache, or is not wanted any more.
            if message.tp_rank in offer.readers:
                self._outcomes.fetched()
            self._settle_rank(offer, message.tp_rank, message.tp_size)
            self._settle(offer)

    def turn(self, *, is_engine_alive: bool = True) -> float | None:
        """Do what is due now; returns when to call again, in the clock's seconds, None if nothing will be due.
        ``is_engine_alive``: it computes what waits for its turn, sooner or later."""
        now = self._clock.now_seconds()
        self._early.take_due(now)
        for request_id in self._leases.take_due(now):
            offer = self._matcher.offers.get(request_id)
            # An offer with registrations stays: decode came before the lease expired.
            if offer is not None:
                self._settle(offer)
        return earliest(self._leases.first_seconds, self.writer.turn(now, is_engine_alive=is_engine_alive))

    # ---------------------------------------------------------------------------------------------------------- inside

    @property
    def _wanted_until_seconds(self) -> float:
        """Until when decode counts as waiting, of which something has come just now."""
        return self._clock.now_seconds() + WANTED_INTERVALS * INTERVAL * self._settings.kv_lease_duration_seconds

    def _is_spared(self, offer: Offer, computing: Collection[PrefillRequestId]) -> bool:
        """Whether an offer that decode waits for keeps blocks that prompts need which are not ``computing``."""
        waiting = [one for one in self._matcher.offers.values() if not one.update.ready_tokens]
        # A rank whose heads decode takes from a copy is not registered with, but released.
        lacking = [one for one in waiting if one.request_id not in computing and (one.write_tasks or one.settled)]
        now, since_seconds = self._clock.now_seconds(), offer.in_the_way_seconds
        offer.in_the_way_seconds = {one.request_id: since_seconds.get(one.request_id, now) for one in lacking}
        is_for_others = offer.wanted_by.isdisjoint(agent for one in lacking for agent, _ in one.write_tasks)
        return is_for_others and now < min(offer.in_the_way_seconds.values(), default=now) + SPARED_SECONDS

    def _let_down(self, offer: Offer, cause: HandOverFailed) -> None:
        self._tokens.remove(offer.request_id)
        offer.stopped = offer.stopped or str(cause)
        self.writer.stop_those_of(offer, cause)
        self._settle(offer)

    def _settle_rank(self, offer: Offer, tp_rank: int, tp_size: int) -> None:
        offer.report_claim(self._outcomes)
        offer.settled.add(tp_rank)
        # How many ranks of decode share this rank's heads.
        offer.awaited = max(1, tp_size // self._context.local.tp_size)

    def _settle(self, offer: Offer, decode: Peer | None = None) -> None:
        """Report holds and blocks that nothing reads any more, and remove the offer if decode is done with it.
        ``decode``: a rank that needs nothing more of it, if this is called because of one."""
        if decode is not None:
            self._settle_rank(offer, decode.tp_rank, decode.tp_size)
        offer.follow(self._clock.now_seconds())
        # By WRITEs and checksums, also those that are queued; where KV is staged, they read slots.
        is_read = self._context.staging is None and any(task.jobs for task in offer.write_tasks.values())
        if offer.draining and not (offer.copies or is_read):
            for hold in offer.draining:
                self._outcomes.hold_idle(hold)
            offer.draining = []
        if offer.finished and offer.is_kept and offer.is_free_of_blocks:
            offer.is_kept, offer.blocks = False, ()
            self._outcomes.done(offer.request_id)
        # The end of its last registration may have removed it already.
        is_known = self._matcher.offers.get(offer.request_id) is offer
        if not offer.finished or offer.copies or offer.write_tasks or not is_known:
            return
        if not (offer.is_satisfied or offer.stopped):
            if offer.request_id in self._leases:
                return
            self._outcomes.expired(offer.request_id)
        self._remove(offer)

    def _remove(self, offer: Offer) -> None:
        # Rule R3: before the blocks can be freed.
        self._tokens.remove(offer.request_id)
        self._leases.pop(offer.request_id, None)
        self._matcher.remove(offer)
        self.writer.source.finished(offer)
        offer.timeline.end(self._clock.now_seconds())
        if not self._context.local.rank:
            self._outcomes.timed(offer.timeline.reported(trace=offer.update.trace))
        if offer.is_kept:
            self._outcomes.done(offer.request_id)
