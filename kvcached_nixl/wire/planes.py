# SPDX-License-Identifier: Apache-2.0
"""Where a rank keeps its KV, as one rank tells it to another."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Planes"]


@dataclass(frozen=True)
class Planes:
    """Where one rank keeps the cells of its share of the heads.

    Attributes:
        bases: address of the first cell of each plane, in the same plane order on both sides of a transfer.
        block_stride_bytes, token_stride_bytes, head_stride_bytes: distance between two blocks, tokens, heads.
        cell_bytes: bytes of one token of one head.
        num_blocks: blocks in every plane.
        block_size: tokens in a block.
        num_heads: heads this rank holds.
        first_head: the model's number of the first of them.
    """

    bases: tuple[int, ...]
    block_stride_bytes: int
    token_stride_bytes: int
    head_stride_bytes: int
    cell_bytes: int
    num_blocks: int
    block_size: int
    num_heads: int
    first_head: int = 0

    @property
    def last_head(self) -> int:
        """One past the last head."""
        return self.first_head + self.num_heads
