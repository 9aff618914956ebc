# SPDX-License-Identifier: Apache-2.0
"""Decode's side of one part of an attempt that prefill WRITEs. Owned by the transfer thread.

* Whether the peer may still write, and whether the blocks are wanted (`Stage`).
* A rank numbers its WRITEs from 0, and the last one says that it is the last. Notifications may overtake each other, so
  a WRITE counts only when all before it have arrived (`ArrivedWrites`).
* Where KV is staged, prefill's ranks write into slots of a slab, range by range (`transfer.staging.StagingWindow`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from kvcached_nixl.transport.agent import TransportError
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.manifest import Manifest
from kvcached_nixl.wire.messages import (
    KernelBlockRange,
    Peer,
    Registration,
    StagingGrant,
    StagingRequest,
    Stopped,
    Withdrawal,
    Written,
    encode,
)
from kvcached_nixl.wire.timeline import State
from kvcached_nixl.worker.decode.attempt import Attempt, Part
from kvcached_nixl.worker.decode.fencing import GateUse, WriteGates
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.peers import contained
from kvcached_nixl.worker.transfer.staging import Held, StagingWindow
from kvcached_nixl.worker.transfer.topology import ConnectedPeer


class Stage(enum.Enum):
    """What a `write_part.WritePart` waits for; `NEXT` alone changes it. Blocks are free in ENDED only, when nothing is
    copied out of the slab any more."""

    CONNECTING = enum.auto()
    """The peer was told of no block."""
    WRITING = enum.auto()
    """The peer was told of the blocks and may write them."""
    WITHDRAWN = enum.auto()
    """The peer may still write blocks that nobody wants, and was asked to stop."""
    COMPARING = enum.auto()
    """Everything is written; this rank reads the blocks to compare checksums."""
    COMPARING_IN_VAIN = enum.auto()
    """As before, but nobody wants the blocks any more."""
    ENDED = enum.auto()


class Event(enum.Enum):
    TOLD = enum.auto()
    UNWANTED = enum.auto()
    STOPPED = enum.auto()
    """The peer can no longer write: every WRITE has arrived, it says so, it is dead, or it is fenced."""
    IS_COMPARED = enum.auto()
    """Begins, when everything is written."""
    COMPARED = enum.auto()


NEXT: Mapping[tuple[Stage, Event], Stage] = MappingProxyType(
    {
        (Stage.CONNECTING, Event.TOLD): Stage.WRITING,
        (Stage.CONNECTING, Event.UNWANTED): Stage.ENDED,
        (Stage.WRITING, Event.UNWANTED): Stage.WITHDRAWN,
        (Stage.WRITING, Event.IS_COMPARED): Stage.COMPARING,
        (Stage.WRITING, Event.STOPPED): Stage.ENDED,
        (Stage.WITHDRAWN, Event.STOPPED): Stage.ENDED,
        # The peer has stopped already, and its word does not end what this rank reads.
        (Stage.COMPARING, Event.UNWANTED): Stage.COMPARING_IN_VAIN,
        (Stage.COMPARING, Event.COMPARED): Stage.ENDED,
        (Stage.COMPARING_IN_VAIN, Event.COMPARED): Stage.ENDED,
    }
)
"""Stage and event -> the next stage. An event that is not here changes nothing."""


class ArrivedWrites:
    """WRITEs of one rank, by their numbers. ``ranges``: the last WRITE of each range, in order, of those before which
    every WRITE has arrived."""

    def __init__(self) -> None:
        self.ranges: list[Written] = []
        # Before ``_following`` every WRITE has arrived; what has overtaken it waits.
        self._following = 0
        self._waiting: dict[int, Written] = {}
        self._highest = 0
        self._last: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the last WRITE and every one before it has arrived."""
        return self._last is not None and self._following > self._last

    def take(self, message: Written) -> list[Written]:
        """Note a WRITE. Returns the ranges that have become complete with it. Raises `ValueError`: the numbers
        contradict each other, so the bytes cannot be trusted. The rank may still write."""
        last = message.index if message.is_last else self._last
        self._highest = max(self._highest, message.index)
        if last is not None and (self._highest > last or self._last not in (None, last)):
            raise ValueError(f"numbers WRITEs wrongly: {last} is the last one, and {self._highest} was sent")
        self._last = last
        if message.index >= self._following:
            self._waiting[message.index] = message
        complete = []
        while (written := self._waiting.pop(self._following, None)) is not None:
            self._following += 1
            if written.end_token:
                complete.append(written)
        self.ranges += complete
        return complete


class WritePart(Part):
    """One rank of prefill writes into blocks that this rank has registered. The manifest with its last WRITE says what
    it has written. ``is_read``: this rank has READ the KV already, and prefill only sends the checksums.
    """

    def __init__(
        self,
        context: WorkerContext,
        gates: WriteGates,
        attempt: Attempt,
        address: Peer,
        *,
        is_read: bool = False,
    ) -> None:
        super().__init__(context, attempt, address)
        self._gates = gates
        self.stage = Stage.CONNECTING
        self._is_begun_again = False
        self._is_read = is_read
        self._has_failed = False
        self._arrived = ArrivedWrites()
        self._staging_window: StagingWindow | None = None
        self._gate_use: GateUse | None = None

    @property
    def is_idle(self) -> bool:
        return self.stage is Stage.ENDED and (self._staging_window is None or not self._staging_window.is_copying)

    @property
    def _is_wanted(self) -> bool:
        return self.stage in (Stage.CONNECTING, Stage.WRITING, Stage.COMPARING)

    @property
    def may_write(self) -> bool:
        return self.stage in (Stage.WRITING, Stage.WITHDRAWN) and not self._is_read

    def stop(self) -> None:
        self._move(Event.UNWANTED)
        if self._is_read:
            # The peer was told of no block, so there is no end to wait for.
            self._move(Event.STOPPED)
        if self._staging_window is not None:
            self._staging_window.stop()
        if self.agent is not None and self._context.own is not None:
            withdrawal = Withdrawal(self._attempt.number, self._context.own)
            self._context.peers.send(self.address, encode(withdrawal))

    @property
    def is_dead(self) -> bool:
        process = None if self.known is None else self.known.process
        return self._has_failed or (process is not None and self._context.host.is_dead(process))

    def fence(self) -> bool:
        use, known = self._gate_use, self.known
        if use is None or known is None or not self._context.host.is_behind_network(known.rank.process):
            return False
        use.fence(self)
        return True

    def cut_off(self) -> None:
        reason = f"rank {self.address.rank} of prefill has taken too long: the gate that it writes through is closed"
        self._attempt.fail(HandOverFailed(FailureCause.LOST, reason))

    def finish(self) -> None:
        if self._gate_use is not None:
            self._gate_use.leave(self)

    def end_without(self, what: str) -> None:
        if not self.is_idle:
            self._end(Event.STOPPED)
            self._attempt.fail(HandOverFailed(FailureCause.LOST, f"rank {self.address.rank} of prefill {what}"))

    def take(self, message: StagingRequest | Written | Stopped) -> None:
        if isinstance(message, StagingRequest):
            if self._staging_window is not None and self._is_wanted:
                end_token = min(message.end_token, self._attempt.spec.end_token)
                self._staging_window.ready(self.address.rank, message.first_token, end_token)
            return
        if isinstance(message, Stopped):
            self._has_failed |= message.has_failed
            if not self._has_failed:
                self._end(Event.STOPPED)
            cause = FailureCause(message.cause) if message.cause in set(FailureCause) else FailureCause.STOPPED
            if cause is FailureCause.RESTARTED:
                # The engine at this address has another incarnation than this rank knows.
                self._context.peers.probe(self.address)
            reason = f"rank {self.address.rank} of prefill stopped: {message.reason:.500}"
            self._attempt.fail(HandOverFailed(cause, reason))
            return
        self._take_written(message)

    def _take_written(self, message: Written) -> None:
        try:
            complete = self._arrived.take(message)
        except ValueError as error:
            self._attempt.fail(HandOverFailed(FailureCause.PROTOCOL, f"rank {self.address.rank} of prefill {error}"))
            return
        self._reached(State.DECODE_MOVING)
        if message.manifest is not None:
            misfit = self._misfit(message.manifest)
            if misfit is not None:
                self._attempt.fail(misfit)
        for written in complete:
            if self._staging_window is not None and self._is_wanted:
                self._staging_window.written(self.address.rank, written.end_token)
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        """Ends the part, or begins to compare, if everything has been written and copied out of the slab."""
        if self.stage not in (Stage.WRITING, Stage.WITHDRAWN) or not self._arrived.is_complete:
            return
        window = self._staging_window
        if self._is_wanted and window is not None and not window.is_filled:
            self._reached(State.DECODE_COPYING)
            return
        self._reached(State.DECODE_VERIFYING)
        attempt, checksums, known = self._attempt, self._context.checksums, self.known
        if not self._is_wanted or not checksums.are_compared(attempt.number):
            self._conclude(Event.STOPPED, None)
            return
        assert known is not None
        self._move(Event.IS_COMPARED)
        checksums.compare(
            known.agent,
            attempt.blocks,
            attempt.spec.end_token,
            known.rank.groups,
            self._arrived.ranges,
            lambda: self._is_wanted,
            contained(attempt.fail)(partial(self._conclude, Event.COMPARED)),
        )

    def _conclude(self, event: Event, wrong: HandOverFailed | None) -> None:
        """Everything has been written, and the blocks are no longer read. ``wrong``: they are not as they were sent."""
        known, was_wanted = self.known, self._is_wanted
        assert known is not None
        if wrong is not None and wrong.cause is FailureCause.CHECKSUM:
            self._context.distrust(self.address, known.incarnation)
        self._end(event)
        if wrong is None and was_wanted:
            wrong = self._context.distrust_of(self.address, known.incarnation)
        if wrong is None:
            self._attempt.settle()
        else:
            self._attempt.fail(wrong)

    def _move(self, event: Event) -> None:
        self.stage = NEXT.get((self.stage, event), self.stage)

    def _end(self, event: Event) -> None:
        """The peer no longer writes."""
        self._move(event)
        if self._staging_window is not None:
            self._staging_window.close(self.address.rank)

    def _copied(self, failed: str) -> None:
        """A range was copied from the slab into its blocks, or ``failed`` says why not."""
        if self.stage is Stage.ENDED:
            self._attempt.settle()
        elif failed:
            self._attempt.fail(HandOverFailed(FailureCause.DEFECT, failed))
        else:
            self._end_if_complete()

    def _send_grant(self, held: Held) -> None:
        own = self._context.own
        if own is not None:
            room = StagingGrant(self._attempt.number, own, held.first_token, held.end_token, held.groups)
            self._context.peers.send(self.address, encode(room), only=self.agent)

    def _misfit(self, made: Manifest) -> HandOverFailed | None:
        """Why the KV that prefill wrote is not what decode asked for; None if it is."""
        spec = self._attempt.spec
        if made.digest != spec.digest or made.num_tokens != spec.num_tokens:
            return HandOverFailed(FailureCause.DIGEST, f"prefill wrote {made.num_tokens} tokens of another prompt")
        if self.known is not None and made.incarnation != self.known.incarnation:
            self._context.peers.probe(self.address)
            return HandOverFailed(FailureCause.RESTARTED, "prefill was restarted, or its weights were changed")
        if spec.manifest is not None and made.request_id != spec.manifest.request_id:
            return HandOverFailed(FailureCause.PROTOCOL, "prefill wrote another request than the parameters name")
        return None

    def _connected(self, known: ConnectedPeer) -> None:
        context, attempt, spec = self._context, self._attempt, self._attempt.spec
        if context.own is None or self.stage is not Stage.CONNECTING:
            return
        self.known = known
        if context.staging is not None:
            if attempt.staging_window is None:
                step = context.local.step_tokens([group.kernel_block_size for group in known.rank.groups])
                window = attempt.blocks, spec.end_token, step, len(attempt.parts), self.address.engine
                attempt.staging_window = StagingWindow(context.staging, *window)
            self._staging_window = attempt.staging_window
            self._staging_window.join(self.address.rank, self._send_grant, contained(attempt.fail)(self._copied))
        try:
            if not self._is_read:
                self._gate_use = self._gates.join(self)
        except TransportError as error:
            attempt.fail(HandOverFailed(FailureCause.LOST, f"no gate to write through could be opened: {error}"))
            return
        try:
            context.transport.send(known.agent, encode(self._registration(known, context.own)))
        except TransportError as error:
            # The peer was not told of the blocks, so it will not write.
            self.finish()
            context.peers.lost(known.agent)
            if self._is_begun_again:
                reason = f"rank {self.address.rank} of prefill was not reached: {error}"
                attempt.fail(HandOverFailed(FailureCause.LOST, reason))
            else:
                # The peer may have been restarted since the handshake.
                self._is_begun_again = True
                self.begin()
            return
        self.agent = known.agent
        self._move(Event.TOLD)
        self._reached(State.DECODE_WAITING)

    def _registration(self, known: ConnectedPeer, own: Peer) -> Registration:
        context, spec, blocks = self._context, self._attempt.spec, self._attempt.blocks
        if context.staging is not None or self._is_read:
            # Slots are granted range by range; of what was read already, only checksums are asked for.
            blocks = tuple(KernelBlockRange(one.first_token, ()) for one in blocks)
        return Registration(
            attempt=spec.attempt,
            decode=own,
            incarnation=known.incarnation,
            name=spec.name,
            request_id="" if spec.manifest is None else spec.manifest.request_id,
            digest=spec.digest,
            num_tokens=spec.num_tokens,
            first_token=spec.first_token,
            end_token=spec.end_token,
            block_sizes=context.local.kernel_block_sizes,
            groups=blocks,
            is_staged=context.staging is not None,
            is_verified=context.checksums.are_compared(spec.attempt),
            is_read=self._is_read,
            gate=b"" if self._gate_use is None else self._gate_use.metadata,
        )

    def _reached(self, state: State) -> None:
        # What was read already is only compared.
        self._attempt.reached(self, State.DECODE_VERIFYING if self._is_read else state)
