# SPDX-License-Identifier: Apache-2.0
"""Decode: how far an attempt is that prefill WRITEs. Owned by the transfer thread.

* Whether the peer may still write, and whether the blocks are wanted (`Stage`, one per part).
* A rank numbers its WRITEs from 0, and the last one says that it is the last. Notifications may overtake each other, so
  a WRITE counts only when all before it have arrived (`ArrivedWrites`, one per part).
* Where KV is staged, prefill's ranks write into slots of a slab, range by range, and these are then copied into blocks
  (`StagingWindow`, one per attempt). Each rank says which tokens are ready. Slots are taken only for tokens that are
  ready on all of them, so no slot waits for tokens that are not computed yet. They are copied when all ranks have
  written them, because one block may have heads of several ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from kvcached_nixl.wire.causes import HandOverFailed
from kvcached_nixl.wire.messages import KernelBlockRange, Written
from kvcached_nixl.worker.transfer.peers import contained
from kvcached_nixl.worker.transfer.slab import Use
from kvcached_nixl.worker.transfer.staging import Held, Staging

__all__ = ["NEXT", "ArrivedWrites", "Event", "Stage", "StagingWindow"]


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
    """WRITEs of one rank, by their numbers.

    Attributes:
        ranges: the last WRITE of each range, in order, of those before which every WRITE has arrived.
    """

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
        """Note a WRITE. Returns the ranges that have become complete with it.

        Raises:
            ValueError: the numbers contradict each other, so the bytes cannot be trusted. The rank may still write.
        """
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


@dataclass(eq=False)
class _Writer:
    """A rank of prefill that was told of the attempt.

    Attributes:
        give: sends it the slots of a range.
        changed: called when a range was copied, with "", or could not be, with the reason.
        ready_token: tokens before this one are ready on the rank.
        written_token: tokens before this one have been written by the rank.
    """

    give: Callable[[Held], None]
    changed: Callable[[str], None]
    ready_token: int
    written_token: int
    may_write: bool = True


class StagingWindow:
    """The slots that an attempt's KV arrives in.

    Args:
        blocks: per KV-cache group, the kernel blocks to fill.
        end_token: one past the last token that is wanted.
        step: ranges end at multiples of this many tokens (`LocalRank.step_tokens`).
        num_writers: ranks of prefill that have some of the bytes.
        engine_id: of these ranks' engine.
    """

    def __init__(
        self,
        staging: Staging,
        blocks: Sequence[KernelBlockRange],
        end_token: int,
        step: int,
        num_writers: int,
        engine_id: str,
    ) -> None:
        self._staging = staging
        self._blocks = blocks
        self._end_token = end_token
        self._step = step
        self._num_writers = num_writers
        self._engine_id = engine_id
        self._writers: dict[int, _Writer] = {}
        self._given: list[Held] = []
        self._first_token = self._given_token = min(group.first_token for group in blocks)
        self._is_closed = False

    @property
    def is_copying(self) -> bool:
        return any(held.copies for held in self._given)

    @property
    def is_filled(self) -> bool:
        """Whether all wanted tokens have been copied into their blocks."""
        return not self._given and self._given_token >= self._end_token

    def join(self, rank: int, give: Callable[[Held], None], changed: Callable[[str], None]) -> None:
        """Add a rank of prefill that is told of the attempt."""
        self._writers[rank] = _Writer(give, changed, self._first_token, self._first_token)

    def ready(self, rank: int, first_token: int, end_token: int) -> None:
        """These tokens are ready on a rank. Ignored if repeated, or if they do not begin where the last grant ended."""
        writer = self._writers[rank]
        if not self._is_closed and first_token == self._given_token and end_token > writer.ready_token:
            writer.ready_token = end_token
            self._give()

    def written(self, rank: int, end_token: int) -> None:
        """All tokens before ``end_token`` have arrived from a rank. Copies the ranges that all ranks have written."""
        self._writers[rank].written_token = end_token
        arrived = min(writer.written_token for writer in self._writers.values())
        for held in self._given:
            if held.end_token <= arrived and held.staged_token < held.end_token and not self._is_closed:
                held.staged_token = held.end_token
                self._staging.scatter(held, self._blocks, partial(self._copied, held))

    def stop(self) -> None:
        """Grant no more slots, and do not copy what still arrives."""
        self._is_closed = True
        for held in self._given:
            self._staging.mark_stuck(held)
        self._staging.forget(Use.RECEIVING, self, self._engine_id)

    def close(self, rank: int) -> None:
        """A rank does not write any more, and no more tokens are wanted. Frees the slots after the last rank's call."""
        self.stop()
        self._writers[rank].may_write = False
        self._let_go()

    def _give(self) -> bool:
        """Grant the next range that is ready on all ranks, if there are slots. Returns False if it waits for slots."""
        ready = min(writer.ready_token for writer in self._writers.values())
        if self._is_closed or len(self._writers) < self._num_writers or self._given_token >= ready:
            return True
        firsts = [group.first_token for group in self._blocks]
        held = self._staging.take(Use.RECEIVING, firsts, self._given_token, ready, self._step, owner=self._engine_id)
        if held is None:
            self._staging.wait(Use.RECEIVING, self, self._give_late, self._engine_id)
            return False
        self._given.append(held)
        self._given_token = held.end_token
        for writer in self._writers.values():
            # Reset: each rank asks again for the tokens that follow this range.
            writer.ready_token = held.end_token
            writer.give(held)
        return True

    def _give_late(self) -> bool:
        def failed(failure: HandOverFailed) -> None:
            for writer in list(self._writers.values()):
                writer.changed(f"no slots were granted: {failure}")

        with contained(failed):
            return self._give()
        return True

    def _copied(self, held: Held, failed: str) -> None:
        self._given.remove(held)
        self._staging.give_back(held)
        self._let_go()
        for writer in list(self._writers.values()):
            writer.changed(failed)

    def _let_go(self) -> None:
        if self._is_closed and not any(writer.may_write for writer in self._writers.values()):
            for held in [one for one in self._given if not one.copies]:
                self._given.remove(held)
                self._staging.give_back(held)
