# SPDX-License-Identifier: Apache-2.0
"""Prefill's half of a hand-over: what is offered, who asked for it, and when its blocks are free. Once per worker.

An *offer* is kept from the moment prefill tells of it until decode has it, nobody wants it, or its lease has ended;
whichever it is, its word is removed before its blocks are given back (rule R3). A registration finds its offer by the
request's id where decode knows it, else by name and digest; names alone pair nothing (rule R7). Whatever both have is
written at once, so the blocks of one step travel while the next one computes.

A turn costs what is due in it, not what waits. Owned by the transfer thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvcached_nixl.clock import Clock
from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.causes import Cause
from kvcached_nixl.wire.manifest import Manifest
from kvcached_nixl.wire.messages import Registration, Release, Room, Withdrawal
from kvcached_nixl.worker.handover.attempt import Side
from kvcached_nixl.worker.handover.lease import Leases
from kvcached_nixl.worker.handover.offer import Memory, Offer, Writing, WritingKey
from kvcached_nixl.worker.handover.pairing import Pairing
from kvcached_nixl.worker.handover.source import Staged
from kvcached_nixl.worker.handover.verification import WordTable
from kvcached_nixl.worker.handover.writing import Writer

__all__ = ["Serving"]

PROBE_SECONDS = 5.0
"""How often a rank of decode is asked whether it is there, once what is written to it is overdue."""


_STARTED_AGAIN = "prefill has been started again, or its weights were changed, since decode met it"


class Serving:
    """See the module.

    Args:
        is_writing: whether decode registers, and is waited for (push); else it reads, and tells when it has.
        lease_seconds: how long a finished request's blocks wait for decode, unless it renews that.
        unmatched_seconds: how long a registration waits for prefill's request to appear.
        done: called with a request whose blocks nobody needs any more.
        quiet: called with a hold none of whose blocks is being read any more.
        expired: called with a request whose lease has ended, before it is done.
    """

    def __init__(
        self,
        side: Side,
        clock: Clock,
        words: WordTable,
        *,
        is_writing: bool,
        lease_seconds: float,
        unmatched_seconds: float,
        done: Callable[[PrefillRequestId], None],
        quiet: Callable[[int], None],
        expired: Callable[[PrefillRequestId], None],
    ) -> None:
        self._side = side
        self._clock = clock
        self._words = words
        self._is_writing = is_writing
        self._unmatched_seconds = unmatched_seconds
        self._done, self._quiet, self._expired = done, quiet, expired
        self._pairing = Pairing(clock, remembered_seconds=lease_seconds, unmatched_seconds=unmatched_seconds)
        self._writings: dict[WritingKey, Writing] = {}
        self._of_agent: dict[str, dict[WritingKey, Writing]] = {}
        self._over = Memory[WritingKey]()
        self._stuck = Deadlines[WritingKey]()
        self._leases = Leases(clock, lease_seconds=lease_seconds)
        self.dropped: Counter[str] = Counter()
        self._writer = Writer(side, self._ended, self._written)
        if side.staging is not None:
            self._writer.source = Staged(side.staging, self._writer.advance, self._settle, self._not_copied)

    def __len__(self) -> int:
        """Offers and registrations that are not over."""
        return len(self._pairing.offers) + len(self._writings)

    @property
    def is_awaiting(self) -> bool:
        """Whether a rank of decode waits for what it may say or has said at any moment."""
        return bool(self._writings) or (self._is_writing and bool(self._pairing.offers))

    @property
    def is_delivering(self) -> bool:
        """Whether something is being written that decode waits for and nothing else."""
        return self._writer.num_final > 0

    # ------------------------------------------------------------------------------------ what prefill's scheduler says

    def offer(
        self,
        request_id: PrefillRequestId,
        name: str,
        digest: str,
        num_tokens: int,
        block_ids: tuple[Sequence[int], ...],
        ready_tokens: int,
        manifest: Manifest | None,
        *,
        is_held: bool = False,
    ) -> None:
        """The first ``ready_tokens`` tokens of a request are in ``block_ids`` (per group), computed and visible.

        Call it again when there are more. Fewer than before: what was computed was no good, and is computed anew.

        Args:
            is_held: see `Offer`.
        """
        offer = self._pairing.offers.get(request_id)
        if offer is None:
            offer = Offer(request_id, name, digest, num_tokens)
            for tp_rank, tp_size in self._pairing.add(offer).items():
                self._settle_rank(offer, tp_rank, tp_size)
        if ready_tokens < offer.ready_tokens:
            for writing in list(offer.writings.values()):
                if writing.next_token > ready_tokens:
                    self._writer.stop(writing, Cause.STOPPED, "prefill computes some of its tokens anew")
        offer.block_ids, offer.ready_tokens, offer.manifest = block_ids, ready_tokens, manifest
        offer.is_held = is_held
        self._writer.source.told(offer)
        for writing in list(offer.writings.values()):
            self._writer.advance(writing)

    def finish(self, request_id: PrefillRequestId) -> None:
        """The request computes no more tokens. Its blocks are kept until decode has them or the lease ends."""
        offer = self._pairing.offers.get(request_id)
        if offer is None:
            self._done(request_id)
            return
        offer.finished = True
        self._writer.source.told(offer)
        self._leases.grant(request_id)
        for writing in list(offer.writings.values()):
            self._writer.advance(writing)
        self._settle(offer)

    def renew(self, names: Iterable[str]) -> None:
        """Decode still wants these requests."""
        self._leases.renew(one for name in names for one in self._pairing.renewed_by(name))

    def stop(self, request_id: PrefillRequestId, reason: str, *, is_kept: bool = True) -> None:
        """The request is gone: nothing more is posted, and its word is gone at once.

        Args:
            is_kept: vLLM keeps its blocks until it is done; else its end is nobody's concern.
        """
        # Its word is published before the device has got there, and its offer only then.
        self._words.remove(request_id)
        offer = self._pairing.offers.get(request_id)
        if offer is None:
            if is_kept:
                self._done(request_id)
            return
        offer.finished, offer.is_kept = True, offer.is_kept and is_kept
        self._let_down(offer, Cause.STOPPED, reason)

    def revoke(self, request_id: PrefillRequestId, reason: str) -> None:
        """Decode may not have the request any more. Its blocks are its own until it has ended: its `finish` has been
        given already, or will be."""
        self._words.remove(request_id)
        offer = self._pairing.offers.get(request_id)
        if offer is not None:
            self._let_down(offer, Cause.REVOKED, reason)

    def started(self, start: str) -> None:
        """The engine says who it is, at first and whenever its weights have changed: whoever means another one hears
        that it is none of its."""
        for writing in list(self._writings.values()):
            if writing.registration.start != start:
                self._writer.stop(writing, Cause.START, _STARTED_AGAIN)

    def close(self, reason: str) -> None:
        """The engine ends: nothing here is to be had any more, and whoever waits for it is told."""
        self._words.clear()
        for offer in list(self._pairing.offers.values()):
            self._let_down(offer, Cause.REVOKED, reason)
        for writing in list(self._writings.values()):
            self._writer.stop(writing, Cause.REVOKED, reason)

    def preempt(self, request_id: PrefillRequestId, hold: int) -> None:
        """The request starts over in other blocks. Keep the old ones until ``quiet``: they may still be read.

        What was written stays written; what was only copied is copied anew, for it may be computed with other weights.
        """
        offer = self._pairing.offers.get(request_id)
        if offer is None:
            self._quiet(hold)
            return
        offer.block_ids, offer.ready_tokens, offer.manifest, offer.is_held = (), 0, None, False
        offer.draining.append(hold)
        self._writer.source.forget(offer)
        self._settle(offer)

    # ------------------------------------------------------------------------------------------------- what decode says

    def handle(self, agent: str, message: Registration | Room | Withdrawal | Release) -> None:
        """Take in what a rank of decode says; ``agent`` is its own."""
        if isinstance(message, Registration):
            self._register(agent, message)
        elif isinstance(message, Room):
            writing = self._writings.get((agent, message.attempt))
            if writing is not None:
                self._writer.give_room(writing, message)
        elif isinstance(message, Withdrawal):
            self._withdraw(agent, message)
        else:
            self._release(message)

    def is_writing_to(self, agent: str) -> bool:
        """Whether an agent waits for what is written to it."""
        return agent in self._of_agent

    def gone(self, agent: str) -> None:
        """An agent is gone for good: nobody waits for what is written to it."""
        for writing in list(self._of_agent.get(agent, {}).values()):
            self._writer.stop(writing, Cause.LOST, "the peer is gone", is_answered=False)

    def fail(self, key: WritingKey, reason: str) -> None:
        """A defect was met while this registration was served."""
        writing = self._writings.get(key)
        if writing is not None:
            self._writer.stop(writing, Cause.DEFECT, reason)

    def turn(self) -> float | None:
        """What is due now; returns when to call again, in the clock's seconds, None if nothing will be."""
        now = self._clock.now_seconds()
        for request_id in self._leases.take_due(now):
            offer = self._pairing.offers.get(request_id)
            # Whoever is being written to has come in time.
            if offer is not None:
                self._settle(offer)
        for key in self._pairing.take_due(now):
            writing = self._writings.get(key)
            if writing is not None:
                self._writer.stop(writing, Cause.DEADLINE, "prefill has no request of this name and prompt")
        for key in self._stuck.take_due(now):
            writing = self._writings.get(key)
            if writing is not None:
                # Decode has given up by now. If it is not there any more, what is in flight ends with the connection.
                self._stuck[key] = now + PROBE_SECONDS
                self._writer.stop(writing, Cause.DEADLINE, "it has not been written in time")
                self._side.peers.probe(writing.registration.decode)
        due = (one.first_seconds for one in (self._leases, self._pairing, self._stuck))
        return min((one for one in due if one is not None), default=None)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _register(self, agent: str, registration: Registration) -> None:
        key = agent, registration.attempt
        if key in self._writings or key in self._over:
            self.dropped["doubled or late registration"] += 1
            return
        writing = self._writings[key] = Writing(agent, registration, next_token=registration.begin_token)
        self._of_agent.setdefault(agent, {})[key] = writing
        # Whoever waits for prefill hears first that it does not come.
        self._stuck[key] = self._clock.now_seconds() + self._unmatched_seconds + PROBE_SECONDS
        if self._side.start not in ("", registration.start):
            self._writer.stop(writing, Cause.START, _STARTED_AGAIN)
        elif registration.request_id:
            offer = self._pairing.offers.get(PrefillRequestId(registration.request_id))
            if offer is None or offer.stopped:
                why = "" if offer is None else f": {offer.stopped}"
                self._writer.stop(writing, Cause.LEASE, f"prefill does not keep this request any more{why}")
            elif (offer.digest, offer.num_tokens) != (registration.digest, registration.num_tokens):
                self._writer.stop(writing, Cause.DIGEST, "prefill computed another prompt")
            else:
                self._pairing.join(writing, offer)
        elif not self._is_writing:
            # Before a request has ended its blocks may be another's at any time.
            self._writer.stop(writing, Cause.PROTOCOL, "a pull names the request that prefill has ended")
        else:
            offer = self._pairing.wanted_by(registration)
            if offer is not None:
                self._pairing.join(writing, offer)
            else:
                self._pairing.wait(writing)
        self._writer.connect(writing)

    def _withdraw(self, agent: str, message: Withdrawal) -> None:
        key = agent, message.attempt
        writing = self._writings.get(key)
        if writing is not None:
            self._writer.stop(writing, Cause.STOPPED, "withdrawn")
            return
        # It is over, or its registration is still on its way and must not be taken in when it comes.
        self._over.add(key)
        self._writer.answer(agent, message.decode, message.attempt, Cause.STOPPED, "withdrawn")

    def _release(self, message: Release) -> None:
        offer = self._pairing.released_by(message)
        if offer is not None:
            self._settle_rank(offer, message.tp_rank, message.tp_size)
            self._settle(offer)

    def _ended(self, writing: Writing) -> None:
        """Nothing of it is in flight, and it has been answered if it was stopped."""
        del self._writings[writing.key]
        of_agent = self._of_agent[writing.agent]
        del of_agent[writing.key]
        if not of_agent:
            del self._of_agent[writing.agent]
        self._over.add(writing.key)
        self._stuck.pop(writing.key, None)
        self._pairing.forget(writing)
        offer = writing.offer
        if offer is not None:
            del offer.writings[writing.key]
            decode = writing.registration.decode
            self._settle_rank(offer, decode.tp_rank, decode.tp_size)
            self._settle(offer)

    def _written(self, writing: Writing) -> None:
        """A WRITE of it has ended: blocks that its offer has lost may be free now."""
        if writing.offer is not None:
            self._settle(writing.offer)

    def _settle_rank(self, offer: Offer, tp_rank: int, tp_size: int) -> None:
        """A rank of decode needs nothing more of an offer."""
        offer.settled.add(tp_rank)
        # The ranks of decode that share this rank's heads.
        offer.awaited = max(1, tp_size // self._writer.tp_size)

    def _settle(self, offer: Offer) -> None:
        """Let go of an offer that nobody waits for and nothing reads."""
        is_copying = self._writer.source.is_copying(offer)
        if offer.draining and not (is_copying or (offer.is_read and self._side.staging is None)):
            for hold in offer.draining:
                self._quiet(hold)
            offer.draining = []
        if offer.finished and offer.is_kept and self._writer.source.is_free_of_blocks(offer):
            offer.is_kept, offer.block_ids = False, ()
            self._done(offer.request_id)
        # The end of its last registration may have settled it already.
        if (
            not offer.finished
            or is_copying
            or offer.writings
            or self._pairing.offers.get(offer.request_id) is not offer
        ):
            return
        if not (offer.is_satisfied or offer.stopped):
            if offer.request_id in self._leases:
                return
            self._expired(offer.request_id)
        # Before the blocks can be given back.
        self._words.remove(offer.request_id)
        self._leases.pop(offer.request_id, None)
        self._pairing.remove(offer)
        self._writer.source.gone(offer)
        if offer.is_kept:
            self._done(offer.request_id)

    def _not_copied(self, writing: Writing, failed: str) -> None:
        self._writer.stop(writing, Cause.DEFECT, failed)

    def _let_down(self, offer: Offer, cause: Cause, reason: str) -> None:
        self._words.remove(offer.request_id)
        offer.stopped = offer.stopped or reason
        for writing in list(offer.writings.values()):
            # Otherwise a decode that has vanished would be probed only at its deadline.
            self._stuck[writing.key] = self._clock.now_seconds() + PROBE_SECONDS
            self._writer.stop(writing, cause, reason)
        self._settle(offer)
