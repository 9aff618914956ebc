# SPDX-License-Identifier: Apache-2.0
"""Checksums of the KV of verified hand-overs, computed off the transfer thread. Once per worker.

Prefill sends a checksum with each range of tokens; decode compares it with a checksum of what arrived in its blocks,
before the blocks are used. Decode chooses which hand-overs to verify by the attempt's number, so all of its ranks
choose the same ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcached_nixl.wire.messages import MAX_ATTEMPT
from kvcached_nixl.wire.planes import GroupMemory
from kvcached_nixl.worker.background import Background, Work
from kvcached_nixl.worker.geometry.descriptors import KernelBlocks
from kvcached_nixl.worker.geometry.kv_checksum import Content

__all__ = ["ChecksumRequest", "Checksums", "Range"]

Range = tuple[Sequence[tuple[KernelBlocks, int]], int]
"""(per KV-cache group its blocks and first token; one past the last token)."""


class ChecksumRequest(NamedTuple):
    """What checksums are computed for: the other rank's agent and KV-cache groups, and whether the result is wanted.

    ``is_wanted`` is called on the background thread, before the checksums are computed.
    """

    agent: str
    groups: Sequence[GroupMemory]
    is_wanted: Callable[[], bool]


class Checksums:
    """See the module. One request is computed at a time, and peers take turns.

    Args:
        sent: the memory that NIXL touches.
        received: the KV cache; the same object as ``sent`` where nothing is staged.
        fraction: how many of the hand-overs that this side fetches are verified, from 0 to 1.

    Threads: the transfer thread only.
    """

    def __init__(self, sent: Content, received: Content, background: Background, fraction: float) -> None:
        self._sent = sent
        self._received = received
        self._background = background
        self._below = fraction * MAX_ATTEMPT
        self._lanes: dict[str, deque[Work[list[str] | None]]] = {}
        self._is_busy = False
        self._served = ""

    def are_compared(self, attempt: int) -> bool:
        """Whether this attempt's hand-over is verified."""
        return attempt < self._below

    def of_sent(self, asked: ChecksumRequest, sent: Range, ended: Callable[[str, str], None]) -> None:
        """Compute the checksum of what is sent to another rank. ``ended``: called with it, and the error text or ""."""
        self._submit(self._sent, asked, [sent], lambda found, failed: ended("".join(found), failed), is_prefill=True)

    def of_received(
        self, asked: ChecksumRequest, received: Sequence[Range], ended: Callable[[list[str], str], None]
    ) -> None:
        """Compute a checksum of each range that arrived from another rank."""
        self._submit(self._received, asked, received, ended, is_prefill=False)

    def turn(self) -> None:
        """Deliver the results of finished work."""
        self._background.turn()

    def close(self) -> None:
        """Stop; work that has not begun is dropped."""
        self._background.close(is_dropping=True)

    def _submit(
        self,
        content: Content,
        asked: ChecksumRequest,
        ranges: Sequence[Range],
        ended: Callable[[list[str], str], None],
        *,
        is_prefill: bool,
    ) -> None:
        def do() -> list[str] | None:
            if not asked.is_wanted():
                return None
            return [
                content.digest(groups, end_token, asked.groups, is_prefill=is_prefill) for groups, end_token in ranges
            ]

        def told(found: list[str] | None, failed: str) -> None:
            self._is_busy = False
            self._begin_next()
            ended(found or [], failed or ("" if found is not None else "the checksum is not needed any more"))

        self._lanes.setdefault(asked.agent, deque()).append(Work("computing a checksum", do, told))
        self._begin_next()

    def _begin_next(self) -> None:
        if self._is_busy or not self._lanes:
            return
        agent = next((one for one in self._lanes if one != self._served), self._served)
        self._served = agent
        lane = self._lanes.pop(agent)
        work = lane.popleft()
        if lane:
            self._lanes[agent] = lane
        self._is_busy = True
        self._background.submit(work)
