# SPDX-License-Identifier: Apache-2.0
"""Hand-overs that are verified: what their bytes come to here, found off the transfer thread. Once per worker.

Prefill says it of what it sends, range by range; decode compares it with what has come into its blocks before they are
used. Which hand-overs are verified, decode draws by the number of the attempt, so all of its ranks draw alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvcached_nixl.wire.messages import MAX_ATTEMPT
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.worker.background import Work
from kvcached_nixl.worker.geometry.descriptors import Blocks
from kvcached_nixl.worker.geometry.kv_checksum import Content

__all__ = ["ChecksumRequest", "Checksums", "Range", "Runs"]

Range = tuple[Sequence[tuple[Blocks, int]], int]
"""Per KV-cache group its blocks and first token; and one past the last token."""


class ChecksumRequest(NamedTuple):
    """Whose digests are looked for: the other rank's agent, its planes, and whether they are still wanted.

    ``is_wanted`` is called on another thread, before they are looked for.
    """

    agent: str
    planes: Sequence[Planes]
    is_wanted: Callable[[], bool]


class Runs(Protocol):
    """What does the work; `background.Background`."""

    def submit(self, work: Work[list[str] | None]) -> None: ...
    def turn(self) -> None: ...
    def close(self, *, is_dropping: bool) -> None: ...


class Checksums:
    """See the module. One is looked for at a time, and peers take turns.

    Args:
        sent: of the memory that NIXL touches; received: of the KV cache. One where nothing is staged.
        fraction: of the hand-overs that this side asks for, how many are verified.

    Threads: the transfer thread's.
    """

    def __init__(self, sent: Content, received: Content, runs: Runs, fraction: float) -> None:
        self._sent = sent
        self._received = received
        self._runs = runs
        self._below = fraction * MAX_ATTEMPT
        self._lanes: dict[str, deque[Work[list[str] | None]]] = {}
        self._is_busy = False
        self._served = ""

    def are_compared(self, attempt: int) -> bool:
        """Whether this attempt is one of those that are verified."""
        return attempt < self._below

    def of_sent(self, asked: ChecksumRequest, sent: Range, ended: Callable[[str, str], None]) -> None:
        """Of what another rank is to have. ``ended``: called with the digest, and what went wrong, or ""."""
        self._submit(self._sent, asked, [sent], lambda found, failed: ended("".join(found), failed))

    def of_received(
        self, asked: ChecksumRequest, received: Sequence[Range], ended: Callable[[list[str], str], None]
    ) -> None:
        """Of what has come from another rank, range by range."""
        self._submit(self._received, asked, received, ended)

    def turn(self) -> None:
        """Tell what has been found."""
        self._runs.turn()

    def close(self) -> None:
        """Stop; what has not begun is not looked for."""
        self._runs.close(is_dropping=True)

    def _submit(
        self, content: Content, asked: ChecksumRequest, ranges: Sequence[Range], ended: Callable[[list[str], str], None]
    ) -> None:
        def do() -> list[str] | None:
            if not asked.is_wanted():
                return None
            return [content.digest(groups, end_token, asked.planes) for groups, end_token in ranges]

        def told(found: list[str] | None, failed: str) -> None:
            self._is_busy = False
            self._begin_next()
            ended(found or [], failed or ("" if found is not None else "nobody wants it any more"))

        self._lanes.setdefault(asked.agent, deque()).append(Work("A digest", do, told))
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
        self._runs.submit(work)
