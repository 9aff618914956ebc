# SPDX-License-Identifier: Apache-2.0
"""Describes the tensors that attention uses as planes, from their strides. Once per process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.worker.geometry.kv_axes import Axes

__all__ = ["planes_of"]


def planes_of(caches: Mapping[str, torch.Tensor], axes: Axes, *, first_head: int) -> tuple[Planes, ...]:
    """Describe the tensors of all layers; returns one entry for each kind of layer.

    Args:
        caches: layer name -> the tensor attention uses, narrowed to the planned blocks; layers in the model's order.
            Layers of several KV-cache groups that share memory make one plane.
        first_head: index, in the whole model, of the first KV head on this rank; 0 for a latent.

    Raises:
        LayoutRefused: a cell has gaps, or layers that share memory differ in anything but their group.
    """
    kinds: dict[tuple[tuple[str, int], ...], dict[int, None]] = {}
    kind_at: dict[int, tuple[tuple[str, int], ...]] = {}
    for layer, cache in caches.items():
        kind = tuple(_kind(cache, axes, first_head).items())
        for half in (cache,) if axes.kv is None else cache.unbind(axes.kv):
            if cache.stride(-1) != 1 or kind_at.setdefault(half.data_ptr(), kind) != kind:
                raise LayoutRefused(
                    found=f"layer {layer!r}: shape {tuple(cache.shape)}, strides {cache.stride()}, {cache.dtype}",
                    expected="contiguous elements of a head, and layers in the same memory to be of one kind",
                    consequence="A transfer would move other bytes than those of the token; the engine stops.",
                    remedy="Serve this model without ENABLE_KVCACHED, or without a KV connector.",
                )
            kinds.setdefault(kind, {})[half.data_ptr()] = None
    return tuple(Planes(bases=tuple(bases), **dict(kind)) for kind, bases in kinds.items())


def _kind(cache: torch.Tensor, axes: Axes, first_head: int) -> dict[str, Any]:
    element = cache.element_size()
    cell_bytes = cache.shape[-1] * element
    return {
        "block_stride_bytes": cache.stride(axes.block) * element,
        "token_stride_bytes": cache.stride(axes.token) * element,
        "head_stride_bytes": cell_bytes if axes.head is None else cache.stride(axes.head) * element,
        "cell_bytes": cell_bytes,
        "num_blocks": cache.shape[axes.block],
        "block_size": cache.shape[axes.token],
        "num_heads": 1 if axes.head is None else cache.shape[axes.head],
        "first_head": first_head,
    }
