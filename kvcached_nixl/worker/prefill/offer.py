# SPDX-License-Identifier: Apache-2.0
"""Prefill: one request that decode may have, and one registration of decode's that is being written from it.

    writing   waiting for its peer, its offer or for tokens -> writing -> everything posted -> over
                  \\------- told to stop, or something failed: nothing more is posted -------> over, answered

Owned by the transfer thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvcached_nixl.ids import KernelBlock, PrefillRequestId
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.manifest import Manifest
from kvcached_nixl.wire.messages import Registration, StagingGrant
from kvcached_nixl.wire.step import OfferUpdate
from kvcached_nixl.worker.transfer.handshake import ConnectedPeer
from kvcached_nixl.worker.transfer.transfer_queue import TransferJob

__all__ = ["Offer", "WriteTask", "WriteKey"]

WriteKey = tuple[str, int]
"""Whose registration, by its agent, and its attempt."""


@dataclass(eq=False)
class WriteTask:
    """A registration that is not over.

    Attributes:
        known: whoever registered, after the handshake.
        is_doubted: somebody else was known at its address.
        offer: what is written; None until prefill has it.
        next_token: the first one that no WRITE was made for yet.
        next_index: number of the next WRITE.
        room: where decode has room now, if it gives room range by range; ``asked``: the tokens for which it was asked.
        jobs: WRITEs that are to be queued, queued or in flight, and whether they are the last ones.
        digesting: those of them that wait for what their bytes come to; the bytes are being read.
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
    """A request of prefill.

    Attributes:
        update: what its scheduler has said last.
        block_ids: those of ``update`` as kernel blocks per group, from the prompt's first token on.
        finished: prefill computes no more of it.
        stopped: why decode may not have it; empty if it may.
        is_kept: vLLM keeps its blocks until it is told that nobody needs them.
        settled: ranks of decode that need nothing more of it, of ``awaited`` once that is known.
        waived: those of them that have only named it. They may still come, if they want this prompt.
        draining: it was preempted, and the blocks of these holds may still be read.
        write_tasks: registrations that are served from it.
    """

    update: OfferUpdate
    block_ids: tuple[Sequence[KernelBlock], ...] = ()
    finished: bool = False
    stopped: str = ""
    is_kept: bool = True
    settled: set[int] = field(default_factory=set)
    waived: set[int] = field(default_factory=set)
    awaited: int | None = None
    draining: list[int] = field(default_factory=list)
    write_tasks: dict[WriteKey, WriteTask] = field(default_factory=dict)

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

    def lose_blocks(self) -> None:
        """It was preempted: nothing of it is computed any more."""
        self.block_ids = ()
        self.update = msgspec.structs.replace(self.update, block_ids=(), ready_tokens=0, manifest=None, is_held=False)

    @property
    def is_satisfied(self) -> bool:
        return self.awaited is not None and len(self.settled) >= self.awaited

    @property
    def may_be_read(self) -> bool:
        """Whether it has blocks that are nobody else's before they are told to be quiet, and somebody may want them."""
        return bool(self.block_ids) and (self.update.is_held or self.finished) and not self.stopped

    @property
    def is_read(self) -> bool:
        """Whether its blocks are being read by a WRITE, or will be without being asked for again."""
        return any(task.jobs for task in self.write_tasks.values())
