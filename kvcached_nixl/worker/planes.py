# SPDX-License-Identifier: Apache-2.0
"""From the tensors attention uses to the planes that a push writes. Once per process, read off the strides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.worker.axes import Axes

__all__ = ["planes_of"]


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
