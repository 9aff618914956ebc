# SPDX-License-Identifier: Apache-2.0
"""Prefill WRITEs: one share of an attempt, on decode's side. Owned by the transfer thread."""

from __future__ import annotations

from collections.abc import Callable

from kvcached_nixl.transport.base import TransportError
from kvcached_nixl.wire.causes import Cause, HandOverFailed
from kvcached_nixl.wire.handshake import Process
from kvcached_nixl.wire.manifest import BlockRange, Manifest
from kvcached_nixl.wire.messages import Peer, Ready, Registration, Room, Stopped, Withdrawal, Written, encode
from kvcached_nixl.worker.handover.attempt import Attempt, Side
from kvcached_nixl.worker.handover.comparing import compare
from kvcached_nixl.worker.handover.digests import Asked
from kvcached_nixl.worker.handover.gates import Gates, Passage
from kvcached_nixl.worker.handover.local import kernel_blocks
from kvcached_nixl.worker.handover.meeting import Known
from kvcached_nixl.worker.handover.rooms import Rooms
from kvcached_nixl.worker.staging.staging import Held

__all__ = ["WriteShare"]


class WriteShare:
    """One rank of prefill writes into blocks that this rank has registered, and says with the last WRITE what it wrote.

    Args:
        is_read: it has been read already, and prefill says what it was.

    Attributes:
        agent: who was told of the blocks, and may write until it has stopped, is gone or is fenced.
        is_abandoned: its engine is not at its address any more, so nobody can ask it.
    """

    def __init__(self, side: Side, attempt: Callable[[], Attempt], address: Peer, *, is_read: bool = False) -> None:
        self._side = side
        self._attempt = attempt
        self.address = address
        self.agent: str | None = None
        self.is_quiet = False
        self._known: Known | None = None
        self._arrived: set[int] = set()
        self._highest = 0
        self._last: int | None = None
        self._is_stopping = False
        self._is_begun_again = False
        self._rooms: Rooms | None = None
        self._is_read = is_read
        self._ends: dict[int, Written] = {}
        self._ranges: list[Written] = []
        self._is_comparing = self._is_compared = False
        self._following = 0
        self._has_stopped = False
        self.is_abandoned = False
        self._passage: Passage | None = None
        self._process: Process | None = None
        self._is_behind_network = False

    def begin(self) -> None:
        manifest = self._attempt().wanted.manifest
        start = "" if manifest is None else manifest.start
        self._side.meet(self.address, start, self._connected, self._fail)

    def stop(self) -> None:
        self._is_stopping = True
        if self._rooms is not None:
            self._rooms.stop()
        if self.agent is None or self._is_read:
            # Nobody was told where to write.
            self.is_quiet = not self._is_comparing
        if self.agent is not None and self._side.own is not None:
            withdrawal = Withdrawal(self._attempt().number, self._side.own)
            self._side.peers.send(self.address, encode(withdrawal))

    @property
    def is_gone(self) -> bool:
        """Whether whoever was told of the blocks is a process of this host that has ended."""
        return self._process is not None and self._side.host.is_gone(self._process)

    @property
    def may_write(self) -> bool:
        """Whether somebody was told of blocks, and may write them still."""
        return self.agent is not None and not self._is_read and not self.is_quiet

    def fence(self) -> bool:
        """Whoever was told of the blocks is not heard of: `fenced` is called when it cannot write any more.

        Returns: whether it can be kept from it.
        """
        if self._passage is None or not self._is_behind_network:
            return False
        Gates.fence(self, self._passage)
        return True

    def fenced(self) -> None:
        self._be_over("is not heard of, and cannot write here any more")

    def gone(self) -> None:
        """Whoever was told of the blocks is gone for good."""
        self._be_over("is gone")

    def cut_off(self) -> None:
        words = f"rank {self.address.tp_rank} of prefill has taken too long, and what it writes through is closed"
        self._fail(HandOverFailed(Cause.LOST, words))

    def over(self) -> None:
        """Its attempt is."""
        if self._passage is not None:
            Gates.leave(self, self._passage)

    def _be_over(self, what: str) -> None:
        if not self.is_quiet:
            self._end()
            self._fail(HandOverFailed(Cause.LOST, f"rank {self.address.tp_rank} of prefill {what}"))

    def take(self, message: Ready | Written | Stopped) -> None:
        """What the rank says of this attempt."""
        if isinstance(message, Ready):
            if self._rooms is not None and not self._is_stopping:
                end_token = min(message.end_token, self._attempt().wanted.end_token)
                self._rooms.ready(self.address.tp_rank, message.first_token, end_token)
            return
        if isinstance(message, Stopped):
            self._end()
            cause = Cause(message.cause) if message.cause in set(Cause) else Cause.STOPPED
            if cause is Cause.START:
                # It answers, as somebody else than is known here.
                self._side.peers.probe(self.address)
            words = f"rank {self.address.tp_rank} of prefill stopped: {message.reason:.500}"
            self._fail(HandOverFailed(cause, words))
            return
        self._take_written(message)

    def _take_written(self, message: Written) -> None:
        last = message.index if message.is_last else self._last
        self._highest = max(self._highest, message.index)
        if last is not None and (self._highest > last or self._last not in (None, last)):
            # Somebody counts wrongly, so the bytes cannot be trusted; but it has not said that it stopped.
            self._fail(HandOverFailed(Cause.PROTOCOL, f"rank {self.address.tp_rank} of prefill numbers WRITEs wrongly"))
            return
        self._arrived.add(message.index)
        if message.end_token:
            self._ends[message.index] = message
        if message.manifest is not None:
            self._last = message.index
            misfit = self._misfit(message.manifest)
            if misfit is not None:
                self._fail(misfit)
        while self._following in self._arrived:
            written = self._ends.pop(self._following, None)
            self._following += 1
            if written is None:
                continue
            self._ranges.append(written)
            if self._rooms is not None and not self._is_stopping:
                self._rooms.written(self.address.tp_rank, written.end_token)
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        """Quiet: everything has been written, and nothing is copied any more."""
        if self.is_quiet or (
            self._rooms is not None and not self._has_stopped and not self._is_stopping and not self._rooms.is_filled
        ):
            return
        if self._last is None or len(self._arrived) <= self._last or self._is_comparing:
            return
        attempt, side, known = self._attempt(), self._side, self._known
        if not self._is_compared and not self._is_stopping and side.digests.are_compared(attempt.number):
            assert known is not None
            self._is_comparing = True
            asked = Asked(known.agent, known.rank.memory, lambda: not self._is_stopping)
            compare(side, attempt.wanted, asked, self._ranges, self._contained)
            return
        self._end()
        doubt = None if self._is_stopping or known is None else side.distrust_of(self.address, known.start)
        if doubt is not None:
            self._fail(doubt)
        attempt.settle()

    def _contained(self, wrong: HandOverFailed | None) -> None:
        self._side.contained(lambda _: self._compared(wrong), self._fail)("")

    def _compared(self, wrong: HandOverFailed | None) -> None:
        """The blocks are not read any more."""
        self._is_comparing, self._is_compared = False, True
        if wrong is None:
            if self._has_stopped:
                self._end()
                self._attempt().settle()
            else:
                self._end_if_complete()
            return
        if wrong.cause is Cause.BYTES and self._known is not None:
            self._side.distrust(self.address, self._known.start)
        # Everything has been written.
        self._end()
        self._fail(wrong)

    def _end(self) -> None:
        """Nobody writes any more."""
        self._has_stopped = True
        if self._rooms is not None:
            self._rooms.close(self.address.tp_rank)
        self.is_quiet = (self._rooms is None or not self._rooms.is_copying) and not self._is_comparing

    def _copied(self, failed: str) -> None:
        """A range is where it belongs, or could not be copied there."""
        if self._has_stopped:
            self._end()
            self._attempt().settle()
        elif failed:
            self._fail(HandOverFailed(Cause.DEFECT, failed))
        else:
            self._end_if_complete()

    def _give_room(self, held: Held) -> None:
        attempt, side = self._attempt(), self._side
        if side.own is not None:
            room = Room(attempt.number, side.own, held.first_token, held.end_token, held.groups)
            side.peers.send(self.address, encode(room), only=self.agent)

    def _misfit(self, made: Manifest) -> HandOverFailed | None:
        """Why what was written is not what was wanted."""
        wanted = self._attempt().wanted
        if made.digest != wanted.digest or made.num_tokens != wanted.num_tokens:
            return HandOverFailed(Cause.DIGEST, f"prefill wrote {made.num_tokens} tokens of another prompt")
        if self._known is not None and made.start != self._known.start:
            self._side.peers.probe(self.address)
            return HandOverFailed(Cause.START, "prefill has been started again, or its weights were changed")
        if wanted.manifest is not None and made.request_id != wanted.manifest.request_id:
            return HandOverFailed(Cause.PROTOCOL, "prefill wrote another request than the parameters name")
        return None

    def _connected(self, known: Known) -> None:
        attempt, side = self._attempt(), self._side
        if self._is_stopping or side.own is None:
            return
        self._known, wanted, ratio = known, attempt.wanted, side.place.kernel_blocks_per_block
        doubt = side.distrust_of(self.address, known.start)
        if doubt is not None:
            self._fail(doubt)
            return
        groups = tuple(
            BlockRange(group.first_token, tuple(kernel_blocks(group.block_ids, ratio))) for group in wanted.groups
        )
        staging = side.staging
        if staging is not None:
            step = max(side.place.kernel_block_size, known.rank.memory[0].block_size)
            if attempt.rooms is None:
                attempt.rooms = Rooms(
                    staging, groups, wanted.end_token, step, len(attempt.shares), wanted.prefill.engine_id
                )
            self._rooms = attempt.rooms
            self._rooms.join(self.address.tp_rank, self._give_room, self._copied)
        if staging is not None or self._is_read:
            groups = tuple(BlockRange(group.first_token, ()) for group in groups)
        try:
            gate = self._enter(known)
        except TransportError as cause:
            self._fail(HandOverFailed(Cause.LOST, f"this rank cannot be written: {cause}"))
            return
        registration = Registration(
            attempt=wanted.attempt,
            decode_request_id=wanted.request_id,
            decode=side.own,
            start=known.start,
            name=wanted.name,
            request_id="" if wanted.manifest is None else wanted.manifest.request_id,
            digest=wanted.digest,
            num_tokens=wanted.num_tokens,
            first_token=wanted.first_token,
            end_token=wanted.end_token,
            block_size=side.place.kernel_block_size,
            groups=groups,
            by_rooms=staging is not None,
            is_verified=side.digests.are_compared(wanted.attempt),
            is_read=self._is_read,
            gate=gate,
        )
        try:
            side.transport.send(known.agent, encode(registration))
        except TransportError as cause:
            # It was not told, so it will not write.
            self.over()
            side.peers.lost(known.agent)
            if self._is_begun_again:
                words = f"rank {self.address.tp_rank} of prefill was not reached: {cause}"
                self._fail(HandOverFailed(Cause.LOST, words))
            else:
                # It may have been started again since it was met.
                self._is_begun_again = True
                self.begin()
            return
        self.agent = known.agent

    def _enter(self, known: Known) -> bytes:
        """What it is to be written through."""
        side = self._side
        if self._is_read or side.gates is None:
            return b""
        process = known.rank.process
        self._process = process if side.host.sees(process) else None
        self._is_behind_network = side.host.is_behind_network(process)
        self._passage = side.gates.join(self)
        return self._passage.metadata

    def _fail(self, cause: HandOverFailed) -> None:
        if self.agent is None:
            self._is_stopping = self.is_quiet = True
        self._attempt().fail(cause)
