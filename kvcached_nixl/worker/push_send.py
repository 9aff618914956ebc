# SPDX-License-Identifier: Apache-2.0
"""Prefill's half of a push: what is written to whom, and when prefill's blocks are free. Once per worker.

Two things meet here, in either order, under the name of a *transfer*: an *offer* (prefill's request, its blocks and how
many tokens in them are computed) and *attempts* (registrations of decode's ranks). Whatever both have is written at
once, so the blocks of one step travel while the next one computes.

    attempt:  waiting for its peer or for tokens -> writing -> everything posted -> over
                     \\------- told to stop, or something failed: nothing more is posted -------> over, answered

An attempt is over when none of its WRITEs is in flight; only then is it answered, and only then are the blocks on
either side free (rule R2). An attempt that is over is remembered, so that a late or doubled registration of it is not
taken for a new one and written into blocks that have changed hands.

A turn costs what is due in it, not what waits: a transfer is due when something happened to it, when one of its
deadlines has come, and for as long as a WRITE of it is in flight.

Nothing here blocks, sleeps or starts a thread. Owned by the writer thread; other threads reach it through its inbox.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvcached_nixl.clock import Clock
from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.transport.base import Transport
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.wire.push import (
    AttemptKey,
    Declined,
    Failed,
    Message,
    Peer,
    Registration,
    Withdrawal,
    Withdrawn,
)
from kvcached_nixl.worker.lease import Leases
from kvcached_nixl.worker.push_attempt import Attempt
from kvcached_nixl.worker.push_peers import Peers
from kvcached_nixl.worker.push_records import Memory, Offer

__all__ = ["PushSender"]


class PushSender:
    """See the module.

    Args:
        local: where this rank keeps its KV.
        tp_rank, tp_size: this rank's place among prefill's.
        lease_seconds: how long a finished request's blocks wait for decode, unless it renews that.
        unmatched_seconds: how long a registration waits for prefill's request to appear.

    Attributes:
        dropped: what was received and had no effect, counted by reason.
    """

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        local: Planes,
        *,
        tp_rank: int,
        tp_size: int,
        lease_seconds: float,
        unmatched_seconds: float,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._local = local
        self._tp_rank = tp_rank
        self._tp_size = tp_size
        self._unmatched_seconds = unmatched_seconds
        self._offers: dict[str, Offer] = {}
        self._transfers: dict[PrefillRequestId, str] = {}
        self._attempts: dict[str, dict[int, Attempt]] = {}
        self._over = Memory[AttemptKey]()
        self._declined = Memory[str]()
        self._ended_transfers = Memory[str]()
        self._due: dict[str, None] = {}
        self._leases = Leases(clock, lease_seconds=lease_seconds)
        self._unmatched = Deadlines[AttemptKey]()
        self._done: list[PrefillRequestId] = []
        self._quiet: list[int] = []
        self._expired: list[PrefillRequestId] = []
        self.dropped: Counter[str] = Counter()
        self._peers = Peers(transport, self.dropped)

    def __len__(self) -> int:
        """Offers, attempts and answers that are not over."""
        return len(self._offers) + len(self._all()) + len(self._peers)

    @property
    def in_flight(self) -> bool:
        """Whether a WRITE is: then call :meth:`tick` again soon, nothing else tells its end."""
        return any(attempt.reading for transfer in self._due for attempt in self._attempts_of(transfer))

    @property
    def is_owing(self) -> bool:
        """Whether prefill has something that decode waits for or will ask for; a WRITE in flight is part of that."""
        return bool(self._offers)

    @property
    def is_delivering(self) -> bool:
        """Whether a WRITE of a request that has finished is in flight: decode waits for nothing else any more."""
        return any(transfer in self._offers and self._offers[transfer].finished for transfer in self._due)

    # ------------------------------------------------------------------------------------ what prefill's scheduler says

    def offer(
        self, transfer: str, request_id: PrefillRequestId, block_ids: tuple[Sequence[int], ...], ready_tokens: int
    ) -> None:
        """The first ``ready_tokens`` tokens of a request are in ``block_ids`` (per group), computed and visible.

        Call it again when there are more. A second request under a live transfer's name is refused: it is not known
        which of the two decode means, so neither is written.
        """
        offer = self._offers.get(transfer)
        if offer is None:
            self._ended_transfers.discard(transfer)
            offer = self._offers[transfer] = Offer(request_id, transfer)
            self._transfers[request_id] = transfer
            if transfer in self._declined:
                offer.awaited_ranks = 0
            for attempt in self._attempts_of(transfer):
                self._unmatched.pop(attempt.registration.key, None)
        self._due[transfer] = None
        if offer.request_id != request_id:
            self.dropped["ambiguous offer"] += 1
            self._stop_offer(offer, f"prefill has two requests of this name, {offer.request_id} and {request_id}")
            return
        offer.block_ids, offer.ready_tokens = block_ids, ready_tokens

    def finish(self, request_id: PrefillRequestId) -> None:
        """The request computes no more tokens. Its blocks are kept until decode has them or the lease ends."""
        offer = self._offer_of(request_id)
        if offer is None:
            self._done.append(request_id)
        else:
            offer.finished = True
            self._leases.grant(request_id)
            self._due[offer.transfer] = None

    def renew(self, names: Iterable[PrefillRequestId]) -> None:
        """Decode still wants these requests. It may know the name of the transfer only."""
        self._leases.renew(self._offers[name].request_id if name in self._offers else name for name in names)

    def stop(self, request_id: PrefillRequestId, reason: str) -> None:
        """The request is gone: nothing more is posted. :meth:`take_done` names it when nothing is in flight."""
        offer = self._offer_of(request_id)
        self.finish(request_id)
        if offer is not None:
            self._stop_offer(offer, reason)

    def restart(self, request_id: PrefillRequestId, hold: int) -> None:
        """The request was preempted and starts over in other blocks.

        Keep the old ones until :meth:`take_quiet` names their ``hold``: they may still be read. What was written stays
        written.
        """
        offer = self._offer_of(request_id)
        if offer is None:
            self._quiet.append(hold)
        else:
            offer.block_ids, offer.ready_tokens = (), 0
            offer.draining.append(hold)
            self._due[offer.transfer] = None

    def refuse(self, transfer: str, reason: str) -> None:
        """Prefill has no request of this name and will not have one: whoever registers it is told so."""
        self._ended_transfers.add(transfer)
        self._stop_attempts(transfer, reason)

    # ------------------------------------------------------------------------------------------------- what decode says

    def handle(self, peer: str, message: Message) -> None:
        """Take in what a rank of decode says; ``peer`` is its agent."""
        if isinstance(message, Registration):
            self._register(peer, message)
        elif isinstance(message, Withdrawal):
            self._withdraw(peer, message)
        elif isinstance(message, Declined):
            self._declined.add(message.transfer)
            if message.transfer in self._offers:
                self._offers[message.transfer].awaited_ranks = 0
                self._due[message.transfer] = None
        else:
            self.dropped["not for prefill"] += 1

    def unknown_peers(self) -> dict[str, Peer]:
        """Agents that wait for a WRITE or an answer and whose memory is not known yet, and where to ask for it."""
        return self._peers.strangers

    def peer_known(self, peer: str, planes: Planes) -> None:
        """The handshake with a rank of decode is done, and the transport knows it."""
        self._peers.known(peer, planes)
        for attempt in self._all():
            if attempt.peer == peer:
                self._due[attempt.registration.transfer] = None

    def peer_lost(self, peer: str, reason: str) -> None:
        """The handshake failed, or the peer is gone: its attempts fail, and it is not answered."""
        self._peers.lost(peer)
        for attempt in self._all():
            if attempt.peer == peer:
                attempt.stop(reason)
                self._due[attempt.registration.transfer] = None

    # ---------------------------------------------------------------------------------------------------------- working

    def tick(self) -> float | None:
        """Post what can be posted and see what has ended.

        Returns: when to call again at the latest, in the clock's seconds; None if only a message can change anything.
        """
        now = self._clock.now_seconds()
        self._due |= dict.fromkeys(self._transfers[request_id] for request_id in self._leases.take_due(now))
        self._due |= dict.fromkeys(key[0] for key in self._unmatched.take_due(now))
        due, self._due = self._due, {}
        for transfer in due:
            self._advance(transfer)
        deadlines = (self._leases.first_seconds, self._unmatched.first_seconds)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def take_done(self) -> list[PrefillRequestId]:
        """Requests whose blocks nobody needs any more, each once."""
        done, self._done = self._done, []
        return done

    def take_quiet(self) -> list[int]:
        """Holds none of whose blocks is being read any more, each once."""
        quiet, self._quiet = self._quiet, []
        return quiet

    def take_expired(self) -> list[PrefillRequestId]:
        """Requests whose lease has ended, each once; they are among those that are done, too."""
        expired, self._expired = self._expired, []
        return expired

    def _advance(self, transfer: str) -> None:
        for attempt in self._attempts_of(transfer):
            attempt.look_after(self._transport)
            self._make_writes(attempt)
            attempt.post(self._transport)
            if not attempt.reading and (attempt.stopping or attempt.complete):
                self._end(attempt)
        offer = self._offers.get(transfer)
        if offer is not None:
            # Whoever is being written to has come in time.
            if offer.finished and offer.request_id not in self._leases and not self._attempts_of(transfer):
                self._expired.append(offer.request_id)
                self._stop_offer(offer, "its lease ended")
            self._settle(offer)
        if any(attempt.reading for attempt in self._attempts_of(transfer)):
            self._due[transfer] = None

    def _register(self, peer: str, registration: Registration) -> None:
        transfer, rank = registration.transfer, registration.decode.tp_rank
        known = self._attempts.get(transfer, {})
        if registration.attempt in known or registration.key in self._over:
            self.dropped["doubled or late registration"] += 1
            return
        attempt = Attempt(
            peer, registration, registration.first_token, self._clock.now_seconds() + self._unmatched_seconds
        )
        rivals = [one for one in known.values() if one.registration.decode.tp_rank == rank and not one.stopping]
        for one in [*rivals, attempt] if rivals else []:
            one.stopping = "two registrations of one rank of decode have this name"
        if transfer in self._ended_transfers:
            attempt.stopping = "prefill has let go of this request"
        self._attempts.setdefault(transfer, {})[registration.attempt] = attempt
        self._due[transfer] = None
        if transfer not in self._offers:
            self._unmatched[registration.key] = attempt.unmatched_at_seconds
        self._peers.heard(peer, registration.decode)

    def _withdraw(self, peer: str, message: Withdrawal) -> None:
        attempt = self._attempts.get(message.transfer, {}).get(message.attempt)
        if attempt is None:
            # It is over, or its registration is still on its way and must not be taken in when it comes.
            if message.key not in self._over:
                self._settled(message.transfer, message.decode)
            self._over.add(message.key)
            answer = Withdrawn(*message.key, self._tp_rank, self._tp_size)
            self._peers.answer(peer, message.decode, answer)
        elif attempt.peer == peer:
            attempt.stop("withdrawn")
            attempt.withdrawn = True
            self._due[message.transfer] = None
        else:
            self.dropped["withdrawal by another peer"] += 1

    def _make_writes(self, attempt: Attempt) -> None:
        """Make WRITEs of the tokens that are ready and in none yet, up to a boundary that both sides' blocks share."""
        registration = attempt.registration
        offer, remote = self._offers.get(registration.transfer), self._peers.memory_of(attempt.peer)
        if offer is None:
            if attempt.unmatched_at_seconds <= self._clock.now_seconds():
                attempt.stop("prefill has no such request")
            return
        if attempt.stopping or attempt.complete:
            return
        if offer.stopped:
            attempt.stopping = offer.stopped
            return
        if offer.finished and offer.ready_tokens < registration.end_token:
            attempt.stopping = f"prefill computed {offer.ready_tokens} of {registration.end_token} tokens"
            return
        if remote is None:
            return
        end = min(offer.ready_tokens, registration.end_token)
        if end < registration.end_token:
            # A step ends anywhere; the rest of its last block goes with the next one.
            end -= end % max(self._local.block_size, registration.block_size)
        if end > attempt.next_token:
            try:
                attempt.make_writes(self._local, remote, offer.block_ids, end, self._tp_rank, self._tp_size)
            except ValueError as cause:
                attempt.stopping = f"no WRITE was made: {cause}"

    def _end(self, attempt: Attempt) -> None:
        registration = attempt.registration
        key = registration.key
        siblings = self._attempts[registration.transfer]
        del siblings[registration.attempt]
        if not siblings:
            del self._attempts[registration.transfer]
        self._unmatched.pop(key, None)
        self._over.add(key)
        if attempt.withdrawn:
            self._peers.answer(attempt.peer, registration.decode, Withdrawn(*key, self._tp_rank, self._tp_size))
        elif attempt.stopping:
            failed = Failed(*key, self._tp_rank, self._tp_size, attempt.stopping)
            self._peers.answer(attempt.peer, registration.decode, failed)
        self._settled(registration.transfer, registration.decode)

    def _settled(self, transfer: str, decode: Peer) -> None:
        """A rank of decode needs nothing more of an offer. Of one that is still to come it may be another request's."""
        offer = self._offers.get(transfer)
        if offer is not None:
            offer.settled.add(decode.tp_rank)
            # The ranks of decode that share this rank's heads.
            offer.awaited_ranks = max(1, decode.tp_size // self._tp_size)
            self._due[transfer] = None

    def _settle(self, offer: Offer) -> None:
        """Let go of an offer that nobody waits for and nothing reads."""
        attempts = self._attempts_of(offer.transfer)
        if offer.draining and not any(attempt.reading for attempt in attempts):
            self._quiet += offer.draining
            offer.draining = []
        satisfied = offer.awaited_ranks is not None and len(offer.settled) >= offer.awaited_ranks
        if offer.finished and (satisfied or offer.stopped) and not attempts:
            del self._offers[offer.transfer], self._transfers[offer.request_id]
            self._leases.pop(offer.request_id, None)
            self._declined.discard(offer.transfer)
            if not satisfied:
                # Of one that was served, who registers now means a later request of this name.
                self._ended_transfers.add(offer.transfer)
            self._done.append(offer.request_id)

    def _stop_offer(self, offer: Offer, reason: str) -> None:
        offer.stopped = offer.stopped or reason
        self._stop_attempts(offer.transfer, offer.stopped)

    def _stop_attempts(self, transfer: str, reason: str) -> None:
        self._due[transfer] = None
        for attempt in self._attempts_of(transfer):
            attempt.stop(reason)

    def _attempts_of(self, transfer: str) -> list[Attempt]:
        return list(self._attempts.get(transfer, {}).values())

    def _all(self) -> list[Attempt]:
        return [attempt for siblings in self._attempts.values() for attempt in siblings.values()]

    def _offer_of(self, request_id: PrefillRequestId) -> Offer | None:
        transfer = self._transfers.get(request_id)
        return None if transfer is None else self._offers.get(transfer)
