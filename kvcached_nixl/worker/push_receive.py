# SPDX-License-Identifier: Apache-2.0
"""Decode's half of a push: which blocks wait for whom, and when each of them is done. Once per worker.

A request is registered with every *contributor*: the ranks of prefill that write into this rank. It ends once, when all
of them have stopped: with everything written, or failed. Until then its blocks belong to the transfer (rule R2), even
if the request itself is gone, because a WRITE that was posted cannot be called back.

    waiting --every contributor complete--> received
    waiting --one failed, deadline, withdrawn--> stopping --all stopped--> failed

A contributor stops by completing, by saying Failed or Withdrawn, or by being gone for good. Nothing else ends one: no
deadline gives blocks back that somebody may still write to; a deadline only asks the contributors to stop.

Nothing here blocks, sleeps or starts a thread. Owned by the writer thread; other threads reach it through its inbox.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcached_nixl.clock import Clock
from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.transport.base import Transport, TransportError
from kvcached_nixl.wire.lease import beats
from kvcached_nixl.wire.push import (
    AttemptKey,
    Declined,
    Failed,
    Message,
    Registration,
    Withdrawal,
    Withdrawn,
    Written,
    encode,
)

__all__ = ["Ended", "PushReceiver"]


@dataclass(frozen=True)
class Ended:
    """A registration that is over. ``failed`` says why not everything was written; it is empty if everything was."""

    request_id: DecodeRequestId
    failed: str = ""


@dataclass
class _Contributor:
    """A rank of prefill that writes into this rank. ``last`` is the index of its last WRITE, once it is known."""

    peer: str
    arrived: set[int] = field(default_factory=set)
    last: int | None = None
    gave_up: bool = False

    @property
    def complete(self) -> bool:
        return self.last is not None and len(self.arrived) == self.last + 1

    @property
    def stopped(self) -> bool:
        return self.complete or self.gave_up


@dataclass
class _Waiting:
    """A registration that is not over. ``ask_at_seconds``: when the contributors are asked to stop (again)."""

    registration: Registration
    contributors: dict[int, _Contributor]
    ask_at_seconds: float
    failed: str = ""


class PushReceiver:
    """See the module.

    Args:
        transport: carries the messages; sends happen inside the calls below.
        registration_timeout_seconds: how long prefill may take to write everything before it is asked to stop.
        repeat_seconds: how long to wait for an answer to a withdrawal before it is sent again.

    Attributes:
        dropped: what was received and had no effect, counted by reason.
    """

    def __init__(
        self, transport: Transport, clock: Clock, *, registration_timeout_seconds: float, repeat_seconds: float
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._registration_timeout_seconds = registration_timeout_seconds
        self._repeat_seconds = repeat_seconds
        self._waiting: dict[DecodeRequestId, _Waiting] = {}
        self._attempts: dict[AttemptKey, DecodeRequestId] = {}
        self._ended: list[Ended] = []
        self._lost: set[str] = set()
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        """Registrations that are not over."""
        return len(self._waiting)

    def register(self, registration: Registration, contributors: Iterable[tuple[int, str]]) -> None:
        """Tell every contributor, (rank of prefill, its agent), where to write.

        Raises:
            ValueError: the request is registered already, or there is no contributor.
        """
        request_id = registration.decode_request_id
        found = {rank: _Contributor(peer) for rank, peer in contributors}
        if request_id in self._waiting or not found:
            raise ValueError(f"{request_id}: found {len(found)} contributors; expected some, and one registration")
        waiting = _Waiting(registration, found, self._clock.now_seconds() + self._registration_timeout_seconds)
        self._waiting[request_id] = waiting
        self._attempts[registration.key] = request_id
        notification = encode(registration)
        for rank, contributor in found.items():
            cause = self._send(contributor.peer, notification)
            if cause is not None:
                # It was not told, so it will not write.
                contributor.gave_up = True
                self._fail(waiting, f"rank {rank} of prefill was not reached: {cause}")
        self._settle(request_id)

    def take_lost(self) -> set[str]:
        """Agents whom something did not reach since the last call."""
        lost, self._lost = self._lost, set()
        return lost

    def decline(self, transfer: str, peers: Iterable[str]) -> None:
        """Tell prefill that nothing is needed. If it does not hear that, its lease ends the matter."""
        for peer in peers:
            self.dropped["decline not sent"] += self._send(peer, encode(Declined(transfer))) is not None

    def renew(self, names: Iterable[PrefillRequestId], peers: Iterable[str]) -> None:
        """Tell prefill that these requests are still wanted. The next beat makes up for one that does not arrive."""
        sent = list(beats(names))
        for peer in peers:
            self.dropped["beat not sent"] += sum(self._send(peer, beat) is not None for beat in sent)

    def withdraw(self, request_id: DecodeRequestId, reason: str) -> None:
        """The request is gone: ask the contributors to stop. It ends as failed when they have. Again is harmless."""
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            self._fail(waiting, reason)
            self._settle(request_id)

    def handle(self, peer: str, message: Message) -> None:
        """Take in what a contributor says. What fits no registration, or comes from somebody else, is dropped."""
        if not isinstance(message, (Written, Failed, Withdrawn)):
            self.dropped["not for decode"] += 1
            return
        request_id = self._attempts.get(message.key)
        if request_id is None:
            self.dropped["unknown attempt"] += 1
            return
        waiting = self._waiting[request_id]
        contributor = waiting.contributors.get(message.tp_rank)
        if contributor is None or contributor.peer != peer:
            self.dropped["not a contributor"] += 1
            return
        if contributor.stopped:
            self.dropped["after the end"] += 1
            return
        if isinstance(message, Written):
            self._written(waiting, contributor, message)
        else:
            contributor.gave_up = True
            reason = message.reason if isinstance(message, Failed) else "withdrawn"
            self._fail(waiting, f"rank {message.tp_rank} of prefill stopped: {reason}")
        self._settle(request_id)

    def peer_gone(self, peer: str) -> None:
        """An agent is gone for good: its process has ended, or another one answers in its place."""
        for request_id, waiting in list(self._waiting.items()):
            for rank, contributor in waiting.contributors.items():
                if contributor.peer == peer and not contributor.stopped:
                    contributor.gave_up = True
                    self._fail(waiting, f"rank {rank} of prefill is gone")
            self._settle(request_id)

    def tick(self) -> float | None:
        """Ask the contributors to stop where it is time; returns when to call again, None if nothing waits."""
        now = self._clock.now_seconds()
        for waiting in self._waiting.values():
            if waiting.ask_at_seconds <= now:
                timeout = self._registration_timeout_seconds
                self._fail(waiting, f"prefill has not written everything in {timeout:g} s", again=True)
        return min((waiting.ask_at_seconds for waiting in self._waiting.values()), default=None)

    def silent_peers(self) -> set[str]:
        """Agents that have not said that they stopped: they may be gone, and nobody else would say so."""
        return {
            contributor.peer
            for waiting in self._waiting.values()
            for contributor in waiting.contributors.values()
            if not contributor.stopped
        }

    def take_ended(self) -> list[Ended]:
        """What ended since the last call, each registration once."""
        ended, self._ended = self._ended, []
        return ended

    def _written(self, waiting: _Waiting, contributor: _Contributor, message: Written) -> None:
        last = contributor.last
        beyond = last is not None and message.index > last
        second_last = message.is_last and last is not None and last != message.index
        before_known = message.is_last and any(index > message.index for index in contributor.arrived)
        if beyond or second_last or before_known:
            # Somebody counts wrongly, so the bytes cannot be trusted; but it has not said that it stopped.
            self._fail(waiting, f"rank {message.tp_rank} of prefill numbers its WRITEs wrongly")
            return
        if message.index in contributor.arrived:
            self.dropped["doubled"] += 1
            return
        contributor.arrived.add(message.index)
        if message.is_last:
            contributor.last = message.index

    def _fail(self, waiting: _Waiting, reason: str, again: bool = False) -> None:
        """Note the first reason, and ask every contributor that has not stopped to do so."""
        if waiting.failed and not again:
            return
        waiting.failed = waiting.failed or reason
        waiting.ask_at_seconds = self._clock.now_seconds() + self._repeat_seconds
        registration = waiting.registration
        withdrawal = encode(Withdrawal(registration.transfer, registration.attempt, registration.decode))
        for contributor in waiting.contributors.values():
            if not contributor.stopped:
                self.dropped["withdrawal not sent"] += self._send(contributor.peer, withdrawal) is not None

    def _send(self, peer: str, notification: bytes) -> TransportError | None:
        """Returns what kept it from being sent."""
        try:
            self._transport.send(peer, notification)
        except TransportError as cause:
            self._lost.add(peer)
            return cause
        return None

    def _settle(self, request_id: DecodeRequestId) -> None:
        waiting = self._waiting.get(request_id)
        if waiting is None or not all(contributor.stopped for contributor in waiting.contributors.values()):
            return
        del self._waiting[request_id], self._attempts[waiting.registration.key]
        self._ended.append(Ended(request_id, waiting.failed))
