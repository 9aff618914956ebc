# SPDX-License-Identifier: Apache-2.0
"""Checksums of the KV of verified hand-overs, computed off the transfer thread. Once per worker.

Prefill sends a checksum with each range of tokens; decode compares it with a checksum of what arrived in its blocks,
before the blocks are used. Decode chooses which hand-overs to verify by the attempt's number, so all of its ranks
choose the same ones.

A checksum is equal on both sides whatever their memory layouts are. The cells of a plane are hashed in the order token,
head. For each KV-cache group, the hashes of all planes, in the order in which both sides list them, are hashed into the
checksum. So block sizes, strides, shares of the heads and block ids do not matter, and the unused rest of the last
block is not included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvcached_nixl.wire.messages import MAX_ATTEMPT
from kvcached_nixl.wire.planes import GroupMemory, Planes, exchanged, moves
from kvcached_nixl.worker.background import Background, Work
from kvcached_nixl.worker.geometry.descriptors import KernelBlocks

__all__ = ["ChecksumRequest", "Checksums", "Content", "Range"]

_PIECE_BYTES = 32 << 20


_Areas: TypeAlias = list[tuple[torch.Tensor, list[tuple[int, int, int]]]]
"""Per area with some of a group's planes: its blocks as bytes, (num_blocks, block_bytes), and of each plane (the kind,
the plane's index in its kind, offset in a block)."""


class Content:
    """The memory of which checksums are computed.

    Args:
        groups: where the cells of each KV-cache group are.
        areas: the memory that holds them: each an address and its blocks as bytes, (num_blocks, block_bytes).
    """

    def __init__(self, groups: Sequence[GroupMemory], areas: Sequence[tuple[int, torch.Tensor]]) -> None:
        self._memory = tuple(groups)
        # Both ways in which a group may be exchanged.
        self._areas: dict[tuple[Planes, ...], _Areas] = {
            planes: _areas(planes, areas) for group in groups for planes in (group.planes, group.parts) if planes
        }

    def digest(
        self,
        groups: Sequence[tuple[KernelBlocks, int]],
        end_token: int,
        other: Sequence[GroupMemory],
        *,
        is_prefill: bool,
    ) -> str:
        """Returns the checksum of the tokens before ``end_token`` and the heads that prefill's rank moves to decode's:
        32 hexadecimal digits.

        Args:
            groups: per KV-cache group its local blocks, and its first token.
            other: the other side's KV-cache groups.
            is_prefill: this is prefill's side.

        Threads: any. The blocks are read until it returns.
        """
        whole = xxhash.xxh3_128()
        for (blocks, first_token), here, there in zip(groups, self._memory, other, strict=True):
            if first_token >= end_token:
                continue
            planes, theirs = exchanged(here, there)
            found = [[xxhash.xxh3_128() for _ in one.bases] for one in planes]
            moved = [moves(*pair, is_prefill=is_prefill) for pair in zip(planes, theirs, strict=True)]
            for area, of_area in self._areas[planes]:
                within = [one for one in of_area if moved[one[0]]]
                if within:
                    self._read(area, planes, within, blocks, first_token, end_token, theirs, found)
            for one in found:
                for plane in one:
                    whole.update(plane.digest())
        return str(whole.hexdigest())

    def _read(
        self,
        area: torch.Tensor,
        planes: Sequence[Planes],
        within: Sequence[tuple[int, int, int]],
        blocks: KernelBlocks,
        first_token: int,
        end_token: int,
        other: Sequence[Planes],
        found: Sequence[Sequence[xxhash.xxh3_128]],
    ) -> None:
        """Hash the planes that are in one area, some blocks at a time."""
        size = planes[0].block_size
        first, last = (first_token - blocks.first_token) // size, -(-(end_token - blocks.first_token) // size)
        if first < 0 or last > len(blocks.ids):
            raise ValueError(
                f"found {len(blocks.ids)} blocks of {size} tokens from token {blocks.first_token} on; expected them to "
                f"hold the tokens {first_token} to {end_token - 1}"
            )
        ids = torch.tensor(list(blocks.ids[first:last]), dtype=torch.int64, device=area.device)
        piece = max(1, _PIECE_BYTES // area.shape[1])
        for begin in range(0, len(ids), piece):
            rows = area.index_select(0, ids[begin : begin + piece]).cpu().numpy()
            # The piece's tokens that are in the range.
            base = blocks.first_token + (first + begin) * size
            meant = slice(max(0, first_token - base), min(len(rows) * size, end_token - base))
            for kind, place, offset in within:
                cells = _cells(rows, planes[kind], offset, other[kind])
                found[kind][place].update(np.ascontiguousarray(cells[meant]).data)


def _cells(rows: npt.NDArray[np.uint8], here: Planes, offset: int, there: Planes) -> npt.NDArray[np.uint8]:
    """Returns the cells of a plane in some blocks, (tokens, heads that both sides have, bytes)."""
    first, last = max(here.first_head, there.first_head), min(here.last_head, there.last_head)
    if first >= last:
        raise ValueError(
            f"found the heads {there.first_head} to {there.last_head - 1}; expected some that this rank has"
        )
    skipped = (first - here.first_head) * here.head_stride_bytes
    shape = (len(rows), here.block_size, last - first, here.cell_bytes)
    strides = (rows.strides[0], here.token_stride_bytes, here.head_stride_bytes, 1)
    view = np.lib.stride_tricks.as_strided(rows[:, offset + skipped :], shape, strides, writeable=False)
    return view.reshape(-1, last - first, here.cell_bytes)


def _areas(planes: Sequence[Planes], areas: Sequence[tuple[int, torch.Tensor]]) -> _Areas:
    """Returns the areas that hold some of the planes."""
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for kind, one in enumerate(planes):
        for place, base in enumerate(one.bases):
            index, offset = _find(base, areas, one.block_stride_bytes)
            found.setdefault((index, one.block_stride_bytes), []).append((kind, place, offset))
    # Where a block is split into kernel blocks, a state lies across all of them.
    return [(areas[index][1].view(-1, stride), within) for (index, stride), within in found.items()]


def _find(base: int, areas: Sequence[tuple[int, torch.Tensor]], block_bytes: int) -> tuple[int, int]:
    """Returns the index of the area that holds a plane, and the plane's offset in the first block."""
    for index, (address, _) in enumerate(areas):
        if 0 <= base - address < block_bytes:
            return index, base - address
    raise ValueError(f"found a plane at {base:#x}; expected it in the first block of a region")


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
    """Checksums of both sides. One request is computed at a time, and peers take turns.

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
