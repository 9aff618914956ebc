# SPDX-License-Identifier: Apache-2.0
"""Checksums of memory that a test lays out, computed when the test says so; and copies that it can look at."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kvcached_nixl.wire.planes import GroupMemory, Planes
from kvcached_nixl.worker.background import Work
from kvcached_nixl.worker.transfer.checksums import Content


@dataclass
class InTurn:
    """Stands in for `Background`: does the submitted work in the next turn, or if ``held``, when `run` is called.

    Attributes:
        fails: how many of the next pieces of work fail.
    """

    held: bool = False
    fails: int = 0
    asked: deque[Work[Any]] = field(default_factory=deque)
    ended: deque[tuple[Work[Any], Any, str]] = field(default_factory=deque)

    def submit(self, work: Work[Any]) -> None:
        self.asked.append(work)

    def run(self) -> None:
        """Does the oldest piece of work."""
        work = self.asked.popleft()
        failed = f"{work.what} failed" if self.fails else ""
        self.ended.append((work, None if failed else work.do(), failed))
        self.fails -= self.fails > 0

    def begin(self) -> Callable[[], None]:
        """Does the oldest piece of work. Returns what ends it: until then its result is not known."""
        work = self.asked.popleft()
        found = work.do()
        return lambda: self.ended.append((work, found, ""))

    def turn(self) -> None:
        while self.ended or (self.asked and not self.held):
            if not self.ended:
                self.run()
            work, found, failed = self.ended.popleft()
            work.ended(found, failed)

    def close(self, *, is_dropping: bool) -> None:
        """There is no thread to stop."""


class StubSlab:
    """Stands in for `Slab`, of whose methods only the names are used (`Copy`)."""

    extent = (0, 4096)

    def gather(self, blocks: Any, staged: Any) -> None: ...
    def scatter(self, staged: Any, blocks: Any) -> None: ...


class Copy(NamedTuple):
    """A copy that was submitted: its blocks of the cache and of the slab, and what to call at its end."""

    is_gather: bool
    blocks: Sequence[int]
    staged: Sequence[int]
    ended: Callable[[str], None]

    @classmethod
    def of(cls, work: Work[Any]) -> Copy:
        do: Any = work.do
        is_gather = do.func.__name__ == "gather"
        blocks, staged = do.args if is_gather else do.args[::-1]
        return cls(is_gather, blocks, staged, lambda failed: work.ended(None, failed))


def content_of(planes: Planes, memory: torch.Tensor) -> Content:
    """Returns the `Content` of a KV-cache group. ``memory``: all memory of its planes, as one dimension of bytes."""
    block_bytes, begin = planes.block_stride_bytes, memory.data_ptr()
    firsts: list[int] = []
    for base in sorted(planes.bases):
        if not firsts or base >= firsts[-1] + block_bytes:
            firsts.append(base)
    size = planes.num_blocks, block_bytes
    areas = [(base, memory.as_strided(size, (block_bytes, 1), base - begin)) for base in firsts]
    return Content((GroupMemory((planes,)),), areas)


def as_bytes(array: Any) -> torch.Tensor:
    """Returns the memory of a C-contiguous numpy array."""
    return torch.from_numpy(array.reshape(-1).view("uint8"))
