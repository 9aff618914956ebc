# SPDX-License-Identifier: Apache-2.0
"""Finds the regions that NIXL transfers in kvcached's tensors, and describes the KV-cache groups in them. Once per
process, byte arithmetic only.

kvcached reserves far more addresses than vLLM plans to use, and a block id is always below
``kv_cache_config.num_blocks``. So every view is narrowed to the planned blocks before anything is
registered: the cost of registration, descriptors and handshakes depends on what vLLM planned only.

A region is one address range that is registered, divided into contiguous blocks of equal size.

Memory that kvcached 0.1.6 hands out (L pools, ``page`` = bytes of one block in one layer)::

    split-half       K: [n, page/2] ... V: [n, page/2]   two regions a layer
    dense            [n, page]                           one region a layer (packed K/V, multi-latent)
    contiguous       [n, L, page]                        one region in all: one descriptor a block

The kind is derived from the strides and never assumed. A stride that matches none of them is refused, because
a transfer would hit the bytes between blocks and nothing would report it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.wire.planes import GroupMemory, HeadShare
from kvcached_nixl.worker.geometry.planes import (
    Axes,
    StatePart,
    pages_of_state,
    part_planes,
    planes_of,
    state_planes,
)


class Arrangement(enum.Enum):
    """How kvcached lays out the blocks of one KV cache in memory."""

    SPLIT_HALF = "non-contiguous, K and V apart"
    DENSE = "non-contiguous"
    CONTIGUOUS = "contiguous"


@dataclass(frozen=True)
class Page:
    """The size of one kernel block of one layer, as vLLM counts it. A state has no kernel blocks: one logical block.

    Attributes:
        num_bytes: of K and V together, or of the latent, or of a state and the padding behind it.
        num_heads: on this rank; 1 for a latent.
        state_bytes: of a state, without padding; 0 for a layer with KV.
        state_parts: how ranks share it; empty if this is not known.
    """

    num_bytes: int
    num_tokens: int
    num_heads: int
    state_bytes: int = 0
    state_parts: tuple[StatePart, ...] = ()


@dataclass(frozen=True)
class Region:
    """One address range of contiguous blocks of equal size, ``block_bytes``; ``address``: of the first byte."""

    address: int
    block_bytes: int


@dataclass(frozen=True)
class Layout:
    """Where the planned blocks are in memory.

    Attributes:
        axes: the meaning of the dimensions of ``device_views``.
        num_blocks: kernel blocks in every region.
        device_views: layer name -> the tensor attention uses, narrowed to ``num_blocks``. Only layers that have a cache
            of their own, not those that share another layer's. Of a layer with a state: its pages, one a logical block.
        state_bytes: layer name -> bytes of its state, for layers that keep one.
        state_parts: layer name -> how ranks share its state; for the same layers.
        regions: what is registered.
        split: kernel blocks in a logical block.
    """

    arrangement: Arrangement
    axes: Axes
    num_blocks: int
    device_views: dict[str, torch.Tensor]
    regions: tuple[Region, ...]
    state_bytes: Mapping[str, int] = field(default_factory=dict)
    state_parts: Mapping[str, tuple[StatePart, ...]] = field(default_factory=dict)
    split: int = 1

    @property
    def blocks_per_slot(self) -> int:
        """Kernel blocks in a slot of a slab: a state's block is not split, and a slot has room for any block."""
        return self.split if self.state_bytes else 1

    @property
    def device(self) -> torch.device:
        return next(iter(self.device_views.values())).device

    def areas(self) -> list[tuple[int, torch.Tensor]]:
        """Returns each region's address and its blocks as a byte tensor, (num_blocks, block_bytes), without a copy."""
        return [(region.address, self._blocks_of(region)) for region in self.regions]

    def _blocks_of(self, region: Region) -> torch.Tensor:
        for view in self.device_views.values():
            storage = view.untyped_storage()
            offset = region.address - storage.data_ptr()
            if 0 <= offset <= storage.nbytes() - self.num_blocks * region.block_bytes:
                size, stride = (self.num_blocks, region.block_bytes), (region.block_bytes, 1)
                return torch.empty(0, dtype=torch.uint8, device=view.device).set_(storage, offset, size, stride)
        raise ValueError(f"found no tensor over the region at {region.address:#x}")


def _refuse(layer: str, cache: torch.Tensor, expected: str) -> LayoutRefused:
    return LayoutRefused(
        found=f"layer {layer!r}: shape {tuple(cache.shape)}, strides {tuple(cache.stride())}, {cache.dtype}",
        expected=expected,
        consequence="NIXL moves bytes, not tensors: it would move the wrong ones without an error; the engine stops",
        remedy="report this layout, or run this model without ENABLE_KVCACHED",
    )


def _arrangement(layer: str, cache: torch.Tensor, axes: Axes, page: Page, num_pools: int) -> Arrangement:
    if cache.dim() != axes.ndim:
        raise _refuse(layer, cache, f"{axes.ndim} dimensions")
    # Some backends store K as a separate head, or several tokens in one cell: a cell must be one token of one head.
    counted = {0: cache.shape[0], axes.token: page.num_tokens, cache.dim() - 1: cache.shape[-1]}
    if axes.head is not None:
        counted[axes.head] = page.num_heads
    if axes.kv is not None:
        counted[axes.kv] = 2
    expected = tuple(counted.get(axis, 1) for axis in range(cache.dim()))
    if tuple(cache.shape) != expected:
        raise _refuse(
            layer, cache, f"the shape {expected}: {page.num_tokens} tokens and {page.num_heads} heads a block"
        )
    page_bytes = page.num_bytes
    stride_bytes = cache.stride(0) * cache.element_size()
    if axes.kv is not None and stride_bytes == page_bytes // 2:
        if _is_dense(cache.select(axes.kv, 0)[0], page_bytes // 2):
            return Arrangement.SPLIT_HALF
    elif _is_dense(cache[0], page_bytes):
        if stride_bytes == page_bytes:
            return Arrangement.DENSE
        if stride_bytes == page_bytes * num_pools:
            return Arrangement.CONTIGUOUS
    raise _refuse(
        layer,
        cache,
        f"blocks of {page_bytes} bytes that lie {page_bytes // 2} (K and V apart), {page_bytes} (one layer) or "
        f"{page_bytes * num_pools} (all {num_pools} pools of layers) bytes apart; found {stride_bytes}",
    )


def _is_dense(block: torch.Tensor, num_bytes: int) -> bool:
    """Whether a block's elements fill ``num_bytes`` without a gap, in any order."""
    dims = [dim for dim, size in enumerate(block.shape) if size != 1]
    span = 1
    for dim in sorted(dims, key=block.stride):
        if block.stride(dim) != span:
            return False
        span *= block.shape[dim]
    return bool(span * block.element_size() == num_bytes)


def plan(
    kv_caches: Mapping[str, torch.Tensor],
    *,
    axes: Axes,
    pages: Mapping[str, Page],
    num_blocks: int,
    num_pools: int,
    split: int = 1,
) -> Layout:
    """Narrow kvcached's tensors to the planned blocks and find the regions to register.

    Args:
        kv_caches: layer name -> the tensor attention uses, as the model runner registers it; of a layer with a state
            its pages (`pages_of_state`).
        axes: the meaning of the dimensions of attention's tensors.
        pages: layer name -> page. Layers that share another layer's cache may be missing; they add no region.
        num_blocks: kernel blocks that vLLM planned; at most the blocks of every tensor.
        num_pools: pools of layers that kvcached interleaves in its contiguous layout
            (``len(kv_cache_config.kv_cache_tensors)``). Layers of different groups share a pool.
        split: kernel blocks in a logical block.

    Raises:
        LayoutRefused: a tensor has gaps, an unknown stride, too few blocks, another layout than the others, or other
            numbers of tokens or heads in a block than vLLM has.
    """
    owned = _owned(kv_caches, pages)
    state_bytes = {layer: pages[layer].state_bytes for layer in owned if pages[layer].state_bytes}
    if len(owned) == len(state_bytes):
        raise LayoutRefused(
            found="no layer with a KV cache of its own",
            expected="at least one attention layer",
            consequence="there is nothing to transfer; the engine stops",
            remedy="run this model without a KV connector",
        )
    kinds: dict[Arrangement, str] = {}
    views: dict[str, torch.Tensor] = {}
    for layer, cache in owned.items():
        if layer in state_bytes:
            kind, wanted = _arrangement_of_state(layer, cache, num_pools), num_blocks // split
        else:
            kind, wanted = _arrangement(layer, cache, axes, pages[layer], num_pools), num_blocks
        if cache.shape[0] < wanted:
            raise _refuse(layer, cache, f"at least {wanted} blocks")
        views[layer] = cache[:wanted]
        kinds.setdefault(kind, layer)
    if len(kinds) > 1:
        mixed = ", ".join(f"{layer!r} {kind.value}" for kind, layer in kinds.items())
        layer = next(iter(owned))
        raise _refuse(layer, owned[layer], f"one arrangement for all layers; found {mixed}")

    arrangement = next(iter(kinds))
    # A block has the same bytes whatever it holds: a state, or as many kernel blocks as it is split into.
    block_bytes = {layer: pages[layer].num_bytes for layer in owned}
    block_bytes |= {layer: pages[layer].num_bytes // split for layer in state_bytes}
    if arrangement is Arrangement.CONTIGUOUS:
        regions = [_across_layers(owned, block_bytes, num_pools, dict.fromkeys(state_bytes, split))]
    elif arrangement is Arrangement.DENSE:
        regions = [Region(view.data_ptr(), block_bytes[layer]) for layer, view in views.items()]
    else:
        assert axes.kv is not None
        regions = [
            Region(half.data_ptr(), pages[layer].num_bytes // 2)
            for layer, view in views.items()
            for half in view.unbind(axes.kv)
        ]
    return Layout(
        arrangement=arrangement,
        axes=axes,
        num_blocks=num_blocks,
        device_views=views,
        # Without duplicates: layers of different groups share a pool.
        regions=tuple(dict.fromkeys(regions)),
        state_bytes=state_bytes,
        state_parts={layer: pages[layer].state_parts for layer in state_bytes},
        split=split,
    )


def _owned(kv_caches: Mapping[str, torch.Tensor], pages: Mapping[str, Page]) -> dict[str, torch.Tensor]:
    """Returns the tensors of layers that have a page; of layers with a state, their pages."""
    owned: dict[str, torch.Tensor] = {}
    for layer, cache in kv_caches.items():
        page = pages.get(layer)
        if page is not None:
            owned[layer] = pages_of_state(layer, cache, page.num_bytes, page.state_bytes) if page.state_bytes else cache
    return owned


def _arrangement_of_state(layer: str, pages: torch.Tensor, num_pools: int) -> Arrangement:
    """Of `pages_of_state`."""
    page_bytes = pages.shape[1]
    if pages.stride(0) == page_bytes:
        return Arrangement.DENSE
    if pages.stride(0) == page_bytes * num_pools:
        return Arrangement.CONTIGUOUS
    raise _refuse(layer, pages, f"pages that lie {page_bytes} or {page_bytes * num_pools} bytes apart")


def _across_layers(
    owned: Mapping[str, torch.Tensor], block_bytes: Mapping[str, int], num_pools: int, splits: Mapping[str, int]
) -> Region:
    """Returns the one region of the contiguous layout: every block has the pages of all pools side by side. By layer:
    bytes of a kernel block, and, for layers that keep a state, how many kernel blocks a page is split into."""
    base = min(cache.data_ptr() for cache in owned.values())
    page = next(iter(block_bytes.values()))
    places = {(cache.data_ptr() - base) / (page * splits.get(layer, 1)) for layer, cache in owned.items()}
    if places != set(range(num_pools)) or set(block_bytes.values()) != {page}:
        layer = next(iter(owned))
        offsets = sorted(cache.data_ptr() - base for cache in owned.values())
        raise _refuse(
            layer,
            owned[layer],
            f"{num_pools} layers side by side, {page} bytes apart, in every block; found offsets {offsets}",
        )
    return Region(base, page * num_pools)


def group_memory(
    layout: Layout, layers: Collection[str], kernel_blocks_per_block: int, share_of: Callable[[int], HeadShare]
) -> GroupMemory:
    """Describe the KV-cache group of these layers. ``kernel_blocks_per_block``: in one of its logical blocks.

    ``share_of``: number of KV heads that a layer has on this rank -> which of the model's heads they are; 0 stands for
    layers that keep a state. Raises `LayoutRefused` as `planes_of`.
    """
    # In the order in which both sides list their planes.
    views = {layer: view for layer, view in layout.device_views.items() if layer in layers}
    if all(layer in layout.state_bytes for layer in views):
        whole = state_planes(views, layout.state_bytes, share_of(0).first_head)
        return GroupMemory(whole, parts=part_planes(views, layout.state_parts))
    return GroupMemory(planes_of(views, layout.axes, share_of), kernel_blocks_per_block)
