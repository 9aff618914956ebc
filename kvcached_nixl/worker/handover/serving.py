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
from kvcached_nixl.wire.messages import Registration, Release, Withdrawal
from kvcached_nixl.worker.handover.attempt import Side
from kvcached_nixl.worker.handover.lease import Leases
from kvcached_nixl.worker.handover.offer import Memory, Offer, Writing, WritingKey
from kvcached_nixl.worker.handover.verification import WordTable
from kvcached_nixl.worker.handover.writing import Writer

__all__ = ["Serving"]

GRACE_SECONDS = 5.0
"""How long a registration waits for a request whose name prefill knows, though not for what decode wants: the router
may be trying both again, and prefill's comes second."""
PROBE_SECONDS = 5.0
"""How often a rank of decode is asked whether it is there, once what is written to it is overdue."""


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
        self._lease_seconds = lease_seconds
        self._done, self._quiet, self._expired = done, quiet, expired
        self._offers: dict[PrefillRequestId, Offer] = {}
        self._named: dict[str, dict[PrefillRequestId, Offer]] = {}
        self._writings: dict[WritingKey, Writing] = {}
        self._of_agent: dict[str, dict[WritingKey, Writing]] = {}
        self._over = Memory[WritingKey]()
        self._recent = Deadlines[str]()
        self._unmatched = Deadlines[WritingKey]()
        self._stuck = Deadlines[WritingKey]()
        self._unmatched_of: dict[str, dict[WritingKey, Writing]] = {}
        self._released = Deadlines[tuple[str, str]]()
        self._released_ranks: dict[tuple[str, str], dict[int, int]] = {}
        self._leases = Leases(clock, lease_seconds=lease_seconds)
        self.dropped: Counter[str] = Counter()
        self._writer = Writer(side, self._ended, self._written)

    def __len__(self) -> int:
        """Offers and registrations that are not over."""
        return len(self._offers) + len(self._writings)

    @property
    def is_awaiting(self) -> bool:
        """Whether a rank of decode waits for what it may say or has said at any moment."""
        return bool(self._writings) or (self._is_writing and bool(self._offers))

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
    ) -> None:
        """The first ``ready_tokens`` tokens of a request are in ``block_ids`` (per group), computed and visible.

        Call it again when there are more. Fewer than before: what was computed was no good, and is computed anew.
        """
        offer = self._offers.get(request_id)
        if offer is None:
            offer = self._offers[request_id] = Offer(request_id, name, digest, num_tokens)
            self._named.setdefault(name, {})[request_id] = offer
            self._claim(offer)
        if ready_tokens < offer.ready_tokens:
            for writing in list(offer.writings.values()):
                if writing.next_token > ready_tokens:
                    self._writer.stop(writing, Cause.STOPPED, "prefill computes some of its tokens anew")
        offer.block_ids, offer.ready_tokens, offer.manifest = block_ids, ready_tokens, manifest
        for writing in list(offer.writings.values()):
            self._writer.advance(writing)

    def finish(self, request_id: PrefillRequestId) -> None:
        """The request computes no more tokens. Its blocks are kept until decode has them or the lease ends."""
        offer = self._offers.get(request_id)
        if offer is None:
            self._done(request_id)
            return
        offer.finished = True
        self._leases.grant(request_id)
        for writing in list(offer.writings.values()):
            self._writer.advance(writing)
        self._settle(offer)

    def renew(self, names: Iterable[str]) -> None:
        """Decode still wants these requests. It may know the name of the transfer only."""
        self._leases.renew(one for name in names for one in self._named.get(name, (PrefillRequestId(name),)))

    def stop(self, request_id: PrefillRequestId, reason: str, *, is_kept: bool = True) -> None:
        """The request is gone: nothing more is posted, and its word is gone at once.

        Args:
            is_kept: vLLM keeps its blocks until it is done; else its end is nobody's concern.
        """
        # Its word is published before the device has got there, and its offer only then.
        self._words.remove(request_id)
        offer = self._offers.get(request_id)
        if offer is None:
            if is_kept:
                self._done(request_id)
            return
        offer.finished, offer.is_kept = True, is_kept
        self._let_down(offer, Cause.STOPPED, reason)

    def preempt(self, request_id: PrefillRequestId, hold: int) -> None:
        """The request starts over in other blocks. Keep the old ones until ``quiet``: they may still be read.

        What was written stays written.
        """
        offer = self._offers.get(request_id)
        if offer is None:
            self._quiet(hold)
            return
        offer.block_ids, offer.ready_tokens, offer.manifest = (), 0, None
        offer.draining.append(hold)
        self._settle(offer)

    # ------------------------------------------------------------------------------------------------- what decode says

    def handle(self, agent: str, message: Registration | Withdrawal | Release) -> None:
        """Take in what a rank of decode says; ``agent`` is its own."""
        if isinstance(message, Registration):
            self._register(agent, message)
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
            offer = self._offers.get(request_id)
            # Whoever is being written to has come in time.
            if offer is not None:
                self._settle(offer)
        for key in self._unmatched.take_due(now):
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
        for name in self._released.take_due(now):
            del self._released_ranks[name]
        self._recent.take_due(now)
        timers = (self._leases, self._unmatched, self._stuck, self._released, self._recent)
        due = (one.first_seconds for one in timers)
        return min((one for one in due if one is not None), default=None)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _register(self, agent: str, registration: Registration) -> None:
        key = agent, registration.attempt
        if key in self._writings or key in self._over:
            self.dropped["doubled or late registration"] += 1
            return
        writing = self._writings[key] = Writing(agent, registration, next_token=registration.first_token)
        self._of_agent.setdefault(agent, {})[key] = writing
        # Whoever waits for prefill hears first that it does not come.
        self._stuck[key] = self._clock.now_seconds() + self._unmatched_seconds + PROBE_SECONDS
        if registration.request_id:
            offer = self._offers.get(PrefillRequestId(registration.request_id))
            if offer is None or offer.stopped:
                self._writer.stop(writing, Cause.LEASE, "prefill does not keep this request any more")
            elif (offer.digest, offer.num_tokens) != (registration.digest, registration.end_token):
                self._writer.stop(writing, Cause.DIGEST, "prefill computed another prompt")
            else:
                self._join(writing, offer)
        else:
            offer = self._wanted_by(registration)
            if offer is not None:
                self._join(writing, offer)
            else:
                self._wait(writing)
        self._writer.connect(writing)

    def _wanted_by(self, registration: Registration) -> Offer | None:
        """The oldest offer of this name and prompt that this rank of decode has not had."""
        meant = registration.digest, registration.end_token
        rank = registration.decode.tp_rank
        for offer in self._named.get(registration.name, {}).values():
            had = {*offer.settled, *(one.registration.decode.tp_rank for one in offer.writings.values())}
            if (offer.digest, offer.num_tokens) == meant and not offer.stopped and rank not in had:
                return offer
        return None

    def _join(self, writing: Writing, offer: Offer) -> None:
        writing.offer = offer
        offer.writings[writing.key] = writing

    def _wait(self, writing: Writing) -> None:
        name = writing.registration.name
        is_known = name in self._named or name in self._recent
        seconds = min(self._unmatched_seconds, GRACE_SECONDS) if is_known else self._unmatched_seconds
        self._unmatched[writing.key] = self._clock.now_seconds() + seconds
        self._unmatched_of.setdefault(name, {})[writing.key] = writing

    def _claim(self, offer: Offer) -> None:
        """Registrations that have waited for this offer are served from it; releases that came before it count."""
        for writing in list(self._unmatched_of.get(offer.name, {}).values()):
            if writing.stopping is None and self._wanted_by(writing.registration) is offer:
                self._no_longer_unmatched(writing)
                self._join(writing, offer)
        self._released.pop((offer.name, offer.digest), None)
        for tp_rank, tp_size in self._released_ranks.pop((offer.name, offer.digest), {}).items():
            if all(writing.registration.decode.tp_rank != tp_rank for writing in offer.writings.values()):
                self._settle_rank(offer, tp_rank, tp_size)

    def _no_longer_unmatched(self, writing: Writing) -> None:
        self._unmatched.pop(writing.key, None)
        waiting = self._unmatched_of.get(writing.registration.name)
        if waiting is not None:
            waiting.pop(writing.key, None)
            if not waiting:
                del self._unmatched_of[writing.registration.name]

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
        if message.request_id:
            offer = self._offers.get(PrefillRequestId(message.request_id))
        else:
            named = self._named.get(message.name, {}).values()
            fitting = (one for one in named if one.digest == message.digest and message.tp_rank not in one.settled)
            offer = next(fitting, None)
        if offer is not None:
            self._settle_rank(offer, message.tp_rank, message.tp_size)
            self._settle(offer)
        elif not message.request_id:
            name = message.name, message.digest
            self._released_ranks.setdefault(name, {})[message.tp_rank] = message.tp_size
            self._released[name] = self._clock.now_seconds() + self._lease_seconds

    def _ended(self, writing: Writing) -> None:
        """Nothing of it is in flight, and it has been answered if it was stopped."""
        del self._writings[writing.key]
        of_agent = self._of_agent[writing.agent]
        del of_agent[writing.key]
        if not of_agent:
            del self._of_agent[writing.agent]
        self._over.add(writing.key)
        self._stuck.pop(writing.key, None)
        self._no_longer_unmatched(writing)
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
        if offer.draining and not offer.is_read:
            for hold in offer.draining:
                self._quiet(hold)
            offer.draining = []
        # The end of its last registration may have settled it already.
        if not offer.finished or offer.writings or self._offers.get(offer.request_id) is not offer:
            return
        if not (offer.is_satisfied or offer.stopped):
            if offer.request_id in self._leases:
                return
            self._expired(offer.request_id)
        # Before the blocks can be given back.
        self._words.remove(offer.request_id)
        self._leases.pop(offer.request_id, None)
        del self._offers[offer.request_id]
        named = self._named[offer.name]
        del named[offer.request_id]
        if not named:
            del self._named[offer.name]
        self._recent[offer.name] = self._clock.now_seconds() + self._lease_seconds
        if offer.is_kept:
            self._done(offer.request_id)

    def _let_down(self, offer: Offer, cause: Cause, reason: str) -> None:
        self._words.remove(offer.request_id)
        offer.stopped = offer.stopped or reason
        for writing in list(offer.writings.values()):
            self._writer.stop(writing, cause, reason)
        self._settle(offer)
