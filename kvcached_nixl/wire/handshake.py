# SPDX-License-Identifier: Apache-2.0
"""What two engines must agree on before bytes move.

Protocol history (one line per change of meaning; the number is part of the tag):

    1: kvcached geometry: blocks narrowed to the planned ones, contiguous or non-contiguous, equal splits on both sides.
    2: the tag names who moves the bytes, pull or push; push offers `PushHandshake` in place of vLLM's own metadata.
    3: pull: each rank keeps a word per request for decode to look at (`lease_word`), in front of the agent's metadata.
"""

from __future__ import annotations

import msgspec

from kvcached_nixl.ids import EngineId
from kvcached_nixl.wire.planes import Planes

PROTOCOL = 3
_NAME = "kvcached_nixl"


class _Tag(msgspec.Struct, frozen=True):
    def sign(self, stock_hash: str) -> str:
        """The compatibility string to offer: this tag, then the connector's own hash."""
        return f"{self} {stock_hash}"


class PeerTag(_Tag, frozen=True):
    """Everything in which two engines must be equal to pull.

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
            f"{_NAME}/{PROTOCOL} pull [{self.arrangement}; {self.memory_order} {blocks} {self.kv_cache_dtype}; "
            f"{self.block_size} tokens a block; {len(self.region_block_bytes)} regions of "
            f"{'/'.join(map(str, lengths))} bytes a block; tensor parallel {self.tp_size}]"
        )


class PushTag(_Tag, frozen=True):
    """The same for push, which finds its way between unequal blocks and shares of the heads.

    Attributes:
        num_planes: as in `Planes`; the layers, twice where K and V lie apart.
        cell_bytes: one token of one head.
        kv_cache_dtype: element type of the cache.
    """

    num_planes: int
    cell_bytes: int
    kv_cache_dtype: str

    def __str__(self) -> str:
        return (
            f"{_NAME}/{PROTOCOL} push [{self.kv_cache_dtype}; {self.num_planes} planes of cells of "
            f"{self.cell_bytes} bytes]"
        )


class PushHandshake(msgspec.Struct, frozen=True):
    """What a rank tells one that wants to push to it, or to be pushed to.

    Attributes:
        agent_metadata: NIXL's own.
        device_id: as NIXL counts devices.
    """

    engine_id: EngineId
    tp_size: int
    tp_rank: int
    agent_metadata: bytes
    device_id: int
    planes: Planes


def is_tagged(compatibility: str) -> bool:
    """Whether a peer's compatibility string was signed by this package, in any protocol."""
    return compatibility.startswith(f"{_NAME}/")
