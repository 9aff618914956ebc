# SPDX-License-Identifier: Apache-2.0
"""Register memory with NIXL: kvcached's, up to the number of blocks vLLM planned, or a slab. Once per process, at
start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.settings import MemoryPath, Settings
from kvcached_nixl.wire.handshake import MemoryType
from kvcached_nixl.worker.geometry.layout import Axes, Layout, Page, plan
from kvcached_nixl.worker.staging.sizing import SlabLoad, make_slab
from kvcached_nixl.worker.staging.slab import Slab

__all__ = ["Registered", "NixlRegistrar", "register"]


class NixlRegistrar(Protocol):
    """What this module reads from vLLM's NIXL worker; implemented by ``adapter.nixl_worker.WorkerView``."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_pools(self) -> int: ...
    @property
    def unserved(self) -> Sequence[tuple[str, str]]: ...
    def groups(self) -> Sequence[Mapping[str, Page]]: ...
    @property
    def kernel_blocks_per_block(self) -> int: ...
    def probe_cache_shape(self) -> tuple[tuple[int, ...], Mapping[str, int]]: ...
    @property
    def load(self) -> tuple[int, int]: ...
    def register_memory(
        self, extents: Sequence[tuple[int, int]], device_id: int, memory_type: MemoryType | None = None
    ) -> None: ...


@dataclass(frozen=True)
class Registered:
    """The memory that NIXL may touch.

    Attributes:
        layout: of the KV cache.
        layers_of_groups: per KV-cache group, the names of its layers that have a cache of their own.
        slab: registered in place of the KV cache; None where the KV cache itself is registered.
        memory_type: NIXL's name for the slab's memory type; None if it is the same as the KV cache's.
        extents: address and size in bytes of each registered range.
        device_id: NIXL's number of the device that holds the registered memory.
        path: which memory that is.
    """

    layout: Layout
    layers_of_groups: tuple[tuple[str, ...], ...]
    slab: Slab | None = None
    memory_type: MemoryType | None = None
    extents: tuple[tuple[int, int], ...] = ()
    device_id: int = 0
    path: MemoryPath = MemoryPath.DIRECT

    def __str__(self) -> str:
        one = self.layout
        reason = f"{one.arrangement.value}, {one.num_blocks} blocks, {one.descriptors_per_block} descriptors a block"
        if self.slab is None:
            return reason
        return f"{reason}; {self.slab.num_slots} slots of {self.slab.extent[1] / 2**20:,.0f} MiB in all"


def register(
    worker: NixlRegistrar,
    kv_caches: Mapping[str, torch.Tensor],
    path: MemoryPath,
    settings: Settings,
) -> Registered:
    """Register ``kv_caches``, kvcached's memory, or a slab in their place.

    Args:
        kv_caches: layer name -> attention's tensor; of a layer with a state its pages.

    Raises:
        LayoutRefused: the memory cannot be described, or the model is parallelized in a way that is not supported.
        SettingsError: the slab is too small, or there is no memory for it.
    """
    for found, expected in worker.unserved:
        raise LayoutRefused(
            found=found,
            expected=expected,
            consequence="Peers would exchange bytes that have another meaning on the other side; the engine stops",
            remedy=f"serve with {expected}, or without ENABLE_KVCACHED",
        )
    shape, numbers = worker.probe_cache_shape()
    groups = worker.groups()
    layout = plan(
        kv_caches,
        axes=Axes.from_probe(shape, **numbers),
        pages={layer: page for group in groups for layer, page in group.items()},
        num_blocks=worker.num_blocks,
        num_pools=worker.num_pools,
        split=worker.kernel_blocks_per_block,
    )
    layers_of_groups = tuple(tuple(layer for layer in group if layer in layout.device_views) for group in groups)
    # Torch returns -1 for host memory.
    device_id = max(next(iter(layout.device_views.values())).get_device(), 0)
    if path is MemoryPath.DIRECT:
        extents = tuple((region.address, region.block_bytes * layout.num_blocks) for region in layout.regions)
        worker.register_memory(extents, device_id)
        return Registered(layout, layers_of_groups, extents=extents, device_id=device_id)
    firsts = [layers[0] for layers in layers_of_groups]
    with_kv = [layout.device_views[layer] for layer in firsts if layer not in layout.state_bytes]
    slot_tokens = tuple(view.shape[layout.axes.token] * layout.blocks_per_slot for view in with_kv)
    load = SlabLoad(*worker.load, slot_tokens, len(firsts) - len(with_kv))
    slab = make_slab(layout, path, load, settings)
    is_host = path is MemoryPath.HOST
    where = 0 if is_host else device_id
    worker.register_memory([slab.extent], where, "DRAM" if is_host else None)
    return Registered(layout, layers_of_groups, slab, "DRAM" if is_host else None, (slab.extent,), where, path)
