# SPDX-License-Identifier: Apache-2.0
"""Memory that a test lays out, checksums of it, computed when the test says so; and copies that it can look at."""

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


def laid_out(
    num_planes: int,
    num_blocks: int,
    block_size: int,
    heads: range,
    cell_bytes: int,
    *,
    begin: int = 0,
    gap: int = 0,
    contiguous: bool = False,
    head_major: bool = False,
) -> Planes:
    """Returns planes side by side in every block if ``contiguous``, else apart, with a ``gap`` behind each."""
    inner = block_size * len(heads) * cell_bytes
    return Planes(
        bases=tuple(begin + plane * (inner if contiguous else inner * num_blocks + gap) for plane in range(num_planes)),
        keys=tuple(range(num_planes)),
        block_stride_bytes=inner * (num_planes if contiguous else 1),
        token_stride_bytes=cell_bytes * (1 if head_major else len(heads)),
        head_stride_bytes=cell_bytes * (block_size if head_major else 1),
        cell_bytes=cell_bytes,
        num_blocks=num_blocks,
        block_size=block_size,
        num_heads=len(heads),
        first_head=heads.start,
    )


def cell_at(planes: Planes, base: int, block: int, token: int, head: int = 0) -> int:
    """Returns the address of the cell of a block's token. ``base``: of its plane; ``head``: of those of this rank."""
    strides = (planes.block_stride_bytes, planes.token_stride_bytes, planes.head_stride_bytes)
    return base + sum(number * stride for number, stride in zip((block, token, head), strides, strict=True))


def areas_of(planes: Planes, memory: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Returns what holds the planes, as `Content` takes it. ``memory``: all of it, as one dimension of bytes."""
    block_bytes, begin = planes.block_stride_bytes, memory.data_ptr()
    firsts: list[int] = []
    for base in sorted(planes.bases):
        if not firsts or base >= firsts[-1] + block_bytes:
            firsts.append(base)
    size = planes.num_blocks, block_bytes
    return [(base, memory.as_strided(size, (block_bytes, 1), base - begin)) for base in firsts]


def content_of(planes: Planes, memory: torch.Tensor) -> Content:
    return Content((GroupMemory((planes,)),), areas_of(planes, memory))


def as_bytes(array: Any) -> torch.Tensor:
    """Returns the memory of a C-contiguous numpy array."""
    return torch.from_numpy(array.reshape(-1).view("uint8"))
