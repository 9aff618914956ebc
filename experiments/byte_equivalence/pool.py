# SPDX-License-Identifier: Apache-2.0
"""Records how many bytes of each server's pool kvcached has mapped during the concurrent part."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from types import TracebackType

from experiments.byte_equivalence.checks import Check
from experiments.common.pages import PageCount, PageWatch

SETTLE_SECONDS = 20.0


class PoolMemory:
    """Samples kvcached's memory counters of ``ipc_names`` during a ``with`` block.

    ``resting_bytes`` is what may stay mapped while the server is idle: the page group of vLLM's null block.
    """

    def __init__(self, ipc_names: Sequence[str], resting_bytes: int) -> None:
        self.resting_bytes = resting_bytes
        self._watches = [PageWatch(name) for name in ipc_names]
        self._resting: list[list[int]] = [[] for _ in ipc_names]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> PoolMemory:
        for watch in self._watches:
            self._stack.enter_context(watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    async def settle(self) -> None:
        """Wait at most ``SETTLE_SECONDS`` until every pool is down to its idle size; record the size reached."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline and any(level > self.resting_bytes for level in self._levels()):
            await asyncio.sleep(0.05)
        for reached, level in zip(self._resting, self._levels(), strict=True):
            reached.append(level)

    def _levels(self) -> list[int]:
        return [watch.mapped_bytes() or 0 for watch in self._watches]

    def counts(self) -> list[PageCount]:
        """Return how much each pool mapped and unmapped; call it after the ``with`` block."""
        return [watch.count() for watch in self._watches]

    def resting(self) -> list[list[int]]:
        """Return the bytes each pool had mapped after each round."""
        return self._resting


def remapped(arm: str, what: str, pages: PageCount) -> Check:
    """Return the row that checks that kvcached unmapped pages and then mapped some again."""
    mib = {
        name: round(getattr(pages, f"{name}_bytes") / 2**20, 1)
        for name in ("limit", "lowest", "highest", "mapped", "unmapped", "remapped")
    }
    return Check(
        arm,
        what,
        pages.unmapped_bytes > 0 and pages.remapped_bytes > 0,
        f"at least {mib['unmapped']} MiB unmapped and {mib['remapped']} MiB mapped again, between "
        f"{mib['lowest']} and {mib['highest']} MiB mapped of {mib['limit']} MiB",
        {f"{name}_mib": value for name, value in mib.items()},
    )


def came_back(arm: str, what: str, resting: Sequence[int], page_group_bytes: int) -> Check:
    """Return the row that checks that at most one page group (bytes) was mapped after each round."""
    return Check(
        arm,
        what,
        bool(resting) and max(resting) <= page_group_bytes,
        f"{max(resting, default=0) / 2**20:.0f} MiB mapped at rest, a page group is {page_group_bytes / 2**20:.0f} MiB",
        {"resting_mib": [level / 2**20 for level in resting]},
    )
