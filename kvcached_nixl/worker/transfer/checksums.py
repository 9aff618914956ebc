# SPDX-License-Identifier: Apache-2.0
"""Checksums of the KV of verified hand-overs, computed off the transfer thread. Once per worker.

Prefill sends a checksum with each range of tokens; decode compares it with a checksum of what arrived in its blocks,
before the blocks are used. Decode chooses which hand-overs to verify by the attempt's number, so all of its ranks
choose the same ones.

A checksum is equal on both sides whatever their memory layouts are. The cells of a plane are hashed in the order token,
head. For each KV-cache group, the hashes of all planes that both ranks have are hashed into one, in the order of their
keys. So block sizes, strides, shares of the heads and block ids do not matter, and the unused rest of the last block is
not included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.messages import MAX_ATTEMPT, KernelBlockRange, Written
from kvcached_nixl.wire.planes import GroupMemory, Planes, exchanged, moves, shared_planes
from kvcached_nixl.worker.background import Background, Work

_PIECE_BYTES = 32 << 20

Result = TypeVar("Result")

Range = tuple[Sequence[tuple[KernelBlockRange, int]], int]
"""(per KV-cache group its blocks and first token; one past the last token)."""


class Content:
    """The memory of which checksums are computed. ``groups``: where the cells of each KV-cache group are. ``areas``:
    the memory that holds them: each an address and its blocks as bytes, (num_blocks, block_bytes)."""

    def __init__(self, groups: Sequence[GroupMemory], areas: Sequence[tuple[int, torch.Tensor]]) -> None:
        self._memory = tuple(groups)
        # Both ways in which a group may be exchanged.
        self._cells = {
            planes: [_cells(planes, base, areas) for base in planes.bases]
            for group in groups
            for planes in (*group.planes, *group.parts)
        }

    def digest(
        self,
        groups: Sequence[tuple[KernelBlockRange, int]],
        end_token: int,
        other: Sequence[GroupMemory],
        *,
        is_prefill: bool,
    ) -> str:
        """Returns the checksum of the tokens before ``end_token`` and the heads that prefill's rank moves to decode's:
        32 hexadecimal digits. ``groups``: per KV-cache group its local blocks, and its first token. ``other``: the
        other side's groups. ``is_prefill``: this is prefill's side.

        Threads: any. The blocks are read until it returns.
        """
        whole = xxhash.xxh3_128()
        for (blocks, first_token), here, there in zip(groups, self._memory, other, strict=True):
            if first_token >= end_token:
                continue
            for planes, theirs in zip(*exchanged(here, there), strict=True):
                is_moved = moves(planes, theirs, is_prefill=is_prefill)
                for cells in (self._cells[planes][place] for place, _ in shared_planes(planes, theirs)):
                    found = xxhash.xxh3_128()
                    for piece in _pieces(cells, planes, theirs, blocks, first_token, end_token) if is_moved else ():
                        found.update(piece.data)
                    whole.update(found.digest())
        return str(whole.hexdigest())


def _cells(planes: Planes, base: int, areas: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """View the cells of a plane as bytes, (blocks, tokens, heads, bytes)."""
    for address, area in areas:
        if 0 <= base - address < planes.block_stride_bytes:
            size = (planes.num_blocks, planes.block_size, planes.num_heads, planes.cell_bytes)
            strides = (planes.block_stride_bytes, planes.token_stride_bytes, planes.head_stride_bytes, 1)
            return area.as_strided(size, strides, area.storage_offset() + base - address)
    raise ValueError(f"found a plane at {base:#x}; expected it in the first block of a region")


def _pieces(
    cells: torch.Tensor, here: Planes, there: Planes, blocks: KernelBlockRange, first_token: int, end_token: int
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yields the cells of a range of tokens and of the heads that both sides have, some blocks at a time."""
    size = here.block_size
    first, last = (first_token - blocks.first_token) // size, -(-(end_token - blocks.first_token) // size)
    if first < 0 or last > len(blocks.block_ids):
        raise ValueError(
            f"found {len(blocks.block_ids)} blocks of {size} tokens from token {blocks.first_token} on; expected them "
            f"to hold the tokens {first_token} to {end_token - 1}"
        )
    first_head, last_head = max(here.first_head, there.first_head), min(here.last_head, there.last_head)
    if first_head >= last_head:
        raise ValueError(
            f"found the heads {there.first_head} to {there.last_head - 1}; expected some that this rank has"
        )
    cells = cells[:, :, first_head - here.first_head : last_head - here.first_head]
    ids = torch.tensor(blocks.block_ids[first:last], dtype=torch.int64, device=cells.device)
    for some in ids.split(max(1, _PIECE_BYTES // cells[0].numel())):
        rows = cells.index_select(0, some).flatten(0, 1).cpu().numpy()
        base = blocks.first_token + first * size
        first += len(some)
        yield rows[max(0, first_token - base) : end_token - base]


class Checksums:
    """Checksums of both sides. One is computed at a time, and peers take turns.

    Args:
        sent: the memory that NIXL touches.
        received: the KV cache; the same object as ``sent`` where nothing is staged.
        fraction: how many of the hand-overs that this side fetches are verified, from 0 to 1.

    Threads: the transfer thread only. ``is_wanted`` of its methods is called on the background thread, before the
    checksums are computed.
    """

    def __init__(self, sent: Content, received: Content, background: Background, fraction: float) -> None:
        self._sent = sent
        self._received = received
        self.background = background
        self._below = fraction * MAX_ATTEMPT
        # By agent of the other rank.
        self._waiting: dict[str, deque[Work[Any]]] = {}
        self._served, self._is_busy = "", False

    def are_compared(self, attempt: int) -> bool:
        return attempt < self._below

    def of_sent(
        self,
        agent: str,
        sent: Range,
        other: Sequence[GroupMemory],
        is_wanted: Callable[[], bool],
        ended: Callable[[str, str], None],
    ) -> None:
        """Compute the checksum of what is sent to the rank of ``agent``. ``ended``: called with it, and the error text
        or ""."""

        def do() -> str | None:
            return self._sent.digest(*sent, other, is_prefill=True) if is_wanted() else None

        self._submit(agent, do, lambda found, failed: ended(found or "", failed))

    def compare(
        self,
        agent: str,
        blocks: Sequence[KernelBlockRange],
        end_token: int,
        other: Sequence[GroupMemory],
        written: Sequence[Written],
        is_wanted: Callable[[], bool],
        ended: Callable[[HandOverFailed | None], None],
    ) -> None:
        """Compare checksums of what has arrived with those that the rank of ``agent`` has sent, range by range.

        Args:
            blocks: per KV-cache group those that were filled, up to ``end_token``.
            written: the rank's notification of the last WRITE of each range, in order.
            ended: called with the failure, or None if all are equal. The blocks are being read until then.
        """
        begin = min(group.first_token for group in blocks)
        ranges: list[Range] = []
        for one in written:
            if not begin < one.end_token <= end_token:
                # Ranges must grow: else each short message of a peer could make this rank read the whole request again.
                break
            ranges.append(([(here, max(begin, here.first_token)) for here in blocks], one.end_token))
            begin = one.end_token
        said = [one.digest for one in written]
        if begin != end_token or len(ranges) != len(written) or None in said:
            ended(HandOverFailed(FailureCause.PROTOCOL, "prefill did not send the checksums that it was asked for"))
            return

        def do() -> list[str] | None:
            if not is_wanted():
                return None
            return [self._received.digest(*one, other, is_prefill=False) for one in ranges]

        def found(checksums: list[str] | None, failed: str) -> None:
            ended(HandOverFailed(FailureCause.DEFECT, failed) if checksums is None else _difference(checksums, written))

        self._submit(agent, do, found)

    def _submit(self, agent: str, do: Callable[[], Result | None], ended: Callable[[Result | None, str], None]) -> None:
        def told(found: Result | None, failed: str) -> None:
            self._is_busy = False
            self._begin_next()
            ended(found, failed or ("" if found is not None else "the checksum is not needed any more"))

        self._waiting.setdefault(agent, deque()).append(Work("computing a checksum", do, told))
        self._begin_next()

    def _begin_next(self) -> None:
        if self._is_busy or not self._waiting:
            return
        self._served = agent = next((one for one in self._waiting if one != self._served), self._served)
        waiting = self._waiting.pop(agent)
        self._is_busy = True
        self.background.submit(waiting.popleft())
        if waiting:
            self._waiting[agent] = waiting


def _difference(found: Sequence[str], written: Sequence[Written]) -> HandOverFailed | None:
    """Returns the failure of the first range whose checksum is not the one that was sent; None if there is none."""
    for checksum, one in zip(found, written, strict=True):
        if checksum != one.digest:
            reason = (
                f"the KV of the tokens before {one.end_token} is not what prefill sent: found checksum {checksum}; "
                f"expected {one.digest}"
            )
            return HandOverFailed(FailureCause.CHECKSUM, reason)
    return None
