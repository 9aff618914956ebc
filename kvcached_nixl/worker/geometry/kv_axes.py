# SPDX-License-Identifier: Apache-2.0
"""Finds which dimension of an attention backend's KV cache is tokens, heads, and K/V. Once per process.

The first one is blocks. K and V are packed, but in a few backends that vLLM 0.26 to 0.28 have: (N, 2, bs, H, D).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcached_nixl.errors import LayoutRefused

__all__ = ["Axes"]


@dataclass(frozen=True)
class Axes:
    """The meaning of each dimension of a backend's KV cache shape, by index.

    Attributes:
        kv: the dimension of size 2 that separates K from V; None where they are packed, or there is no V.
        head: None for a latent, which all heads share.
        ndim: number of dimensions of one layer's cache.
    """

    token: int
    head: int | None
    kv: int | None
    ndim: int

    @classmethod
    def from_probe(cls, shape: Sequence[int], *, num_blocks: int, block_size: int, num_heads: int) -> Axes:
        """Read the axes from the shape that a backend returned for three sizes that no other dimension can have.

        Raises:
            LayoutRefused: blocks do not come first, tokens are not found, or a dimension is left that is not K/V.
        """
        left = dict(enumerate(shape))
        found: list[int | None] = []
        for number in (num_blocks, block_size, num_heads):
            places = [place for place, size in left.items() if size == number]
            found.append(places[0] if len(places) == 1 else None)
            for place in places[:1]:
                del left[place]
        block, token, head = found
        # The last dimension is the elements of a cell; one of size 1 has no meaning.
        left.pop(len(shape) - 1, None)
        left = {place: size for place, size in left.items() if size != 1}
        kv = next(iter(left), None)
        if block != 0 or token is None or len(left) > 1 or (kv is not None and (left[kv] != 2 or head is None)):
            raise LayoutRefused(
                found=f"an attention backend with the KV cache shape {tuple(shape)} for {num_blocks} blocks of "
                f"{block_size} tokens and {num_heads} heads",
                expected="blocks first, one dimension each for tokens, heads, and K/V if they are separate, and the "
                "head size last",
                consequence="Blocks, K and V, tokens or heads cannot be told apart, so no transfer would be right; the "
                "engine stops.",
                remedy="Choose another attention backend (--attention-backend), or run without ENABLE_KVCACHED.",
            )
        return cls(token=token, head=head, kv=kv, ndim=len(shape))
