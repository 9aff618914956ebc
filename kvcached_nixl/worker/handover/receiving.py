# SPDX-License-Identifier: Apache-2.0
"""Decode's half of a hand-over: what its requests wait for, and their ends. Once per worker, on the transfer thread.

A turn costs what is due in it, not what waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvcached_nixl.clock import Clock
from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.settings import TransferMode
from kvcached_nixl.wire.causes import Cause, HandOverFailed
from kvcached_nixl.wire.messages import Ready, Release, Stopped, Written, encode
from kvcached_nixl.wire.step import Released, Wanted
from kvcached_nixl.worker.handover.attempt import Attempt, Share, Side
from kvcached_nixl.worker.handover.local import contributors, peers_of
from kvcached_nixl.worker.handover.reading import ReadShare
from kvcached_nixl.worker.handover.registering import WriteShare
from kvcached_nixl.worker.handover.writers import Writers

__all__ = ["Receiving"]

REPEAT_SECONDS = 5.0
"""Between two askings of who may still write whether it has stopped."""


class Receiving:
    """See the module.

    Args:
        failed: called once per attempt that brings no KV.
        over: called once per attempt, when nothing of it is in flight any more.
    """

    def __init__(
        self,
        side: Side,
        clock: Clock,
        mode: TransferMode,
        failed: Callable[[Wanted, HandOverFailed], None],
        over: Callable[[Wanted], None],
    ) -> None:
        self._side = side
        self._clock = clock
        self._mode = mode
        self._failed = failed
        self._over = over
        self._attempts: dict[int, Attempt] = {}
        self._reported: set[int] = set()
        self._asked_again = Deadlines[int]()
        self._unanswered: set[int] = set()
        self._writers = Writers(side, clock, self._attempts)
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        """Attempts that are not over."""
        return len(self._attempts)

    @property
    def is_awaiting(self) -> bool:
        """Whether something may come at any moment that somebody waits for."""
        return len(self._attempts) > len(self._unanswered)

    def want(self, wanted: Wanted) -> None:
        """A request was given blocks. Nothing is moved before `begin`."""
        place = self._side.place
        found: list[Attempt] = []

        def attempt() -> Attempt:
            return found[0]

        shares: list[Share] = []
        refused: HandOverFailed | None = None
        try:
            writers, others = contributors(
                wanted.prefill, tp_rank=place.tp_rank, tp_size=place.tp_size, is_latent=place.is_latent
            )
            for address in peers_of(wanted.prefill, writers):
                if self._mode is TransferMode.PUSH or (wanted.manifest is not None and self._side.staging is not None):
                    shares.append(WriteShare(self._side, attempt, address))
                elif wanted.manifest is not None:
                    shares.append(ReadShare(self._side, attempt, address, wanted.manifest, self._be_written))
        except ValueError as cause:
            refused, others = HandOverFailed(Cause.REFUSED, str(cause)), ()
        found.append(Attempt(wanted, shares, self._changed))
        self._attempts[wanted.attempt] = found[0]
        if refused is not None or not shares:
            found[0].fail(refused or HandOverFailed(Cause.NO_MANIFEST, "there is no manifest to read by"))
            return
        self._release(wanted, others)

    def begin(self, number: int) -> None:
        """The device has ended every step that could still write its blocks."""
        attempt = self._attempts.get(number)
        if attempt is None or attempt.failed is not None:
            return
        for share in attempt.shares:
            if isinstance(share, WriteShare):
                self._writers.expect(share, number)
        for share in list(attempt.shares):
            # One that cannot be told ends the attempt at once.
            if attempt.failed is None:
                share.begin()

    def release(self, released: Released) -> None:
        """Tell all ranks of prefill that this rank of decode needs nothing. If they do not hear it, the lease ends."""
        place = self._side.place
        try:
            ranks = contributors(
                released.prefill, tp_rank=place.tp_rank, tp_size=place.tp_size, is_latent=place.is_latent
            )
        except ValueError:
            return
        message = Release(released.request_id, released.name, released.digest, place.tp_rank, place.tp_size)
        for address in peers_of(released.prefill, (*ranks[0], *ranks[1])):
            self._side.peers.send(address, encode(message))

    def fail(self, number: int, cause: HandOverFailed) -> None:
        """The request is gone, its time is over, or a defect was met. Again is harmless."""
        attempt = self._attempts.get(number)
        if attempt is not None:
            attempt.fail(cause)

    def handle(self, agent: str, message: Ready | Written | Stopped) -> None:
        """Take in what a contributor says. What fits no attempt, or comes from somebody else, is dropped."""
        attempt = self._attempts.get(message.attempt)
        if attempt is None:
            self.dropped["unknown attempt"] += 1
            return
        for share in attempt.shares:
            if isinstance(share, WriteShare) and share.address.tp_rank == message.tp_rank and share.agent == agent:
                if share.is_quiet:
                    self.dropped["after the end"] += 1
                else:
                    share.take(message)
                return
        self.dropped["not a contributor"] += 1

    def is_waiting_for(self, agent: str) -> bool:
        """Whether an agent may have something of ours under way."""
        shares = (share for attempt in self._attempts.values() for share in attempt.shares)
        return any(share.agent == agent and not share.is_quiet for share in shares)

    def may_be_written_by(self, agent: str) -> bool:
        """Whether an agent was told of blocks, and has not said that it has stopped."""
        return self._writers.may_write(agent)

    def gone(self, agent: str) -> None:
        """Another engine answers where an agent's was. Its process may live on, but nobody can ask it any more."""
        for attempt in list(self._attempts.values()):
            for share in attempt.shares:
                if share.agent == agent and not share.is_quiet:
                    if isinstance(share, WriteShare):
                        share.is_abandoned = True
                    attempt.fail(HandOverFailed(Cause.LOST, f"rank {share.address.tp_rank} of prefill is gone"))
            self._writers.look_after(attempt)

    def unreachable(self, agent: str) -> None:
        """Nobody listens where an agent was. The clients of what waits for it hear of it; its blocks are held."""
        for attempt in list(self._attempts.values()):
            for share in attempt.shares:
                if share.agent == agent and not share.is_quiet:
                    words = f"nobody listens any more where rank {share.address.tp_rank} of prefill was"
                    attempt.fail(HandOverFailed(Cause.LOST, words))
                    self._writers.look_after(attempt)

    def turn(self) -> float | None:
        """What is due now; returns when to call again, in the clock's seconds, None if nothing will be."""
        now = self._clock.now_seconds()
        due_at = self._writers.turn()
        for number in self._asked_again.take_due(now):
            attempt = self._attempts.get(number)
            if attempt is not None:
                self._asked_again[number] = now + REPEAT_SECONDS
                self._unanswered.add(number)
                self._writers.look_after(attempt)
                for share in attempt.shares:
                    if not share.is_quiet:
                        share.stop()
                        # A READ from somebody who is not there ends when the connection does.
                        self._side.peers.probe(share.address)
        due = (self._asked_again.first_seconds, due_at)
        return min((one for one in due if one is not None), default=None)

    def _be_written(self, attempt: Attempt, share: ReadShare, is_read: bool) -> None:
        """Prefill writes what it stages, which cannot be read at any time; or says what it was that was read."""
        other = WriteShare(self._side, lambda: attempt, share.address, is_read=is_read)
        attempt.shares[attempt.shares.index(share)] = other
        self._writers.expect(other, attempt.number)
        other.begin()

    def _release(self, wanted: Wanted, others: tuple[int, ...]) -> None:
        """Ranks of prefill whose bytes another one has, too, are told that they need not wait."""
        if others:
            request_id = "" if wanted.manifest is None else wanted.manifest.request_id
            place = self._side.place
            message = Release(request_id, wanted.name, wanted.digest, place.tp_rank, place.tp_size)
            for address in peers_of(wanted.prefill, others):
                self._side.peers.send(address, encode(message))

    def _changed(self, attempt: Attempt) -> None:
        number = attempt.number
        if number not in self._attempts:
            return
        if attempt.failed is not None and number not in self._reported:
            self._reported.add(number)
            self._asked_again[number] = self._clock.now_seconds() + REPEAT_SECONDS
            self._writers.failed(number)
            self._failed(attempt.wanted, attempt.failed)
        if attempt.is_over:
            del self._attempts[number]
            self._reported.discard(number)
            self._asked_again.pop(number, None)
            self._unanswered.discard(number)
            self._writers.over(attempt)
            self._over(attempt.wanted)
