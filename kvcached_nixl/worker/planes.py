# SPDX-License-Identifier: Apache-2.0
"""From the tensors attention uses to the planes that a push writes. Once per process, read off the strides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.worker.descriptors import Planes

__all__ = ["Axes", "planes_of"]


@dataclass(frozen=True)
class Axes:
    """Which dimension of a backend's KV cache shape counts what.

    Attributes:
        kv: the dimension of size 2 that separates K from V; None where they are packed, or there is no V.
        head: None for a latent, which all heads share.
    """

    block: int
    token: int
    head: int | None
    kv: int | None

    @classmethod
    def from_probe(cls, shape: Sequence[int], *, num_blocks: int, block_size: int, num_heads: int) -> Axes:
        """Read a shape that a backend answered for three numbers that no other dimension can have.

        Raises:
            LayoutRefused: blocks or tokens cannot be found, or what is left is neither K and V nor one cell.
        """
        left = dict(enumerate(shape))
        found: list[int | None] = []
        for number in (num_blocks, block_size, num_heads):
            places = [place for place, size in left.items() if size == number]
            found.append(places[0] if len(places) == 1 else None)
            for place in places[:1]:
                del left[place]
        block, token, head = found
        # The last dimension is the cell's own.
        left.pop(len(shape) - 1, None)
        kv = next(iter(left), None)
        if block is None or token is None or len(left) > 1 or (kv is not None and (left[kv] != 2 or head is None)):
            raise LayoutRefused(
                found=f"an attention backend with the KV cache shape {tuple(shape)} for {num_blocks} blocks of "
                f"{block_size} tokens and {num_heads} heads",
                expected="one dimension for each of these, one for K and V where they lie apart, and the head's own",
                consequence="Tokens or heads cannot be told apart, so no push would be right; the engine stops.",
                remedy='Choose another attention backend (--attention-backend), or "transfer_mode": "pull".',
            )
        return cls(block=block, token=token, head=head, kv=kv)


def planes_of(caches: Mapping[str, torch.Tensor], axes: Axes, *, first_head: int) -> Planes:
    """Describe the tensors of all layers.

    Args:
        caches: layer name -> the tensor attention uses, narrowed to the planned blocks; layers in the model's order.
            Layers of several KV-cache groups that share memory make one plane.
        first_head: the model's number of the first KV head on this rank; 0 for a latent.

    Raises:
        LayoutRefused: a cell has holes, or the layers differ in anything but their place.
    """
    bases: dict[int, None] = {}
    kinds: dict[Planes, str] = {}
    for layer, cache in caches.items():
        element = cache.element_size()
        cell_bytes = cache.shape[-1] * element
        kind = Planes(
            bases=(),
            block_stride_bytes=cache.stride(axes.block) * element,
            token_stride_bytes=cache.stride(axes.token) * element,
            head_stride_bytes=cell_bytes if axes.head is None else cache.stride(axes.head) * element,
            cell_bytes=cell_bytes,
            num_blocks=cache.shape[axes.block],
            block_size=cache.shape[axes.token],
            num_heads=1 if axes.head is None else cache.shape[axes.head],
            first_head=first_head,
        )
        kinds.setdefault(kind, layer)
        if cache.stride(-1) != 1 or len(kinds) > 1:
            raise LayoutRefused(
                found=f"layer {layer!r}: shape {tuple(cache.shape)}, strides {tuple(cache.stride())}, {cache.dtype}",
                expected=f"elements of a head side by side, and every layer as {next(iter(kinds.values()))!r} is",
                consequence="A push would write other bytes than those of the token; the engine stops.",
                remedy='Use "transfer_mode": "pull" for this model.',
            )
        for half in (cache,) if axes.kv is None else cache.unbind(axes.kv):
            bases[half.data_ptr()] = None
    return dataclasses.replace(next(iter(kinds)), bases=tuple(bases))
