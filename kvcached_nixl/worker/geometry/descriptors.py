# SPDX-License-Identifier: Apache-2.0
"""Maps tokens of a request to the byte ranges that hold them, on both sides. numpy only.

The KV of a layer is cut into planes (K, V, K and V packed, or the latent). A plane holds one *cell* for each token and
head, and a cell lies at::

    base + block * block_stride + token_in_block * token_stride + head * head_stride

which covers token-major (NHD) and head-major (HND) memory, separate and interleaved layers, any block size and any
share of the heads. A transfer pairs the cells of equal tokens and heads. Cells that are contiguous on both sides become
one descriptor: equal geometries need one descriptor per run of blocks, unequal ones at most one per cell.

The runs inside a block do not depend on the request and are computed once per peer (`Route`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kvcached_nixl.ids import KernelBlock
from kvcached_nixl.transport.agent import Ranges
from kvcached_nixl.wire.messages import KernelBlockRange
from kvcached_nixl.wire.planes import Planes, shared_planes

Int64Array: TypeAlias = npt.NDArray[np.int64]

MAX_RUN_BYTES = 8 << 20
"""Longest descriptor. A transfer has at least one, and transfers can be posted, awaited and dropped as a whole only."""


@dataclass(frozen=True)
class Descriptors:
    """Byte ranges that correspond one to one: (n, 2) arrays of address and length, int64, equal lengths."""

    local: Ranges
    remote: Ranges

    @classmethod
    def none(cls) -> Descriptors:
        nothing = np.empty((0, 2), np.int64)
        return cls(nothing, nothing)


def split(blocks: Sequence[int], number: int) -> tuple[KernelBlock, ...]:
    """Returns the kernel blocks of these blocks, each of which is split into ``number``."""
    if number == 1:
        return cast("tuple[KernelBlock, ...]", tuple(blocks))
    return tuple((np.asarray(blocks, np.int64)[:, None] * number + np.arange(number)).reshape(-1).tolist())


def misfit(local: Sequence[Planes], remote: Sequence[Planes]) -> str:
    """Returns why two ranks cannot exchange KV; "" if they can."""
    if len(local) != len(remote):
        return f"{len(remote)} kinds of planes; expected {len(local)}"
    for here, there in zip(local, remote, strict=True):
        num_shared = len(shared_planes(here, there))
        if here.cell_bytes != there.cell_bytes or num_shared < min(len(here.bases), len(there.bases)):
            return (
                f"{len(there.bases)} planes of cells of {there.cell_bytes} bytes, {num_shared} of them as here; "
                f"expected {len(here.bases)} of {here.cell_bytes}: the same model and data type"
            )
        if max(here.block_size, there.block_size) % min(here.block_size, there.block_size):
            return f"blocks of {there.block_size} tokens; expected a multiple or a divisor of {here.block_size}"
        if max(here.first_head, there.first_head) >= min(here.last_head, there.last_head):
            return (
                f"the heads {there.first_head} to {there.last_head}; expected some of {here.first_head} to "
                f"{here.last_head}"
            )
    return ""


class Route:
    """Maps local planes of one kind to remote ones. Raises `ValueError`: they do not fit (`misfit`)."""

    def __init__(self, local: Planes, remote: Planes) -> None:
        reason = misfit((local,), (remote,))
        if reason:
            raise ValueError(reason)
        self._local, self._remote = local, remote
        # The largest run of tokens that is inside one block on either side.
        self.step = math.gcd(local.block_size, remote.block_size)
        first_head = max(local.first_head, remote.first_head)
        heads = min(local.last_head, remote.last_head) - first_head
        within_local, within_remote, run_bytes = _within_step(local, remote, self.step, heads)
        sides = []
        shared = np.asarray(shared_planes(local, remote))
        for planes, places, within in ((local, shared[:, 0], within_local), (remote, shared[:, 1], within_remote)):
            skipped = (first_head - planes.first_head) * planes.head_stride_bytes
            addresses = np.asarray(planes.bases, dtype=np.int64)[places, None] + skipped + within
            sides.append(addresses.reshape(-1))
        order = np.argsort(sides[0], kind="stable")
        here, there = sides[0][order], sides[1][order]
        begins, lengths = _runs(here, there, np.full(len(here), run_bytes))
        self._here, self._there, self._lengths = here[begins], there[begins], lengths

    def descriptors(
        self, local_blocks: KernelBlockRange, remote_blocks: KernelBlockRange, first_token: int, end_token: int
    ) -> Descriptors:
        """Returns descriptors for the tokens ``first_token <= token < end_token`` and the heads that both sides hold.

        If ``end_token`` is inside a block on both sides, the rest of the smaller block is moved as well. Raises
        `ValueError`: not all tokens are in both sides' blocks, or a block id is out of range.
        """
        if first_token % self.step or not 0 <= first_token < end_token:
            raise ValueError(
                f"found tokens {first_token} to {end_token}; expected a range that starts at a block boundary"
            )
        starts = np.arange(first_token, end_token, self.step, dtype=np.int64)
        here = _block_offsets(self._local, local_blocks, starts)
        there = _block_offsets(self._remote, remote_blocks, starts)
        order = np.argsort(here, kind="stable")
        local = (self._here[:, None] + here[order][None, :]).reshape(-1)
        remote = (self._there[:, None] + there[order][None, :]).reshape(-1)
        lengths = np.repeat(self._lengths, len(starts))
        begins, lengths = _runs(local, remote, lengths)
        return _limited(local[begins], remote[begins], lengths)


def _within_step(local: Planes, remote: Planes, step: int, heads: int) -> tuple[Int64Array, Int64Array, int]:
    """Returns the offsets, inside one step, of the longest runs of cells that are contiguous on both sides; and their
    length in bytes."""
    sides = (local, remote)
    tokens, count, run = step, heads, local.cell_bytes
    if local.padded_bytes == remote.padded_bytes:
        # Moved with its padding, a block of all layers is one run.
        run = max(run, local.padded_bytes)
    # Fold the inner dimension into the run, then the outer one if it follows without a gap as well.
    if all(side.head_stride_bytes == run for side in sides):
        run, count = run * heads, 1
        if all(side.token_stride_bytes == run for side in sides):
            run, tokens = run * step, 1
    elif all(side.token_stride_bytes == run for side in sides):
        run, tokens = run * step, 1
        if all(side.head_stride_bytes == run for side in sides):
            run, count = run * heads, 1
    token, head = (axis.reshape(-1) for axis in np.indices((tokens, count), dtype=np.int64))
    found = [token * side.token_stride_bytes + head * side.head_stride_bytes for side in sides]
    return found[0], found[1], run


def _block_offsets(planes: Planes, blocks: KernelBlockRange, starts: Int64Array) -> Int64Array:
    """Returns the offset in bytes of each token of ``starts`` from a plane's base."""
    ids = np.asarray(blocks.block_ids, dtype=np.int64)
    relative = starts - blocks.first_token
    places = relative // planes.block_size
    if len(ids) == 0 or relative[0] < 0 or places[-1] >= len(ids):
        raise ValueError(
            f"found {len(ids)} blocks of {planes.block_size} tokens from token {blocks.first_token} on; expected them "
            f"to hold the tokens {starts[0]} to {starts[-1]}"
        )
    used = ids[places]
    if used.min() < 0 or used.max() >= planes.num_blocks:
        raise ValueError(f"found the block ids {used.min()} to {used.max()}; expected 0 to {planes.num_blocks - 1}")
    in_block: Int64Array = relative % planes.block_size
    return used * planes.block_stride_bytes + in_block * planes.token_stride_bytes


def _runs(local: Int64Array, remote: Int64Array, lengths: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Join ranges that are contiguous on both sides; returns each run's first index, and its length in bytes."""
    follows = (local[1:] == local[:-1] + lengths[:-1]) & (remote[1:] == remote[:-1] + lengths[:-1])
    begins = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return begins, np.add.reduceat(lengths, begins)


def _limited(local: Int64Array, remote: Int64Array, lengths: Int64Array) -> Descriptors:
    """Cut runs that are longer than MAX_RUN_BYTES."""
    parts = -(-lengths // MAX_RUN_BYTES)
    if (parts > 1).any():
        part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        local, remote, lengths = (np.repeat(one, parts) for one in (local, remote, lengths))
        offset = part * MAX_RUN_BYTES
        local, remote, lengths = local + offset, remote + offset, np.minimum(lengths - offset, MAX_RUN_BYTES)
    return Descriptors(np.stack((local, lengths), axis=1), np.stack((remote, lengths), axis=1))
