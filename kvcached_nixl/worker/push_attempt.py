# SPDX-License-Identifier: Apache-2.0
"""A registration that prefill serves, and its WRITEs: made of what is computed, queued, posted, and waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvcached_nixl.transport.base import Handle, Ranges, State, Transport, TransportError
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.wire.push import Registration, Written, encode
from kvcached_nixl.worker.descriptors import Blocks, pair

__all__ = ["Attempt"]

DESCRIPTORS_PER_WRITE = 256
"""NIXL posts a WRITE's descriptors one by one and holds Python's interpreter for as long as that takes, which is while
the peer has to make room for them: everything else of the engine would stand still."""
WRITES_IN_FLIGHT = 4
"""Of one attempt."""


class Write(NamedTuple):
    """A WRITE that is not posted yet: ranges on both sides, row by row, and what travels with it."""

    local: Ranges
    remote: Ranges
    notification: bytes


@dataclass
class Attempt:
    """A registration that is not over.

    Attributes:
        next_token: the first one that no WRITE was made for yet.
        queued: WRITEs that wait for earlier ones to end.
    """

    peer: str
    registration: Registration
    next_token: int
    unmatched_at_seconds: float
    next_index: int = 0
    queued: deque[Write] = field(default_factory=deque)
    in_flight: list[Handle] = field(default_factory=list)
    stopping: str = ""
    withdrawn: bool = False

    @property
    def reading(self) -> bool:
        """Whether prefill's blocks are being read, or will be without being asked for again."""
        return bool(self.in_flight or self.queued)

    def stop(self, reason: str) -> None:
        """Post nothing more of it; the first reason is the one that is told."""
        self.stopping = self.stopping or reason

    @property
    def complete(self) -> bool:
        """Whether a WRITE was made for every token."""
        return self.next_token >= self.registration.end_token

    def make_writes(
        self, local: Planes, remote: Planes, block_ids: Sequence[Sequence[int]], end: int, tp_rank: int, tp_size: int
    ) -> None:
        """Queue WRITEs of the tokens up to ``end`` that are in none yet.

        Args:
            block_ids: where prefill has them, per KV-cache group.
            tp_rank, tp_size: prefill's.

        Raises:
            ValueError: the registration does not fit what decode's handshake said.
        """
        registration = self.registration
        if len(registration.block_ids) != len(block_ids) or registration.block_size != remote.block_size:
            raise ValueError("the registration does not fit the handshake (KV-cache groups or block size)")
        found = [
            pair(local, remote, Blocks(here), Blocks(there, registration.first_token), self.next_token, end)
            for here, there in zip(block_ids, registration.block_ids, strict=True)
        ]
        ours, theirs = (np.concatenate([getattr(one, side) for one in found]) for side in ("local", "remote"))
        self.next_token = end
        for start in range(0, len(ours), DESCRIPTORS_PER_WRITE):
            rows = slice(start, start + DESCRIPTORS_PER_WRITE)
            is_last = self.complete and start + DESCRIPTORS_PER_WRITE >= len(ours)
            written = Written(*registration.key, tp_rank, tp_size, self.next_index, is_last)
            self.queued.append(Write(ours[rows], theirs[rows], encode(written)))
            self.next_index += 1

    def post(self, transport: Transport) -> None:
        """Post what is queued, as far as there is room; nothing more once it is to stop."""
        if self.stopping:
            self.queued.clear()
        while self.queued and len(self.in_flight) < WRITES_IN_FLIGHT:
            try:
                self.in_flight.append(transport.write(self.peer, *self.queued.popleft()))
            except TransportError as cause:
                self.stopping = f"a WRITE was not posted: {cause}"
                self.queued.clear()

    def look_after(self, transport: Transport) -> None:
        """Let go of the WRITEs that have ended; asking is what sends their notifications."""
        still: list[Handle] = []
        for handle in self.in_flight:
            state = transport.state(handle)
            if state is State.IN_FLIGHT:
                still.append(handle)
                continue
            transport.release(handle)
            if state is State.FAILED:
                self.stop("a WRITE failed")
        self.in_flight = still
