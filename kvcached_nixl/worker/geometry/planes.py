# SPDX-License-Identifier: Apache-2.0
"""Describes the tensors of a KV-cache group as planes, from their strides. Once per process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.wire.planes import GroupMemory, HeadShare, Planes
from kvcached_nixl.worker.geometry.layout import Axes, Layout
from kvcached_nixl.worker.geometry.states import part_planes, state_planes

__all__ = ["group_memory", "layers_digest", "planes_of"]


def group_memory(
    layout: Layout, layers: Collection[str], kernel_blocks_per_block: int, share_of: Callable[[int], HeadShare]
) -> GroupMemory:
    """Describe a KV-cache group.

    Args:
        layers: names of its layers.
        kernel_blocks_per_block: kernel blocks in one of its logical blocks.
        share_of: number of KV heads that a layer has on this rank -> which of the model's heads they are; 0 stands for
            layers that keep a state.

    Raises:
        LayoutRefused: as `planes_of`.
    """
    views = _views(layout, layers)
    if all(layer in layout.state_bytes for layer in views):
        whole = state_planes(views, layout.state_bytes, share_of(0).first_head)
        return GroupMemory(whole, parts=part_planes(views, layout.state_parts))
    return GroupMemory(planes_of(views, layout.axes, share_of), kernel_blocks_per_block)


def layers_digest(layout: Layout, layers_of_groups: Sequence[Collection[str]]) -> str:
    """Returns a digest of which layers are in which group, in which order, with which cells.

    Planes are matched by their position. Two engines may have the same planes of other layers, e.g. if they keep
    different layers in another data type (``--kv-cache-dtype-skip-layers``).
    """
    found = hashlib.blake2b(digest_size=8)
    for layers in layers_of_groups:
        states = layout.state_bytes
        # A state's bytes depend on the tensor-parallel size.
        cells = [(layer, layer in states or _cell_bytes(view)) for layer, view in _views(layout, layers).items()]
        found.update(repr(cells).encode())
    return found.hexdigest()


def planes_of(
    caches: Mapping[str, torch.Tensor], axes: Axes, share_of: Callable[[int], HeadShare]
) -> tuple[Planes, ...]:
    """Describe the tensors of a group's layers; returns one entry for each kind of layer.

    Args:
        caches: layer name -> the tensor attention uses, narrowed to the planned blocks; layers in the model's order.
            Layers that share memory make one plane.
        share_of: as in `group_memory`.

    Raises:
        LayoutRefused: a cell has gaps, or layers that share memory differ.
    """
    kinds: dict[tuple[tuple[str, int], ...], dict[int, None]] = {}
    kind_at: dict[int, tuple[tuple[str, int], ...]] = {}
    for layer, cache in caches.items():
        kind = tuple(_kind(cache, axes, share_of).items())
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


def _kind(cache: torch.Tensor, axes: Axes, share_of: Callable[[int], HeadShare]) -> dict[str, Any]:
    element, cell_bytes = cache.element_size(), _cell_bytes(cache)
    num_heads = 1 if axes.head is None else cache.shape[axes.head]
    return {
        "block_stride_bytes": cache.stride(0) * element,
        "token_stride_bytes": cache.stride(axes.token) * element,
        "head_stride_bytes": cell_bytes if axes.head is None else cache.stride(axes.head) * element,
        "cell_bytes": cell_bytes,
        "num_blocks": cache.shape[0],
        "block_size": cache.shape[axes.token],
        "num_heads": num_heads,
        **share_of(num_heads)._asdict(),
    }


def _views(layout: Layout, layers: Collection[str]) -> dict[str, torch.Tensor]:
    """Returns the tensors of these layers, in the order in which both sides list their planes."""
    return {layer: view for layer, view in layout.device_views.items() if layer in layers}


def _cell_bytes(cache: torch.Tensor) -> int:
    return int(cache.shape[-1] * cache.element_size())
