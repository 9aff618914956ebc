# SPDX-License-Identifier: Apache-2.0
"""Hand-overs that are verified: what their bytes come to here, found off the transfer thread. Once per worker.

Prefill says it of what it sends, range by range; decode compares it with what has come into its blocks before they are
used. Which hand-overs are verified, decode draws by the number of the attempt, so all of its ranks draw alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvcached_nixl.wire.messages import MAX_ATTEMPT
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.worker.background import Work
from kvcached_nixl.worker.content import Content
from kvcached_nixl.worker.descriptors import Blocks

__all__ = ["Digests", "Range", "Runs"]

Range = tuple[Sequence[tuple[Blocks, int]], int]
"""Per KV-cache group its blocks and first token; and one past the last token."""


class Runs(Protocol):
    """What does the work; `background.Background`."""

    def submit(self, work: Work[list[str]]) -> None: ...
    def turn(self) -> None: ...
    def close(self) -> None: ...


class Digests:
    """See the module.

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

    def are_compared(self, attempt: int) -> bool:
        """Whether this attempt is one of those that are verified."""
        return attempt < self._below

    def of_sent(self, sent: Range, other: Sequence[Planes], ended: Callable[[str, str], None]) -> None:
        """Of what another rank is to have. ``ended``: called with the digest, and what went wrong, or ""."""
        self._submit(self._sent, [sent], other, lambda found, failed: ended("".join(found), failed))

    def of_received(
        self, received: Sequence[Range], other: Sequence[Planes], ended: Callable[[list[str], str], None]
    ) -> None:
        """Of what has come from another rank, range by range."""
        self._submit(self._received, received, other, ended)

    def turn(self) -> None:
        """Tell what has been found."""
        self._runs.turn()

    def close(self) -> None:
        """Stop."""
        self._runs.close()

    def _submit(
        self,
        content: Content,
        ranges: Sequence[Range],
        other: Sequence[Planes],
        ended: Callable[[list[str], str], None],
    ) -> None:
        def do() -> list[str]:
            return [content.digest(groups, end_token, other) for groups, end_token in ranges]

        self._runs.submit(Work("A digest", do, lambda found, failed: ended(found or [], failed)))
