# SPDX-License-Identifier: Apache-2.0
"""From kvcached's tensors to the regions NIXL transfers. Once per process, byte arithmetic only.

kvcached reserves far more addresses than vLLM plans to use, and a block id is always below
``kv_cache_config.num_blocks``, so every view is narrowed to the planned blocks before anything is
registered: registration, descriptors and handshakes cost what vLLM planned, whatever was reserved.

A region is one address range cut into equal blocks that lie end to end::

    region -> block -> descriptor        descriptor index = region * num_blocks + block

Memory that kvcached 0.1.6 hands out (L pools, ``page`` = bytes of one block in one layer)::

    split-half       K: [n, page/2] ... V: [n, page/2]   two regions a layer
    dense            [n, page]                           one region a layer (packed K/V, multi-latent)
    contiguous       [n, L, page]                        one region in all: one descriptor a block

The kind is read off the strides and never assumed: a stride that fits none of them is refused, because a
transfer would land between blocks and nothing would report it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.worker.axes import Axes

BlockOrder: TypeAlias = tuple[tuple[int, int], ...]


class Arrangement(enum.Enum):
    """How the blocks of one KV cache lie in kvcached's memory."""

    SPLIT_HALF = "non-contiguous, K and V apart"
    DENSE = "non-contiguous"
    CONTIGUOUS = "contiguous"


@dataclass(frozen=True)
class Region:
    """One range of equal blocks that lie end to end.

    Attributes:
        address: first byte of block 0.
        block_bytes: bytes of a block, and the distance between two blocks.
    """

    address: int
    block_bytes: int


@dataclass(frozen=True)
class RegisteredLayout:
    """What is offered to the stock ``register_kv_caches``, and what must come of it.

    Attributes:
        arrangement: how kvcached laid the blocks out.
        axes: what the dimensions of ``device_views`` count.
        num_blocks: blocks in every region, at the granularity of the attention kernel.
        offered: layer name -> view to register. K/V-first ``(2, n, ...)`` for SPLIT_HALF, ``(n, ...)`` for
            DENSE; for CONTIGUOUS one entry, ``(n, L, ...)``, under the first layer's name.
        device_views: layer name -> the view attention uses, narrowed to ``num_blocks``.
        regions: the regions in descriptor order.
        transposed: the backend keeps blocks first while K and V lie apart; the connector must be told K/V first.
        block_order: (dimension, size) of one layer's block in memory order, outermost first; equal on both sides
            of a transfer. Sizes alone would not tell token-major from head-major where both counts are equal.
    """

    arrangement: Arrangement
    axes: Axes
    num_blocks: int
    offered: dict[str, torch.Tensor]
    device_views: dict[str, torch.Tensor]
    regions: tuple[Region, ...]
    transposed: bool
    block_order: BlockOrder

    @property
    def descriptors_per_block(self) -> int:
        """Descriptors NIXL moves for one block of all layers."""
        return len(self.regions)


def _refuse(layer: str, cache: torch.Tensor, expected: str) -> LayoutRefused:
    return LayoutRefused(
        found=f"layer {layer!r}: shape {tuple(cache.shape)}, strides {tuple(cache.stride())}, {cache.dtype}",
        expected=expected,
        consequence="NIXL addresses bytes, not tensors: it would move wrong ones without an error; the engine stops",
        remedy="report this layout, or run this model without ENABLE_KVCACHED",
    )


def _memory_order(block: torch.Tensor) -> BlockOrder | None:
    """(dimension, size) from the outermost in memory to the innermost; None if the block has holes."""
    dims = [dim for dim, size in enumerate(block.shape) if size != 1]
    dims.sort(key=block.stride, reverse=True)
    span = 1
    for dim in reversed(dims):
        if block.stride(dim) != span:
            return None
        span *= block.shape[dim]
    return tuple((dim, block.shape[dim]) for dim in dims)


def _arrangement(
    layer: str, cache: torch.Tensor, axes: Axes, page_bytes: int, num_pools: int
) -> tuple[Arrangement, BlockOrder]:
    stride_bytes = cache.stride(axes.block) * cache.element_size()
    block = cache.select(axes.block, 0)
    if axes.kv is not None and stride_bytes == page_bytes // 2:
        half = block.select(0, 0)
        order = _memory_order(half)
        if order is not None and half.numel() * half.element_size() * 2 == page_bytes:
            return Arrangement.SPLIT_HALF, order
    order = _memory_order(block)
    if order is not None and block.numel() * block.element_size() == page_bytes:
        if stride_bytes == page_bytes and axes.kv != 0:
            return Arrangement.DENSE, order
        if stride_bytes == page_bytes * num_pools:
            return Arrangement.CONTIGUOUS, order
    raise _refuse(
        layer,
        cache,
        f"blocks of {page_bytes} bytes that lie {page_bytes // 2} (K and V apart), {page_bytes} (one layer) or "
        f"{page_bytes * num_pools} (all {num_pools} pools of layers) bytes apart; found {stride_bytes}",
    )


def plan_registration(
    kv_caches: Mapping[str, torch.Tensor],
    *,
    axes: Axes,
    page_bytes: Mapping[str, int],
    num_blocks: int,
    num_pools: int,
) -> RegisteredLayout:
    """Narrow kvcached's tensors to the planned blocks and say which regions they make.

    Args:
        kv_caches: layer name -> the tensor attention uses, as the model runner registers it.
        axes: where the backend keeps blocks and K/V.
        page_bytes: layer name -> bytes of K and V of one block (kernel granularity) in that layer. Layers that
            share another layer's cache may be missing; they add no region.
        num_blocks: blocks vLLM planned, kernel granularity; at most the blocks of every tensor.
        num_pools: pools of layers kvcached interleaves in its contiguous layout
            (``len(kv_cache_config.kv_cache_tensors)``).

    Raises:
        LayoutRefused: a tensor has holes, an unknown stride, too few blocks, or differs from the others.
    """
    owned = {layer: cache for layer, cache in kv_caches.items() if layer in page_bytes}
    if not owned:
        raise LayoutRefused(
            found="no layer with a KV cache of its own",
            expected="at least one attention layer",
            consequence="there is nothing to transfer; the engine stops",
            remedy="run this model without a KV connector",
        )
    kinds: dict[Arrangement, str] = {}
    orders: dict[str, BlockOrder] = {}
    for layer, cache in owned.items():
        if cache.dim() != axes.ndim or cache.shape[axes.block] < num_blocks:
            raise _refuse(
                layer, cache, f"{axes.ndim} dimensions and at least {num_blocks} blocks in dimension {axes.block}"
            )
        kind, orders[layer] = _arrangement(layer, cache, axes, page_bytes[layer], num_pools)
        kinds.setdefault(kind, layer)
    if len(kinds) > 1:
        mixed = ", ".join(f"{layer!r} {kind.value}" for kind, layer in kinds.items())
        layer = next(iter(owned))
        raise _refuse(layer, owned[layer], f"one arrangement for all layers; found {mixed}")

    arrangement = next(iter(kinds))
    device_views = {layer: cache.narrow(axes.block, 0, num_blocks) for layer, cache in kv_caches.items()}
    first = next(iter(owned))
    transposed = False
    offered: dict[str, torch.Tensor]
    regions: tuple[Region, ...]
    if arrangement is Arrangement.CONTIGUOUS:
        offered = {first: _across_layers(owned, axes, page_bytes, num_blocks, num_pools)}
        regions = (Region(offered[first].data_ptr(), page_bytes[first] * num_pools),)
    elif arrangement is Arrangement.DENSE:
        offered = {layer: device_views[layer] for layer in owned}
        regions = _distinct(Region(view.data_ptr(), page_bytes[layer]) for layer, view in offered.items())
    else:
        transposed = axes.kv == 1
        offered = {layer: device_views[layer].transpose(0, 1) if transposed else device_views[layer] for layer in owned}
        regions = _distinct(
            Region(half.data_ptr(), page_bytes[layer] // 2) for layer, view in offered.items() for half in view
        )
    return RegisteredLayout(
        arrangement=arrangement,
        axes=axes,
        num_blocks=num_blocks,
        offered=offered,
        device_views=device_views,
        regions=regions,
        transposed=transposed,
        block_order=orders[first],
    )


def _distinct(regions: Iterable[Region]) -> tuple[Region, ...]:
    # Layers of different groups share a pool: a second region over it would move its blocks twice.
    return tuple(dict.fromkeys(regions))


def _across_layers(
    owned: Mapping[str, torch.Tensor],
    axes: Axes,
    page_bytes: Mapping[str, int],
    num_blocks: int,
    num_pools: int,
) -> torch.Tensor:
    """The contiguous layout as the tensor it is: ``(n, L, <one layer's block>)`` over the same bytes."""
    base = min(owned.values(), key=torch.Tensor.data_ptr)
    page = next(iter(page_bytes.values()))
    slots = {(cache.data_ptr() - base.data_ptr()) for cache in owned.values()}
    if slots != {page * pool for pool in range(num_pools)} or set(page_bytes.values()) != {page}:
        layer = next(iter(owned))
        raise _refuse(
            layer,
            owned[layer],
            f"{num_pools} layers side by side, {page} bytes apart, in every block; found offsets {sorted(slots)}",
        )
    block = base.select(axes.block, 0)
    return base.as_strided(
        (num_blocks, num_pools, *block.shape),
        (base.stride(axes.block), page // base.element_size(), *block.stride()),
    )
