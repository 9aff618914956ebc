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

Nothing here blocks, sleeps or starts a thread. Owned by the writer thread; other threads reach it through its inbox.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvcached_nixl.clock import Clock
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.transport.base import Handle, State, Transport, TransportError
from kvcached_nixl.wire.push import (
    AttemptKey,
    Declined,
    Failed,
    Message,
    Peer,
    Registration,
    Withdrawal,
    Withdrawn,
    Written,
    encode,
)
from kvcached_nixl.worker.descriptors import Blocks, Planes, pair
from kvcached_nixl.worker.push_records import Attempt, Memory, Offer

__all__ = ["PushSender"]


class PushSender:
    """See the module.

    Args:
        local: where this rank keeps its KV.
        tp_rank, tp_size: this rank's place among prefill's.
        lease_seconds: how long a finished request's blocks wait for decode.
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
        self._lease_seconds = lease_seconds
        self._unmatched_seconds = unmatched_seconds
        self._offers: dict[str, Offer] = {}
        self._transfers: dict[PrefillRequestId, str] = {}
        self._attempts: dict[str, dict[int, Attempt]] = {}
        self._over = Memory[AttemptKey]()
        self._declined = Memory[str]()
        self._ended_transfers = Memory[str]()
        self._peers: dict[str, Planes] = {}
        self._unanswered: dict[str, tuple[Peer, list[Message]]] = {}
        self._done: list[PrefillRequestId] = []
        self._quiet: dict[PrefillRequestId, None] = {}
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        """Offers, attempts and answers that are not over."""
        return len(self._offers) + len(self._all()) + sum(len(messages) for _, messages in self._unanswered.values())

    @property
    def in_flight(self) -> bool:
        """Whether a WRITE is: then call :meth:`tick` again soon, nothing else tells its end."""
        return any(attempt.in_flight for attempt in self._all())

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
            offer.expires_at_seconds = self._clock.now_seconds() + self._lease_seconds

    def stop(self, request_id: PrefillRequestId, reason: str) -> None:
        """The request is gone: nothing more is posted. :meth:`take_done` names it when nothing is in flight."""
        offer = self._offer_of(request_id)
        self.finish(request_id)
        if offer is not None:
            self._stop_offer(offer, reason)

    def restart(self, request_id: PrefillRequestId) -> None:
        """The request was preempted and starts over in other blocks.

        Keep the old ones until :meth:`take_quiet` names it: they may still be read. What was written stays written.
        """
        offer = self._offer_of(request_id)
        if offer is None:
            self._quiet[request_id] = None
        else:
            # It may have been quiet after an earlier preemption, and not been taken yet.
            self._quiet.pop(request_id, None)
            offer.block_ids, offer.ready_tokens, offer.draining = (), 0, True

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
        else:
            self.dropped["not for prefill"] += 1

    def unknown_peers(self) -> dict[str, Peer]:
        """Agents that wait for a WRITE or an answer and whose memory is not known yet, and where to ask for it."""
        found = {attempt.peer: attempt.registration.decode for attempt in self._all()}
        found |= {peer: address for peer, (address, _) in self._unanswered.items()}
        return {peer: address for peer, address in found.items() if peer not in self._peers}

    def peer_known(self, peer: str, planes: Planes) -> None:
        """The handshake with a rank of decode is done, and the transport knows it."""
        self._peers[peer] = planes
        _, messages = self._unanswered.pop(peer, (None, []))
        for message in messages:
            self._send(peer, message)

    def peer_lost(self, peer: str, reason: str) -> None:
        """The handshake failed, or the peer is gone: its attempts fail, and it is not answered."""
        self._peers.pop(peer, None)
        _, messages = self._unanswered.pop(peer, (None, []))
        self.dropped["answer not sent"] += len(messages)
        for attempt in self._all():
            if attempt.peer == peer:
                attempt.stopping = attempt.stopping or reason

    # ---------------------------------------------------------------------------------------------------------- working

    def tick(self) -> float | None:
        """Post what can be posted and see what has ended.

        Returns: when to call again at the latest, in the clock's seconds; None if only a message can change anything.
        """
        now = self._clock.now_seconds()
        for offer in self._offers.values():
            if offer.expires_at_seconds is not None and offer.expires_at_seconds <= now and not self._of(offer):
                self._stop_offer(offer, "its lease ended")
        for attempt in list(self._all()):
            self._look_after(attempt)
            self._write(attempt)
            if not attempt.in_flight and (attempt.stopping or attempt.posted):
                self._end(attempt)
        for offer in list(self._offers.values()):
            self._settle(offer)
        deadlines = [
            offer.expires_at_seconds for offer in self._offers.values() if offer.expires_at_seconds is not None
        ]
        deadlines += [one.unmatched_at_seconds for one in self._all() if one.registration.transfer not in self._offers]
        return min(deadlines, default=None)

    def take_done(self) -> list[PrefillRequestId]:
        """Requests whose blocks nobody needs any more, each once."""
        done, self._done = self._done, []
        return done

    def take_quiet(self) -> list[PrefillRequestId]:
        """Restarted requests none of whose earlier blocks is being read any more."""
        quiet, self._quiet = list(self._quiet), {}
        return quiet

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

    def _withdraw(self, peer: str, message: Withdrawal) -> None:
        attempt = self._attempts.get(message.transfer, {}).get(message.attempt)
        if attempt is None:
            # It is over, or its registration is still on its way and must not be taken in when it comes.
            self._over.add(message.key)
            answer = Withdrawn(*message.key, self._tp_rank, self._tp_size)
            self._answer(peer, message.decode, answer)
        elif attempt.peer == peer:
            attempt.stopping = attempt.stopping or "withdrawn"
            attempt.withdrawn = True
        else:
            self.dropped["withdrawal by another peer"] += 1

    def _write(self, attempt: Attempt) -> None:
        """Post the tokens that are ready and not posted, up to a boundary that both sides' blocks share."""
        registration = attempt.registration
        offer, remote = self._offers.get(registration.transfer), self._peers.get(attempt.peer)
        if offer is None:
            if attempt.unmatched_at_seconds <= self._clock.now_seconds():
                attempt.stopping = attempt.stopping or "prefill has no such request"
            return
        if attempt.stopping or attempt.posted:
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
                self._post(attempt, offer, remote, end)
            except (ValueError, TransportError) as cause:
                attempt.stopping = f"a WRITE was not posted: {cause}"

    def _post(self, attempt: Attempt, offer: Offer, remote: Planes, end: int) -> None:
        registration = attempt.registration
        if len(registration.block_ids) != len(offer.block_ids) or registration.block_size != remote.block_size:
            raise ValueError("the registration does not fit the handshake (KV-cache groups or block size)")
        found = [
            pair(self._local, remote, Blocks(here), Blocks(there, registration.first_token), attempt.next_token, end)
            for here, there in zip(offer.block_ids, registration.block_ids, strict=True)
        ]
        written = Written(
            *registration.key,
            self._tp_rank,
            self._tp_size,
            attempt.next_index,
            end >= registration.end_token,
        )
        handle = self._transport.write(
            attempt.peer,
            np.concatenate([one.local for one in found]),
            np.concatenate([one.remote for one in found]),
            encode(written),
        )
        attempt.in_flight.append(handle)
        attempt.next_token, attempt.next_index = end, attempt.next_index + 1

    def _look_after(self, attempt: Attempt) -> None:
        still: list[Handle] = []
        for handle in attempt.in_flight:
            state = self._transport.state(handle)
            if state is State.IN_FLIGHT:
                still.append(handle)
                continue
            self._transport.release(handle)
            if state is State.FAILED:
                attempt.stopping = attempt.stopping or "a WRITE failed"
        attempt.in_flight = still

    def _end(self, attempt: Attempt) -> None:
        registration = attempt.registration
        key = registration.key
        siblings = self._attempts[registration.transfer]
        del siblings[registration.attempt]
        if not siblings:
            del self._attempts[registration.transfer]
        self._over.add(key)
        if attempt.withdrawn:
            self._answer(attempt.peer, registration.decode, Withdrawn(*key, self._tp_rank, self._tp_size))
        elif attempt.stopping:
            failed = Failed(*key, self._tp_rank, self._tp_size, attempt.stopping)
            self._answer(attempt.peer, registration.decode, failed)
        offer = self._offers.get(registration.transfer)
        if offer is not None:
            offer.settled.add(registration.decode.tp_rank)
            if offer.awaited_ranks is None:
                # The ranks of decode that share this rank's heads.
                offer.awaited_ranks = max(1, registration.decode.tp_size // self._tp_size)

    def _settle(self, offer: Offer) -> None:
        """Let go of an offer that nobody waits for and nothing reads."""
        if offer.draining and not any(attempt.in_flight for attempt in self._of(offer)):
            offer.draining = False
            self._quiet[offer.request_id] = None
        satisfied = offer.awaited_ranks is not None and len(offer.settled) >= offer.awaited_ranks
        if offer.finished and (satisfied or offer.stopped) and not self._of(offer):
            del self._offers[offer.transfer], self._transfers[offer.request_id]
            self._declined.discard(offer.transfer)
            self._ended_transfers.add(offer.transfer)
            self._done.append(offer.request_id)

    def _stop_offer(self, offer: Offer, reason: str) -> None:
        offer.stopped = offer.stopped or reason
        for attempt in self._of(offer):
            attempt.stopping = attempt.stopping or offer.stopped

    def _of(self, offer: Offer) -> list[Attempt]:
        return list(self._attempts.get(offer.transfer, {}).values())

    def _all(self) -> list[Attempt]:
        return [attempt for siblings in self._attempts.values() for attempt in siblings.values()]

    def _offer_of(self, request_id: PrefillRequestId) -> Offer | None:
        transfer = self._transfers.get(request_id)
        return None if transfer is None else self._offers.get(transfer)

    def _answer(self, peer: str, address: Peer, message: Message) -> None:
        if peer in self._peers:
            self._send(peer, message)
        else:
            self._unanswered.setdefault(peer, (address, []))[1].append(message)

    def _send(self, peer: str, message: Message) -> None:
        try:
            self._transport.send(peer, encode(message))
        except TransportError:
            # Decode asks again, or is gone.
            self.dropped["answer not sent"] += 1
