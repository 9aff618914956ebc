# SPDX-License-Identifier: Apache-2.0
"""Prefill: one request that decode may have, and one registration of decode's that is being written from it.

    writing   waiting for its peer, its offer or for tokens -> writing -> everything posted -> over
                  \\------- told to stop, or something failed: nothing more is posted -------> over, answered

Owned by the transfer thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.causes import Cause
from kvcached_nixl.wire.manifest import Manifest
from kvcached_nixl.wire.messages import Registration, Room
from kvcached_nixl.worker.handover.meeting import Known
from kvcached_nixl.worker.handover.posting import Job

__all__ = ["Memory", "Offer", "Writing", "WritingKey"]

T = TypeVar("T")

REMEMBERED = 65_536

WritingKey = tuple[str, int]
"""Whose registration, by its agent, and its attempt."""


@dataclass(eq=False)
class Writing:
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
    known: Known | None = None
    is_doubted: bool = False
    offer: Offer | None = None
    next_token: int = 0
    next_index: int = 0
    room: Room | None = None
    asked: tuple[int, int] = (-1, -1)
    jobs: dict[Job, bool] = field(default_factory=dict)
    digesting: set[Job] = field(default_factory=set)
    stopping: tuple[Cause, str] | None = None
    is_over: bool = False

    @property
    def key(self) -> WritingKey:
        return self.agent, self.registration.attempt

    @property
    def is_complete(self) -> bool:
        """Whether a WRITE was made for every token."""
        return self.next_token >= self.registration.end_token


@dataclass(eq=False)
class Offer:
    """A request of prefill.

    Attributes:
        name, digest, num_tokens: under which decode may look for it, and how many tokens the digest is of.
        block_ids: kernel blocks per group, from the prompt's first token on; ``ready_tokens`` of them are computed.
        manifest: when all of the prompt is.
        is_held: its blocks are held if the request loses them before it has ended.
        finished: prefill computes no more of it.
        is_kept: vLLM keeps its blocks until it is told that nobody needs them.
        settled: ranks of decode that need nothing more of it, of ``awaited`` once that is known.
        waived: those of them that have only named it. They may still come, if they want this prompt.
        draining: it was preempted, and the blocks of these holds may still be read.
        writings: registrations that are served from it.
    """

    request_id: PrefillRequestId
    name: str
    digest: str
    num_tokens: int
    block_ids: tuple[Sequence[int], ...] = ()
    ready_tokens: int = 0
    manifest: Manifest | None = None
    is_held: bool = False
    finished: bool = False
    stopped: str = ""
    is_kept: bool = True
    settled: set[int] = field(default_factory=set)
    waived: set[int] = field(default_factory=set)
    awaited: int | None = None
    draining: list[int] = field(default_factory=list)
    writings: dict[WritingKey, Writing] = field(default_factory=dict)

    @property
    def is_satisfied(self) -> bool:
        return self.awaited is not None and len(self.settled) >= self.awaited

    @property
    def may_be_read(self) -> bool:
        """Whether it has blocks that are nobody else's before they are told to be quiet, and somebody may want them."""
        return bool(self.block_ids) and (self.is_held or self.finished) and not self.stopped

    @property
    def is_read(self) -> bool:
        """Whether its blocks are being read by a WRITE, or will be without being asked for again."""
        return any(writing.jobs for writing in self.writings.values())


class Memory(Generic[T]):
    """The last ``REMEMBERED`` things that were added."""

    def __init__(self) -> None:
        self._held: OrderedDict[T, None] = OrderedDict()

    def __contains__(self, thing: T) -> bool:
        return thing in self._held

    def add(self, thing: T) -> None:
        self._held[thing] = None
        if len(self._held) > REMEMBERED:
            self._held.popitem(last=False)
