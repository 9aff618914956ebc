# SPDX-License-Identifier: Apache-2.0
"""What two engines must agree on before bytes move.

Protocol history (one line per change of meaning; the number is part of the tag):

    1: kvcached geometry: blocks narrowed to the planned ones, contiguous or non-contiguous, equal splits on both sides.
"""

from __future__ import annotations

import msgspec

PROTOCOL = 1
_NAME = "kvcached_nixl"


class PeerTag(msgspec.Struct, frozen=True):
    """Everything in which two engines must be equal for this protocol.

    It travels in front of the connector's own compatibility hash, so the stock comparison refuses a peer that
    differs and its message shows both tags in words. A stock peer has no tag and never compares equal.

    Attributes:
        arrangement: how kvcached laid the blocks out.
        memory_order: the connector's word for it, ``NHD`` or ``HND``.
        block_order: (dimension, size) of one layer's block in memory order, outermost first.
        block_size: tokens in a block of the attention kernel.
        region_block_bytes: bytes of a block in each region, in descriptor order.
        tp_size: tensor-parallel ranks that share the heads.
        kv_cache_dtype: element type of the cache.
    """

    arrangement: str
    memory_order: str
    block_order: tuple[tuple[int, int], ...]
    block_size: int
    region_block_bytes: tuple[int, ...]
    tp_size: int
    kv_cache_dtype: str

    def __str__(self) -> str:
        lengths = sorted(set(self.region_block_bytes))
        blocks = "x".join(f"{size}@{dimension}" for dimension, size in self.block_order)
        return (
            f"{_NAME}/{PROTOCOL} [{self.arrangement}; {self.memory_order} {blocks} {self.kv_cache_dtype}; "
            f"{self.block_size} tokens a block; {len(self.region_block_bytes)} regions of "
            f"{'/'.join(map(str, lengths))} bytes a block; tensor parallel {self.tp_size}]"
        )

    def sign(self, stock_hash: str) -> str:
        """The compatibility string to offer: this tag, then the connector's own hash."""
        return f"{self} {stock_hash}"


def is_tagged(compatibility: str) -> bool:
    """Whether a peer's compatibility string was signed by this package, in any protocol."""
    return compatibility.startswith(f"{_NAME}/")
