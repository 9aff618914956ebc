# SPDX-License-Identifier: Apache-2.0
"""Where a rank keeps its KV in memory, as one rank describes it to another."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvcached_nixl.wire.checked import MAX_TP_SIZE, require

_ADDRESSES = 2**63


class HeadShare(NamedTuple):
    """Which of the model's heads (of states: channels) a rank has; fields as in `Planes`."""

    first_head: int
    copies: int = 1
    copy: int = 0


class Planes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one rank keeps the cells of its heads, for planes of one kind.

    Attributes:
        bases: address of the first cell of each plane.
        keys: which plane of the model each of them is (`plane_key`).
        block_stride_bytes, token_stride_bytes, head_stride_bytes: distance between two blocks, tokens, heads.
        cell_bytes: of one token of one head.
        block_size: tokens in a block.
        num_heads, first_head: heads that this rank holds; index in the model of the first of them.
        copies: how many ranks, one after the other, hold the same heads.
        copy: which of them this rank is, from 0.
        padded_bytes: bytes of a cell and of the padding behind it, which belongs to nothing else; 0 if there is none.
    """

    bases: tuple[int, ...]
    keys: tuple[int, ...]
    block_stride_bytes: int
    token_stride_bytes: int
    head_stride_bytes: int
    cell_bytes: int
    num_blocks: int
    block_size: int
    num_heads: int
    first_head: int = 0
    padded_bytes: int = 0
    copies: int = 1
    copy: int = 0

    def __post_init__(self) -> None:
        sizes = (self.cell_bytes, self.num_blocks, self.block_size, self.num_heads)
        strides = (self.block_stride_bytes, self.token_stride_bytes, self.head_stride_bytes)
        require(0 < len(self.bases) <= 65_536, "1 to 65,536 planes")
        require(len(set(self.keys)) == len(self.keys) == len(self.bases), "a key of its own for each plane")
        require(all(0 < size < 2**40 for size in sizes), "sizes above 0")
        require(all(0 <= stride < 2**48 for stride in strides) and 0 <= self.first_head < 2**31, "strides, and a head")
        require(self.padded_bytes == 0 or self.cell_bytes <= self.padded_bytes < 2**40, "padding behind a cell")
        require(0 <= self.copy < self.copies <= MAX_TP_SIZE, "one of the ranks that hold the same heads")
        # Sums of an address and offsets are computed in signed 64 bits, and must not overflow.
        span = strides[0] * self.num_blocks + strides[1] * self.block_size + strides[2] * self.num_heads
        require(all(0 <= base < _ADDRESSES - span for base in self.bases), "addresses of 63 bits")

    @property
    def last_head(self) -> int:
        """One past the last head."""
        return self.first_head + self.num_heads


class GroupMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one rank keeps the KV of one KV-cache group.

    Attributes:
        planes: one entry per kind, in the same order on both sides. All have blocks of the same number of tokens.
        kernel_blocks_per_block: kernel blocks in a logical block.
        parts: of states, the same bytes by channel and head, for peers that have another share of them; empty if it is
            not known how ranks share them.
    """

    planes: tuple[Planes, ...]
    kernel_blocks_per_block: int = 1
    parts: tuple[Planes, ...] = ()

    def __post_init__(self) -> None:
        require(0 < len(self.planes) <= 64 and len(self.parts) <= 64, "1 to 64 kinds of planes in a KV-cache group")
        require(0 < self.kernel_blocks_per_block < 2**20, "at least one kernel block in a block")
        sizes = {(planes.block_size, planes.num_blocks) for planes in self.all}
        require(len(sizes) == 1, "blocks of one size in a KV-cache group")

    @property
    def all(self) -> tuple[Planes, ...]:
        """All ways in which the bytes are described."""
        return *self.planes, *self.parts

    @property
    def kernel_block_size(self) -> int:
        """Tokens in a kernel block."""
        return self.planes[0].block_size

    @property
    def block_size(self) -> int:
        """Tokens in a logical block (the scheduler's)."""
        return self.kernel_block_size * self.kernel_blocks_per_block


def exchanged(here: GroupMemory, there: GroupMemory) -> tuple[tuple[Planes, ...], tuple[Planes, ...]]:
    """The planes by which two ranks exchange a KV-cache group: of states the whole ones if both have the same share,
    else their parts."""
    if here.parts and there.parts and here.planes[0].first_head != there.planes[0].first_head:
        return here.parts, there.parts
    return here.planes, there.planes


def moves(here: Planes, there: Planes, *, is_prefill: bool) -> bool:
    """Whether prefill's rank moves its heads of this kind to decode's; ``is_prefill``: this is prefill's side. Of ranks
    whose copies decode's rank could take, only the first does: their last bits may differ, where each rank rounds its
    own sums."""
    prefill, decode = (here, there) if is_prefill else (there, here)
    return prefill.copy % spacing(prefill, decode) == 0


def spacing(prefill: Planes, decode: Planes) -> int:
    """Of prefill's ranks, one in so many moves its heads of this kind, from rank 0 on."""
    return max(1, prefill.copies // decode.copies)


def plane_key(layer: str, *number: int) -> int:
    """Identifies a plane of a layer in every process: the layer's name, and which of its planes it is."""
    return int.from_bytes(hashlib.blake2b(repr((layer, number)).encode(), digest_size=8).digest(), "little") >> 1


def shared_planes(here: Planes, there: Planes) -> list[tuple[int, int]]:
    """Returns (place here, place there) of the planes that both ranks have: all, or those of a pipeline stage. In the
    order of their keys, which is the same on both sides."""
    places = dict(zip(there.keys, itertools.count(), strict=False))
    return [(place, places[key]) for key, place in sorted(zip(here.keys, itertools.count())) if key in places]


def named_planes(groups: Sequence[GroupMemory]) -> frozenset[tuple[int, int, int]]:
    """Returns (KV-cache group, kind, key) of each plane."""
    return frozenset(
        (place, kind, key)
        for place, group in enumerate(groups)
        for kind, planes in enumerate(group.planes)
        for key in planes.keys
    )
