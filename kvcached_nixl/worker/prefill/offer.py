# SPDX-License-Identifier: Apache-2.0
"""Prefill: `Offer`, a request whose KV decode may have; `WriteTask`, a registration of decode that is written from it.

    WriteTask  waiting for its peer, its offer or for tokens -> writing -> everything posted -> finished
                  \\------- told to stop, or something failed: nothing more is posted -------> finished, answered

Owned by the transfer thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.manifest import Manifest
from kvcached_nixl.wire.messages import Registration, StagingGrant
from kvcached_nixl.wire.step import OfferUpdate
from kvcached_nixl.wire.timeline import State, Timeline
from kvcached_nixl.worker.geometry.descriptors import KernelBlocks
from kvcached_nixl.worker.outcome_queue import OutcomeQueue
from kvcached_nixl.worker.transfer.peer_link import ConnectedPeer
from kvcached_nixl.worker.transfer.transfer_queue import TransferJob, TransferTally

__all__ = ["Offer", "WriteTask", "WriteKey"]

WriteKey = tuple[str, int]
"""(agent that registered, its attempt)."""


@dataclass(eq=False)
class WriteTask:
    """A registration that is not finished.

    Attributes:
        known: the rank that registered, after the handshake.
        is_doubted: another agent was known at its address, so the handshake is repeated.
        offer: what is written; None until prefill has it.
        next_token: the first token that is in no WRITE yet.
        next_index: number of the next WRITE.
        grant: the slots that decode grants now, where decode stages.
        asked: the (first, end) tokens for which a grant was last asked.
        jobs: WRITEs not ended: being checksummed, queued or in flight; and whether each is the registration's last.
        awaiting_checksum: those of ``jobs`` whose checksum is being computed, so their bytes are being read.
        stopping: why nothing more is posted; None if it was not stopped.
        tally: of its WRITEs.
    """

    agent: str
    registration: Registration
    known: ConnectedPeer | None = None
    is_doubted: bool = False
    offer: Offer | None = None
    next_token: int = 0
    next_index: int = 0
    grant: StagingGrant | None = None
    asked: tuple[int, int] = (-1, -1)
    jobs: dict[TransferJob, bool] = field(default_factory=dict)
    awaiting_checksum: set[TransferJob] = field(default_factory=set)
    stopping: tuple[FailureCause, str] | None = None
    tally: TransferTally = field(default_factory=TransferTally)
    is_finished: bool = False

    @property
    def key(self) -> WriteKey:
        return self.agent, self.registration.attempt

    @property
    def is_complete(self) -> bool:
        """Whether a WRITE was made for every token."""
        return self.next_token >= self.registration.end_token


@dataclass(eq=False)
class Offer:
    """A request of prefill whose KV decode may have.

    Attributes:
        update: the scheduler's last update.
        blocks: those of ``update``, as kernel blocks.
        finished: prefill computes no more tokens of it.
        stopped: why decode may not have it; empty if it may.
        is_kept: vLLM keeps its blocks until the request is reported as done.
        settled: ranks of decode that need nothing more of it.
        waived: those of ``settled`` that have released its name only. They may still register, for this prompt.
        readers: ranks of decode that have begun to read its blocks.
        wanted_until_seconds: time until which decode counts as waiting for the offer. Each heartbeat moves it.
        awaited: how many ranks must be in ``settled``; None until a rank of decode has told its size.
        draining: holds of earlier preemptions, whose blocks may still be read.
        write_tasks: registrations that are served from it.
        claim: number to report when decode registers for it; 0 for none.
        timeline: from the end of its request on. What is written before that is written while prefill computes.
    """

    update: OfferUpdate
    blocks: tuple[KernelBlocks, ...] = ()
    finished: bool = False
    stopped: str = ""
    is_kept: bool = True
    settled: set[int] = field(default_factory=set)
    waived: set[int] = field(default_factory=set)
    readers: set[int] = field(default_factory=set)
    wanted_until_seconds: float = 0.0
    awaited: int | None = None
    draining: list[int] = field(default_factory=list)
    write_tasks: dict[WriteKey, WriteTask] = field(default_factory=dict)
    claim: int = 0
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def request_id(self) -> PrefillRequestId:
        return self.update.request_id

    @property
    def name(self) -> str:
        return self.update.name

    @property
    def digest(self) -> str:
        return self.update.digest

    @property
    def num_tokens(self) -> int:
        return self.update.num_tokens

    @property
    def ready_tokens(self) -> int:
        return self.update.ready_tokens

    @property
    def manifest(self) -> Manifest | None:
        return self.update.manifest

    @property
    def first_tokens(self) -> list[int]:
        """Per KV-cache group, the first token that it has: those that have left its sliding window are not kept."""
        return [blocks.first_token for blocks in self.blocks]

    def follow(self, now_seconds: float, *, is_copied: bool) -> None:
        """Note in what state it is now. ``is_copied``: its blocks are being copied into a slab."""
        if not self.finished or (self.is_satisfied and self.timeline.marks):
            return
        tasks, state = self.write_tasks.values(), State.PREFILL_OFFERED
        # Of a push everything may have been written before prefill's request has ended.
        if self.is_satisfied or self.readers - self.settled or any(task.known is not None for task in tasks):
            state = State.PREFILL_SENDING
        elif tasks:
            state = State.PREFILL_HANDSHAKE
        elif is_copied:
            state = State.PREFILL_COPYING
        self.timeline.enter(state, now_seconds)

    def report_claim(self, outcomes: OutcomeQueue) -> None:
        """A rank of decode has registered for it, or needs nothing of it."""
        if self.claim:
            outcomes.claimed(self.claim)
            self.claim = 0

    def lose_blocks(self) -> None:
        """The request was preempted: it has no blocks and no computed tokens any more."""
        self.blocks = ()
        self.update = msgspec.structs.replace(self.update, groups=(), ready_tokens=0, manifest=None, is_held=False)

    @property
    def is_satisfied(self) -> bool:
        return self.awaited is not None and len(self.settled) >= self.awaited

    @property
    def may_be_read(self) -> bool:
        """Whether it has blocks that vLLM will not reuse before they are reported idle, and decode may have them."""
        return bool(self.blocks) and (self.update.is_held or self.finished) and not self.stopped

    @property
    def is_read(self) -> bool:
        """Whether its blocks are being read by a WRITE or a checksum, or by one that is queued."""
        return any(task.jobs for task in self.write_tasks.values())
