# SPDX-License-Identifier: Apache-2.0
"""Register kvcached's memory with the stock worker. Once per process, on the engine's thread.

The stock worker does the registering; this module narrows what it sees, and then compares what it made of that,
address by address, with the regions that were meant. A difference stops the engine: a descriptor built from
another block length moves bytes of other blocks and reports nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from kvcached_nixl.errors import LayoutRefused
from kvcached_nixl.wire.handshake import PeerTag
from kvcached_nixl.worker.axes import Axes
from kvcached_nixl.worker.layout import RegisteredLayout, plan_registration


class StockWorker(Protocol):
    """What is asked of vLLM's NIXL worker; ``compat.connector.WorkerView`` answers."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_pools(self) -> int: ...
    @property
    def use_mla(self) -> bool: ...
    @property
    def block_size(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def pipeline_parallel_size(self) -> int: ...
    @property
    def memory_order(self) -> str: ...
    @property
    def kv_cache_dtype(self) -> str: ...
    def page_bytes(self) -> dict[str, int]: ...
    def probe_cache_shape(self) -> tuple[tuple[int, ...], Mapping[str, int]]: ...
    def tell_kv_first(self) -> None: ...
    def set_device_kv_caches(self, device_views: dict[str, Any]) -> None: ...
    def registered_regions(self) -> list[tuple[int, int]]: ...
    def sign_compatibility(self, sign: Callable[[str], str]) -> str: ...


def register(
    worker: StockWorker,
    kv_caches: Mapping[str, torch.Tensor],
    stock_register: Callable[[dict[str, torch.Tensor]], None],
) -> RegisteredLayout:
    """Register ``kv_caches`` (layer name -> attention's tensor, kvcached's memory) through the stock worker.

    Raises:
        LayoutRefused: the memory cannot be described, or the stock worker described it differently.
    """
    _refuse_unserved(worker)
    shape, numbers = worker.probe_cache_shape()
    layout = plan_registration(
        kv_caches,
        axes=Axes.from_probe(shape, **numbers),
        page_bytes=worker.page_bytes(),
        num_blocks=worker.num_blocks,
        num_pools=worker.num_pools,
    )
    if layout.transposed:
        worker.tell_kv_first()
    stock_register(layout.offered)
    _confirm(worker, layout)
    worker.set_device_kv_caches(layout.device_views)
    return layout


def sign(worker: StockWorker, layout: RegisteredLayout) -> None:
    """Say in the compatibility string what a peer that pulls must equal."""
    worker.sign_compatibility(_tag(worker, layout).sign)


def _refuse_unserved(worker: StockWorker) -> None:
    if worker.pipeline_parallel_size > 1:
        raise LayoutRefused(
            found=f"pipeline parallel size {worker.pipeline_parallel_size}",
            expected="1",
            consequence="each stage holds other layers, which this protocol does not describe; the engine stops",
            remedy="serve with --pipeline-parallel-size 1, or without ENABLE_KVCACHED",
        )


def _confirm(worker: StockWorker, layout: RegisteredLayout) -> None:
    meant = [(region.address, region.block_bytes) for region in layout.regions]
    made = worker.registered_regions()
    if made != meant:
        raise LayoutRefused(
            found=f"{len(made)} regions registered by vLLM, first {made[:2]} (address, block bytes)",
            expected=f"{len(meant)} regions of {layout.arrangement.value} memory, first {meant[:2]}",
            consequence="descriptors would name other bytes than the blocks; the engine stops",
            remedy="use a vLLM version that `python -m kvcached_nixl` lists as supported, and report this",
        )


def _tag(worker: StockWorker, layout: RegisteredLayout) -> PeerTag:
    return PeerTag(
        arrangement=layout.arrangement.value,
        memory_order="latent" if worker.use_mla else worker.memory_order,
        block_order=layout.block_order,
        block_size=worker.block_size,
        region_block_bytes=tuple(region.block_bytes for region in layout.regions),
        tp_size=worker.tp_size,
        kv_cache_dtype=worker.kv_cache_dtype,
    )
