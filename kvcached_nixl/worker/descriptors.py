# SPDX-License-Identifier: Apache-2.0
"""From tokens of a request to the byte ranges that carry them, on both sides. Once per transfer, numpy only.

The KV of a layer is cut into planes (K, V, K and V packed, or the latent). A plane holds one *cell* for each token and
head, and a cell lies at::

    base + block * block_stride + token_in_block * token_stride + head * head_stride

which covers token-major (NHD) and head-major (HND) memory, layers apart and layers side by side, any block size and any
share of the heads. A transfer pairs the cells of equal tokens and heads; cells that lie end to end on both sides become
one descriptor, so equal geometries need a descriptor a run of blocks and unequal ones no more than one a cell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcached_nixl.transport.base import Ranges
from kvcached_nixl.wire.planes import Planes

Int64Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Descriptors:
    """Byte ranges that correspond one to one: (n, 2) arrays of address and length, int64, equal lengths."""

    local: Ranges
    remote: Ranges

    @property
    def total_bytes(self) -> int:
        return int(self.local[:, 1].sum())


@dataclass(frozen=True)
class Blocks:
    """A request's blocks on one side: ``ids[i]`` holds the tokens from ``first_token + i * block_size`` on."""

    ids: Sequence[int]
    first_token: int = 0


def pair(
    local: Planes, remote: Planes, local_blocks: Blocks, remote_blocks: Blocks, first_token: int, end_token: int
) -> Descriptors:
    """Descriptors for the tokens ``first_token <= token < end_token`` and the heads that both sides hold.

    Where ``end_token`` lies inside a block on both sides, the rest of the smaller block comes along.

    Raises:
        ValueError: the planes differ in number or cell size, no head is common, the tokens are not all in both sides'
            blocks, or a block id is out of range. Nothing can be transferred safely then.
    """
    step = math.gcd(local.block_size, remote.block_size)
    if len(local.bases) != len(remote.bases) or local.cell_bytes != remote.cell_bytes:
        raise ValueError(
            f"found {len(local.bases)} planes with cells of {local.cell_bytes} bytes here and {len(remote.bases)} with "
            f"{remote.cell_bytes} there; expected the same model and data type"
        )
    first_head, last_head = max(local.first_head, remote.first_head), min(local.last_head, remote.last_head)
    if first_head >= last_head:
        raise ValueError(
            f"found heads {local.first_head} to {local.last_head} here and {remote.first_head} to {remote.last_head} "
            "there; expected some in common"
        )
    if first_token % step or not 0 <= first_token < end_token:
        raise ValueError(f"found tokens {first_token} to {end_token}; expected a range that starts at a block boundary")
    # A step is the largest run of tokens that is inside one block on either side.
    starts = np.arange(first_token, end_token, step, dtype=np.int64)
    heads = last_head - first_head
    within_local, within_remote, run_bytes = _within_step(local, remote, step, heads)
    sides = []
    for planes, blocks, within in ((local, local_blocks, within_local), (remote, remote_blocks, within_remote)):
        offsets = _block_offsets(planes, blocks, starts) + (first_head - planes.first_head) * planes.head_stride_bytes
        addresses = np.asarray(planes.bases, dtype=np.int64)[:, None, None] + offsets[None, :, None] + within
        sides.append(addresses.reshape(-1))
    return _coalesce(sides[0], sides[1], run_bytes)


def _within_step(local: Planes, remote: Planes, step: int, heads: int) -> tuple[Int64Array, Int64Array, int]:
    """Offsets, inside one step, of the longest runs of cells that lie end to end on both sides; and their length."""
    sides = (local, remote)
    tokens, count, run = step, heads, local.cell_bytes
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


def _block_offsets(planes: Planes, blocks: Blocks, starts: Int64Array) -> Int64Array:
    """Bytes from a plane's base to each token of ``starts``."""
    ids = np.asarray(blocks.ids, dtype=np.int64)
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


def _coalesce(local: Int64Array, remote: Int64Array, run_bytes: int) -> Descriptors:
    """Join runs that follow each other on both sides."""
    order = np.argsort(local, kind="stable")
    local, remote = local[order], remote[order]
    breaks = np.flatnonzero((np.diff(local) != run_bytes) | (np.diff(remote) != run_bytes)) + 1
    begins = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((begins, [len(local)]))) * run_bytes
    return Descriptors(
        local=np.stack((local[begins], lengths), axis=1), remote=np.stack((remote[begins], lengths), axis=1)
    )
