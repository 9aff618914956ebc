# SPDX-License-Identifier: Apache-2.0
"""Decode's half of a hand-over: what its requests wait for, and their ends. Once per worker, on the transfer thread.

A turn costs what is due in it, not what waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kvcached_nixl.clock import Clock
from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.settings import TransferMode
from kvcached_nixl.transport.base import Gate
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.messages import Release, StagingRequest, Stopped, Written, encode
from kvcached_nixl.wire.step import FetchSpec, UnneededOffer
from kvcached_nixl.worker.decode.active_writers import ActiveWriters
from kvcached_nixl.worker.decode.attempt import Attempt
from kvcached_nixl.worker.decode.read_part import ReadPart
from kvcached_nixl.worker.decode.write_gates import WriteGates
from kvcached_nixl.worker.decode.write_part import WritePart
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.topology import contributors, kernel_blocks_of, peers_of

__all__ = ["Receiver"]

REPEAT_SECONDS = 5.0
"""Between two askings of who may still write whether it has stopped."""


class Receiver:
    """See the module.

    Args:
        gates: to this rank's memory; without any, what it is written through is its own agent, which cannot be closed.
        failed: called once per attempt that brings no KV.
        finished: called once per attempt, when nothing of it is in flight any more.
    """

    def __init__(
        self,
        context: WorkerContext,
        clock: Clock,
        mode: TransferMode,
        gates: WriteGates | None,
        failed: Callable[[FetchSpec, HandOverFailed], None],
        finished: Callable[[FetchSpec], None],
    ) -> None:
        self._context = context
        self._clock = clock
        self._mode = mode
        self._gates = gates
        self._failed = failed
        self._finished = finished
        self._attempts: dict[int, Attempt] = {}
        self._reported: set[int] = set()
        self._asked_again = Deadlines[int]()
        self._unanswered: set[int] = set()
        self._writers = ActiveWriters(context, clock, self._attempts)
        self.dropped: Counter[str] = Counter()

    @property
    def gates(self) -> Iterable[Gate]:
        """Agents beside this rank's own, to which something may be said."""
        return self._gates or ()

    def __len__(self) -> int:
        """Attempts that are not over."""
        return len(self._attempts)

    @property
    def is_awaiting(self) -> bool:
        """Whether something may come at any moment that somebody waits for."""
        return len(self._attempts) > len(self._unanswered)

    def fetch(self, spec: FetchSpec) -> None:
        """A request was given blocks. Nothing is moved before `begin`."""
        local = self._context.local
        ratio = local.kernel_blocks_per_block
        attempt = Attempt(spec, tuple(kernel_blocks_of(group, ratio) for group in spec.groups), self._changed)
        self._attempts[spec.attempt] = attempt
        try:
            ranks, others = contributors(
                spec.prefill, tp_rank=local.tp_rank, tp_size=local.tp_size, is_latent=local.is_latent
            )
        except ValueError as error:
            attempt.fail(HandOverFailed(FailureCause.REFUSED, str(error)))
            return
        for address in peers_of(spec.prefill, ranks):
            if self._mode is TransferMode.PUSH or (spec.manifest is not None and self._context.staging is not None):
                attempt.parts.append(WritePart(self._context, self._gates, attempt, address))
            elif spec.manifest is not None:
                attempt.parts.append(ReadPart(self._context, attempt, address, spec.manifest, self._be_written))
        if not attempt.parts:
            attempt.fail(HandOverFailed(FailureCause.NO_MANIFEST, "there is no manifest to read by"))
            return
        self._release(spec, others)

    def begin(self, number: int) -> None:
        """The device has ended every step that could still write its blocks."""
        attempt = self._attempts.get(number)
        if attempt is None or attempt.failed is not None:
            return
        for part in attempt.parts:
            if isinstance(part, WritePart):
                self._writers.expect(part, number)
        for part in list(attempt.parts):
            # One that cannot be told ends the attempt at once.
            if attempt.failed is None:
                part.begin()

    def release(self, released: UnneededOffer) -> None:
        """Tell all ranks of prefill that this rank of decode needs nothing. If they do not hear it, the lease ends."""
        local = self._context.local
        try:
            ranks = contributors(
                released.prefill, tp_rank=local.tp_rank, tp_size=local.tp_size, is_latent=local.is_latent
            )
        except ValueError:
            return
        message = Release(released.request_id, released.name, released.digest, local.tp_rank, local.tp_size)
        for address in peers_of(released.prefill, (*ranks[0], *ranks[1])):
            self._context.peers.send(address, encode(message))

    def fail(self, number: int, cause: HandOverFailed) -> None:
        """The request is gone, its time is over, or a defect was met. Again is harmless."""
        attempt = self._attempts.get(number)
        if attempt is not None:
            attempt.fail(cause)

    def handle(self, agent: str, message: StagingRequest | Written | Stopped) -> None:
        """Take in what a contributor says. What fits no attempt, or comes from somebody else, is dropped."""
        attempt = self._attempts.get(message.attempt)
        if attempt is None:
            self.dropped["unknown attempt"] += 1
            return
        for part in attempt.parts:
            if isinstance(part, WritePart) and part.address.tp_rank == message.tp_rank and part.agent == agent:
                if part.is_idle:
                    self.dropped["after the end"] += 1
                else:
                    part.take(message)
                return
        self.dropped["not a contributor"] += 1

    def is_waiting_for(self, agent: str) -> bool:
        """Whether an agent may have something of ours under way."""
        parts = (part for attempt in self._attempts.values() for part in attempt.parts)
        return any(part.agent == agent and not part.is_idle for part in parts)

    def may_be_written_by(self, agent: str) -> bool:
        """Whether an agent was told of blocks, and has not said that it has stopped."""
        return self._writers.may_write(agent)

    def dead(self, agent: str) -> None:
        """Another engine answers where an agent's was. Its process may live on, but nobody can ask it any more."""
        for attempt in list(self._attempts.values()):
            for part in attempt.parts:
                if part.agent == agent and not part.is_idle:
                    if isinstance(part, WritePart):
                        part.is_abandoned = True
                    attempt.fail(HandOverFailed(FailureCause.LOST, f"rank {part.address.tp_rank} of prefill is gone"))
            self._writers.look_after(attempt)

    def unreachable(self, agent: str) -> None:
        """Nobody listens where an agent was. The clients of what waits for it hear of it; its blocks are held."""
        for attempt in list(self._attempts.values()):
            for part in attempt.parts:
                if part.agent == agent and not part.is_idle:
                    reason = f"nobody listens any more where rank {part.address.tp_rank} of prefill was"
                    attempt.fail(HandOverFailed(FailureCause.LOST, reason))
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
                for part in attempt.parts:
                    if not part.is_idle:
                        part.stop()
                        # A READ from somebody who is not there ends when the connection does.
                        self._context.peers.probe(part.address)
        gates_due_at = None if self._gates is None else self._gates.turn()
        due = (self._asked_again.first_seconds, due_at, gates_due_at)
        return min((one for one in due if one is not None), default=None)

    def _be_written(self, attempt: Attempt, part: ReadPart, is_read: bool) -> None:
        """Prefill writes what it stages, which cannot be read at any time; or says what it was that was read."""
        other = WritePart(self._context, self._gates, attempt, part.address, is_read=is_read)
        attempt.parts[attempt.parts.index(part)] = other
        self._writers.expect(other, attempt.number)
        other.begin()

    def _release(self, spec: FetchSpec, others: tuple[int, ...]) -> None:
        """Ranks of prefill whose bytes another one has, too, are told that they need not wait."""
        if others:
            request_id = "" if spec.manifest is None else spec.manifest.request_id
            local = self._context.local
            message = Release(request_id, spec.name, spec.digest, local.tp_rank, local.tp_size)
            for address in peers_of(spec.prefill, others):
                self._context.peers.send(address, encode(message))

    def _changed(self, attempt: Attempt) -> None:
        number = attempt.number
        if number not in self._attempts:
            return
        if attempt.failed is not None and number not in self._reported:
            self._reported.add(number)
            self._asked_again[number] = self._clock.now_seconds() + REPEAT_SECONDS
            self._writers.failed(number)
            self._failed(attempt.spec, attempt.failed)
        if attempt.is_finished:
            del self._attempts[number]
            self._reported.discard(number)
            self._asked_again.pop(number, None)
            self._unanswered.discard(number)
            self._writers.finished(attempt)
            self._finished(attempt.spec)
