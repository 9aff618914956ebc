# SPDX-License-Identifier: Apache-2.0
"""Register kvcached's memory with NIXL, as far as vLLM planned to use it. Once per process, on the engine's thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.worker.axes import Axes
from kvcached_nixl.worker.layout import Layout, plan

__all__ = ["StockWorker", "register"]


class StockWorker(Protocol):
    """What is asked of vLLM's NIXL worker; ``compat.connector.WorkerView`` answers."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_pools(self) -> int: ...
    @property
    def unserved(self) -> Sequence[tuple[str, str]]: ...
    def page_bytes(self) -> dict[str, int]: ...
    def probe_cache_shape(self) -> tuple[tuple[int, ...], Mapping[str, int]]: ...
    def register_memory(self, extents: Sequence[tuple[int, int]], device_id: int) -> None: ...


def register(worker: StockWorker, kv_caches: Mapping[str, torch.Tensor]) -> Layout:
    """Register ``kv_caches``: layer name -> attention's tensor, kvcached's memory.

    Raises:
        LayoutRefused: the memory cannot be described, or the model is spread in a way that is not served.
    """
    for found, expected in worker.unserved:
        raise LayoutRefused(
            found=found,
            expected=expected,
            consequence="Peers would exchange bytes that mean something else on the other side; the engine stops",
            remedy=f"serve with {expected}, or without ENABLE_KVCACHED",
        )
    shape, numbers = worker.probe_cache_shape()
    layout = plan(
        kv_caches,
        axes=Axes.from_probe(shape, **numbers),
        page_bytes=worker.page_bytes(),
        num_blocks=worker.num_blocks,
        num_pools=worker.num_pools,
    )
    # Torch has -1 for the device of host memory.
    device_id = max(next(iter(layout.device_views.values())).get_device(), 0)
    extents = [(region.address, region.block_bytes * layout.num_blocks) for region in layout.regions]
    worker.register_memory(extents, device_id)
    return layout
