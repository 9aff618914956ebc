# SPDX-License-Identifier: Apache-2.0
"""Decode: one request's attempt to get its KV, with a part for each rank of prefill that has some of its bytes.

    part     connecting ─► moving ─► verifying ─► done
                 │            │          │
                 └────────────┴──────────┴──► stopping ─► idle         (done is idle, too)

    attempt  waiting ─► received     every part is done
             waiting ─► failed       a part has failed, or the attempt was withdrawn; reported at once
                        ─► finished  no part has anything in flight: only now are the blocks free (rules R2, R9)

The two kinds of parts differ in who moves the bytes and in what is verified. `read_part.ReadPart` reads the bytes, then
the ownership token. `write_part.WritePart` registers blocks, and counts the WRITEs that arrive. Owned by the transfer
thread.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.wire.causes import HandOverFailed
from kvcached_nixl.wire.messages import Peer, StagingRequest, Stopped, Written
from kvcached_nixl.wire.step import FetchSpec
from kvcached_nixl.wire.timeline import State, Timeline
from kvcached_nixl.worker.decode.arrived import StagingWindow
from kvcached_nixl.worker.geometry.descriptors import KernelBlocks
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.transfer_queue import TransferTally

__all__ = ["NEXT", "Attempt", "Event", "Part", "Stage"]


class Part:
    """What one rank of prefill contributes to an attempt.

    Attributes:
        is_written: the rank WRITEs, and is asked to stop; else this rank READs.
        agent: the agent that was told of the blocks; None before that, and for a READ.
        is_abandoned: another engine answers at the rank's address, so the agent can no longer be asked to stop.
    """

    is_written = False

    def __init__(self, context: WorkerContext, attempt: Attempt, address: Peer) -> None:
        self._context = context
        self._attempt = attempt
        self.address = address
        self.agent: str | None = None
        self.is_abandoned = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is in flight, and nothing will be."""
        raise NotImplementedError

    def begin(self) -> None:
        """Start moving bytes: the device has finished every step that could still write the blocks (rule R8)."""
        raise NotImplementedError

    def stop(self) -> None:
        """Move nothing more; ``is_idle`` becomes true when nothing is in flight. A repeated call repeats the request to
        the peer."""
        raise NotImplementedError

    def finish(self) -> None:
        """The attempt is finished."""

    # ------------------------------------------------------------------------------------ only where the rank WRITEs

    @property
    def may_write(self) -> bool:
        """Whether the agent was told of blocks and may still write them."""
        return False

    @property
    def is_dead(self) -> bool:
        """Whether the agent is a process on this host that has ended."""
        return False

    def fence(self) -> bool:
        """The agent does not answer; `fenced` is called once it can no longer write. Returns whether it can be fenced:
        it writes through a gate, and only over a network."""
        return False

    def take(self, message: StagingRequest | Written | Stopped) -> None:
        """Takes a message of the agent about this attempt."""

    def dead(self) -> None:
        """The agent has ended."""

    def fenced(self) -> None:
        """The gate that the agent writes through is closed: nothing can be written any more."""

    def cut_off(self) -> None:
        """The part has taken too long: its gate is about to be closed."""


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
    """What moves a part on."""

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


class Attempt:
    """See the module.

    Args:
        blocks: per KV-cache group, the kernel blocks to fill.
        changed: called whenever the attempt may have failed or finished.

    Attributes:
        parts: one for each rank of prefill that has some of the bytes.
        failed: why it failed; None as long as it has not.
        staging_window: the slots its KV arrives in; None until a rank of prefill is to be told of them.
        tally: of its READs.
        timeline: its state is that of the part that is furthest behind.
    """

    def __init__(
        self, spec: FetchSpec, blocks: tuple[KernelBlocks, ...], clock: Clock, changed: Callable[[Attempt], None]
    ) -> None:
        self.spec = spec
        self.blocks = blocks
        self.parts: list[Part] = []
        self.failed: HandOverFailed | None = None
        self.staging_window: StagingWindow | None = None
        self.timeline = Timeline()
        self.timeline.enter(State.DECODE_ALLOCATED, clock.now_seconds())
        self.tally = TransferTally(timeline=self.timeline if spec.is_traced else None)
        self._clock = clock
        self._states: dict[Peer, State] = {}
        self._changed = changed

    @property
    def number(self) -> int:
        return self.spec.attempt

    @property
    def is_finished(self) -> bool:
        """Whether nothing of the attempt is in flight any more, and nothing will be."""
        return all(part.is_idle for part in self.parts)

    def reached(self, part: Part, state: State) -> None:
        """A part is in this state from now on."""
        self._states[part.address] = state
        behind = min(self._states.get(one.address, State.DECODE_ALLOCATED) for one in self.parts)
        self.timeline.enter(behind, self._clock.now_seconds())

    def fail(self, cause: HandOverFailed) -> None:
        """Fail the attempt and stop its parts. Only the first failure is kept."""
        if self.failed is None:
            self.failed = cause
            for part in self.parts:
                if not part.is_idle:
                    part.stop()
        self.settle()

    def settle(self) -> None:
        """Called when something of the attempt has ended."""
        self._changed(self)
