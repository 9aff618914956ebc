# SPDX-License-Identifier: Apache-2.0
"""Prefill's side of hand-overs: offers, decode's registrations, and when prefill's blocks are free. Once per worker.

An *offer* is kept from prefill's first update of it until all ranks of decode have what they need, it is stopped, or
its lease has expired. In each case its ownership token is removed before its blocks are freed (rule R3). A registration
finds its offer by the request's id where decode knows that, else by name and digest; a name alone matches nothing (rule
R7). Tokens that are ready and registered are written at once, so the blocks of one step are transferred while the next
step computes.

The cost of a turn depends on what is due in it, not on how many offers and registrations wait. Owned by the transfer
thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kvcached_nixl.clock import Clock
from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.causes import FailureCause, RevocationCause
from kvcached_nixl.wire.lease import INTERVAL
from kvcached_nixl.wire.messages import Reading, Registration, Release, StagingGrant, Withdrawal
from kvcached_nixl.wire.step import OfferUpdate, Revocation
from kvcached_nixl.wire.timeline import Reported
from kvcached_nixl.worker.prefill.gate_connections import GateConnections
from kvcached_nixl.worker.prefill.matching import OfferMatcher
from kvcached_nixl.worker.prefill.offer import Offer, WriteKey, WriteTask
from kvcached_nixl.worker.prefill.writer import Writer
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.lease import Leases
from kvcached_nixl.worker.transfer.ownership_tokens import TokenTable
from kvcached_nixl.worker.transfer.recent_set import RecentSet
from kvcached_nixl.worker.transfer.tally import TransferTally
from kvcached_nixl.worker.transfer.topology import kernel_blocks_of

__all__ = ["OfferRegistry"]

WANTED_INTERVALS = 2
"""For so many intervals between heartbeats after the last one, decode counts as waiting for an offer."""
PROBE_SECONDS = 5.0
"""How often a rank of decode is probed once its registration is overdue."""


_STARTED_AGAIN = "prefill was restarted, or its weights were changed, since decode's handshake with it"


class OfferRegistry:
    """See the module.

    Args:
        mode: whether decode registers blocks and prefill writes them; else decode reads, and sends a release.
        lease_seconds: how long a finished request's blocks are kept for decode without a heartbeat.
        unmatched_seconds: how long a registration waits for prefill's request to appear.
        done: called with a request whose blocks are not needed any more.
        hold_idle: called with a hold when none of its blocks is being read any more.
        expired: called with a request whose lease has expired, before ``done``.
        moved: called for each registration whose tokens were all written, if by WRITEs of this rank.
        revoked: called for each offer that is taken back.
        claimed: called with the number of `await_claim`.
        timed: called with the timeline of each offer that ends, before ``done``; on rank 0 only.
    """

    def __init__(
        self,
        context: WorkerContext,
        gate_connections: GateConnections,
        clock: Clock,
        tokens: TokenTable,
        *,
        mode: TransferMode,
        lease_seconds: float,
        unmatched_seconds: float,
        done: Callable[[PrefillRequestId], None],
        hold_idle: Callable[[int], None],
        expired: Callable[[PrefillRequestId], None],
        moved: Callable[[TransferTally], None],
        revoked: Callable[[RevocationCause], None],
        claimed: Callable[[int], None],
        timed: Callable[[Reported], None],
    ) -> None:
        self._context = context
        self._clock = clock
        self._tokens = tokens
        self._mode = mode
        self._unmatched_seconds = unmatched_seconds
        self._lease_seconds = lease_seconds
        self._done, self._hold_idle, self._expired, self._moved = done, hold_idle, expired, moved
        self._revoked = revoked
        self._claimed = claimed
        # Whether the last registration came without the request's id, and so without prefill's answer.
        self._is_asked_at_once = False
        self._timed = timed
        self._matcher = OfferMatcher(clock, remembered_seconds=lease_seconds, unmatched_seconds=unmatched_seconds)
        self._write_tasks: dict[WriteKey, WriteTask] = {}
        self._of_agent: dict[str, dict[WriteKey, WriteTask]] = {}
        self._finished = RecentSet[WriteKey]()
        self._stuck = Deadlines[WriteKey]()
        self._leases = Leases(clock, lease_seconds=lease_seconds)
        self.dropped: Counter[str] = Counter()
        self._writer = Writer(context, gate_connections, self._ended, self._settle)

    def __len__(self) -> int:
        """Offers and registrations that are not finished."""
        return len(self._matcher.offers) + len(self._write_tasks)

    @property
    def is_awaiting(self) -> bool:
        """Whether a rank of decode may send something urgent at any moment, or waits for something it has sent."""
        return bool(self._write_tasks) or (self._mode.is_push and bool(self._matcher.offers))

    @property
    def is_delivering(self) -> bool:
        """Whether the last WRITEs of a registration are under way: decode's request waits for nothing else."""
        return self._writer.num_final > 0

    # ---------------------------------------------------------------------------------- commands of prefill's scheduler

    def offer(self, update: OfferUpdate) -> None:
        """Take an update: its ready tokens are computed and visible to transfers. If they are fewer than before, the
        missing ones are being computed again and must not be used."""
        offer = self._matcher.offers.get(update.request_id)
        if offer is None:
            offer = Offer(update)
            for tp_rank, tp_size in self._matcher.add(offer).items():
                self._settle_rank(offer, tp_rank, tp_size)
        elif (offer.name, offer.digest, offer.num_tokens) != (update.name, update.digest, update.num_tokens):
            # Its blocks are not what decode was told of. Its end is reported as that of any other.
            self._tokens.remove(update.request_id)
            self._let_down(offer, FailureCause.REVOKED, "another request came under its id")
            return
        if update.ready_tokens < offer.ready_tokens:
            for task in list(offer.write_tasks.values()):
                if task.next_token > update.ready_tokens:
                    self._writer.stop(task, FailureCause.STOPPED, "prefill computes some of its tokens again")
        # An offer without tokens has no blocks yet.
        blocks = kernel_blocks_of(update.groups, self._context.local.groups) if update.groups else ()
        offer.update, offer.blocks = update, blocks
        self._writer.source.told(offer)
        for task in list(offer.write_tasks.values()):
            self._writer.advance(task)

    def finish(self, request_id: PrefillRequestId) -> None:
        """The request computes no more tokens. Its blocks are kept until decode has them or the lease expires."""
        offer = self._matcher.offers.get(request_id)
        if offer is None:
            self._done(request_id)
            return
        offer.finished = True
        self._writer.source.told(offer)
        self._leases.grant(request_id)
        for task in list(offer.write_tasks.values()):
            self._writer.advance(task)
        self._settle(offer)

    def await_claim(self, request_id: PrefillRequestId, number: int) -> None:
        """Prefill has not begun this request, and does so when ``claimed`` is called: a rank of decode has registered
        for it, or needs nothing of it any more. At once if decode is asked only after prefill has answered: the last
        registration named a request that had ended."""
        offer = self._matcher.offers.get(request_id)
        if not self._is_asked_at_once or offer is None or offer.write_tasks or offer.settled or offer.stopped:
            self._claimed(number)
        else:
            offer.claim = number

    def renew(self, names: Iterable[str]) -> None:
        """Handle a heartbeat: decode still wants these requests."""
        request_ids = [one for name in names for one in self._matcher.renewed_by(name)]
        self._leases.renew(request_ids)
        for request_id in request_ids:
            offer = self._matcher.offers.get(request_id)
            if offer is not None:
                self._wanted(offer)

    def stop(self, request_id: PrefillRequestId, reason: str, *, is_kept: bool = True) -> None:
        """The request has ended early: post nothing more of it, and remove its ownership token at once.

        Args:
            is_kept: vLLM keeps its blocks until `done` is called; else vLLM does not wait for that.
        """
        # Even without an offer: the token is published before the device has finished the step, the offer made after.
        self._tokens.remove(request_id)
        offer = self._matcher.offers.get(request_id)
        if offer is None:
            if is_kept:
                self._done(request_id)
            return
        offer.finished, offer.is_kept = True, offer.is_kept and is_kept
        self._let_down(offer, FailureCause.STOPPED, reason)

    def outlasts(self, request_id: PrefillRequestId, revocation: Revocation) -> bool:
        """Whether an offer is not taken back for lack of memory: a rank of decode has begun to fetch it, so its blocks
        are free soon; or waits for it, if those are spared."""
        offer = self._matcher.offers.get(request_id)
        if offer is None or not revocation.cause.is_of_memory:
            return False
        is_wanted = self._clock.now_seconds() < offer.wanted_until_seconds
        # Who has read and failed says nothing, but sends no heartbeats any more.
        is_read = is_wanted and bool(offer.readers - offer.settled)
        return bool(offer.write_tasks) or is_read or (revocation.spares_wanted and is_wanted)

    def revoke(self, request_id: PrefillRequestId, revocation: Revocation) -> None:
        """Decode may not have the request any more. Its blocks stay with it until it ends: its `finish` has been called
        already, or will be."""
        self._tokens.remove(request_id)
        offer = self._matcher.offers.get(request_id)
        if offer is not None:
            if not offer.stopped:
                self._revoked(revocation.cause)
            self._let_down(offer, FailureCause.REVOKED, revocation.reason)

    def started(self, incarnation: str) -> None:
        """The engine has told its incarnation, at start or after its weights have changed: stop registrations that were
        made for another incarnation."""
        for task in list(self._write_tasks.values()):
            if task.registration.incarnation != incarnation:
                self._writer.stop(task, FailureCause.RESTARTED, _STARTED_AGAIN)

    def close(self, reason: str) -> None:
        """The engine ends: revoke all offers, and tell the ranks of decode that wait."""
        self._tokens.clear()
        for offer in list(self._matcher.offers.values()):
            self._let_down(offer, FailureCause.REVOKED, reason)
        for task in list(self._write_tasks.values()):
            self._writer.stop(task, FailureCause.REVOKED, reason)

    def preempt(self, request_id: PrefillRequestId, hold: int) -> None:
        """The request was preempted and starts again in other blocks. Keep the old ones until ``hold_idle``: they may
        still be read.

        Tokens that were written stay written. Tokens that were only copied into slots are copied again, because other
        weights may compute them next time.
        """
        offer = self._matcher.offers.get(request_id)
        if offer is None:
            self._hold_idle(hold)
            return
        offer.lose_blocks()
        offer.draining.append(hold)
        self._writer.source.forget(offer)
        self._settle(offer)

    # ----------------------------------------------------------------------------------------------- messages of decode

    def handle(self, agent: str, message: Registration | StagingGrant | Withdrawal | Reading | Release) -> None:
        """Handle a message of a rank of decode; ``agent`` is the rank's name in the transport."""
        if isinstance(message, Registration):
            self._register(agent, message)
        elif isinstance(message, StagingGrant):
            task = self._write_tasks.get((agent, message.attempt))
            if task is not None:
                self._writer.take_grant(task, message)
        elif isinstance(message, Withdrawal):
            self._withdraw(agent, message)
        elif isinstance(message, Reading):
            offer = self._matcher.offers.get(PrefillRequestId(message.request_id))
            if offer is not None:
                offer.readers.add(message.tp_rank)
                self._wanted(offer)
                self._writer.follow(offer)
        else:
            self._release(message)

    def is_writing_to(self, agent: str) -> bool:
        """Whether an agent has a registration that is not finished."""
        return agent in self._of_agent

    def dead(self, agent: str) -> None:
        """An agent is dead or unreachable: stop its registrations without an answer."""
        for task in list(self._of_agent.get(agent, {}).values()):
            self._writer.stop(task, FailureCause.LOST, "the peer is dead or unreachable", is_answered=False)

    def fail(self, key: WriteKey, reason: str) -> None:
        """An internal error occurred while this registration was served: stop it."""
        task = self._write_tasks.get(key)
        if task is not None:
            self._writer.stop(task, FailureCause.DEFECT, reason)

    def turn(self) -> float | None:
        """Do what is due now; returns when to call again, in the clock's seconds, None if nothing will be due."""
        now = self._clock.now_seconds()
        for request_id in self._leases.take_due(now):
            offer = self._matcher.offers.get(request_id)
            # An offer with registrations stays: decode came before the lease expired.
            if offer is not None:
                self._settle(offer)
        for key in self._matcher.take_due(now):
            task = self._write_tasks.get(key)
            if task is not None:
                self._writer.stop(task, FailureCause.DEADLINE, "prefill has no request of this name and prompt")
        for key in self._stuck.take_due(now):
            task = self._write_tasks.get(key)
            if task is not None:
                # Decode has given up by now. If it does not answer the probe, its connection is taken down, which ends
                # what is in flight to it.
                self._stuck[key] = now + PROBE_SECONDS
                self._writer.stop(task, FailureCause.DEADLINE, "prefill did not write it in time")
                self._context.peers.probe(task.registration.decode)
        due = (one.first_seconds for one in (self._leases, self._matcher, self._stuck))
        return min((one for one in due if one is not None), default=None)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _wanted(self, offer: Offer) -> None:
        seconds = WANTED_INTERVALS * INTERVAL * self._lease_seconds
        offer.wanted_until_seconds = self._clock.now_seconds() + seconds

    def _register(self, agent: str, registration: Registration) -> None:
        key = agent, registration.attempt
        if key in self._write_tasks or key in self._finished:
            self.dropped["doubled or late registration"] += 1
            return
        task = self._write_tasks[key] = WriteTask(agent, registration, next_token=registration.begin_token)
        self._of_agent.setdefault(agent, {})[key] = task
        self._is_asked_at_once = not registration.request_id
        # Later than the matcher's deadline, so that a missing request is reported as that.
        self._stuck[key] = self._clock.now_seconds() + self._unmatched_seconds + PROBE_SECONDS
        if self._context.incarnation not in ("", registration.incarnation):
            self._writer.stop(task, FailureCause.RESTARTED, _STARTED_AGAIN)
        elif registration.request_id:
            offer = self._matcher.offers.get(PrefillRequestId(registration.request_id))
            if offer is None or offer.stopped:
                why = "" if offer is None else f": {offer.stopped}"
                self._writer.stop(task, FailureCause.LEASE, f"prefill does not keep this request any more{why}")
            elif (offer.digest, offer.num_tokens) != (registration.digest, registration.num_tokens):
                self._writer.stop(task, FailureCause.DIGEST, "prefill computed another prompt")
            else:
                self._matcher.join(task, offer)
        elif not self._mode.is_push:
            # In pull only an ended request may be written: before that vLLM may give its blocks to another one.
            self._writer.stop(
                task,
                FailureCause.PROTOCOL,
                "found a pull without a request id; expected that of a request that has ended",
            )
        else:
            offer = self._matcher.wanted_by(registration)
            if offer is not None:
                self._matcher.join(task, offer)
            else:
                self._matcher.wait(task)
        if task.offer is not None:
            self._claim(task.offer)
            self._writer.follow(task.offer)
        self._writer.connect(task)

    def _withdraw(self, agent: str, message: Withdrawal) -> None:
        key = agent, message.attempt
        task = self._write_tasks.get(key)
        if task is not None:
            self._writer.stop(task, FailureCause.STOPPED, "withdrawn")
            return
        # It is finished, or its registration is still on its way: remember it, so that it is dropped when it arrives.
        self._finished.add(key)
        self._writer.answer(agent, message.decode, message.attempt, FailureCause.STOPPED, "withdrawn")

    def _release(self, message: Release) -> None:
        offer = self._matcher.released_by(message)
        if offer is not None:
            self._settle_rank(offer, message.tp_rank, message.tp_size)
            self._settle(offer)

    def _ended(self, task: WriteTask) -> None:
        """Forget a registration: nothing of it is in flight, and it has been answered if it was stopped."""
        del self._write_tasks[task.key]
        of_agent = self._of_agent[task.agent]
        del of_agent[task.key]
        if not of_agent:
            del self._of_agent[task.agent]
        self._finished.add(task.key)
        if task.stopping is None and task.tally.num_bytes:
            self._moved(task.tally)
        self._stuck.pop(task.key, None)
        self._matcher.forget(task)
        offer = task.offer
        if offer is not None:
            del offer.write_tasks[task.key]
            decode = task.registration.decode
            self._settle_rank(offer, decode.tp_rank, decode.tp_size)
            self._settle(offer)

    def _claim(self, offer: Offer) -> None:
        if offer.claim:
            self._claimed(offer.claim)
            offer.claim = 0

    def _settle_rank(self, offer: Offer, tp_rank: int, tp_size: int) -> None:
        """A rank of decode needs nothing more of an offer."""
        self._claim(offer)
        offer.settled.add(tp_rank)
        # How many ranks of decode share this rank's heads.
        offer.awaited = max(1, tp_size // self._writer.tp_size)

    def _settle(self, offer: Offer) -> None:
        """Report holds and blocks that nothing reads any more, and remove the offer if decode is done with it."""
        self._writer.follow(offer)
        is_copying = self._writer.source.is_copying(offer)
        if offer.draining and not (is_copying or (offer.is_read and self._context.staging is None)):
            for hold in offer.draining:
                self._hold_idle(hold)
            offer.draining = []
        if offer.finished and offer.is_kept and self._writer.source.is_free_of_blocks(offer):
            offer.is_kept, offer.blocks = False, ()
            self._done(offer.request_id)
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
            self._expired(offer.request_id)
        # Rule R3: before the blocks can be freed.
        self._tokens.remove(offer.request_id)
        self._leases.pop(offer.request_id, None)
        self._matcher.remove(offer)
        self._writer.source.offer_finished(offer)
        offer.timeline.end(self._clock.now_seconds())
        if not self._context.local.tp_rank:
            self._timed(offer.timeline.reported(trace=offer.update.trace))
        if offer.is_kept:
            self._done(offer.request_id)

    def _let_down(self, offer: Offer, cause: FailureCause, reason: str) -> None:
        self._tokens.remove(offer.request_id)
        offer.stopped = offer.stopped or reason
        for task in list(offer.write_tasks.values()):
            # Otherwise a decode that has vanished silently would be probed only at its deadline.
            self._stuck[task.key] = self._clock.now_seconds() + PROBE_SECONDS
            self._writer.stop(task, cause, reason)
        self._settle(offer)
