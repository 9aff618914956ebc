# SPDX-License-Identifier: Apache-2.0
"""kvcached's memory, as vLLM's OffloadingConnector copies it (`tier`).

Runs in: the worker.
Sources: ``kv_connector/v1/offloading/worker.py`` and ``v1/kv_offload/base.py`` of 0.28.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from kvcached_nixl.vllm.adapter.attributes import private
from kvcached_nixl.vllm.adapter.neighbours import require_one_group
from kvcached_nixl.vllm.adapter.nixl_worker import WorkerView
from kvcached_nixl.worker.geometry.layout import Layout
from kvcached_nixl.worker.memory_registration import lay_out


def serve(connector: Any, nixl: Any, role: str, kv_cache_config: Any) -> None:
    """Prepare an ``OffloadingConnector`` that was constructed beside a NIXL connector.

    Raises:
        SettingsError: the model keeps KV in a way that it cannot copy.
    """
    require_one_group(kv_cache_config)
    if role == "WORKER":
        connector.register_kv_caches = functools.partial(_register, connector, nixl)


def _register(connector: Any, nixl: Any, kv_caches: Mapping[str, torch.Tensor]) -> None:
    """In place of ``register_kv_caches``, which takes a layer's page for the distance of its blocks."""
    layout, _ = lay_out(WorkerView(nixl), kv_caches)
    private(private(connector, "connector_worker"), "_init_worker")(memory_of(layout))


def memory_of(layout: Layout) -> Any:
    """Describe kvcached's memory to vLLM's ``OffloadingSpec``: a matrix of bytes for each region, (num_blocks,
    block_bytes), with one row for each logical block."""
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

    logical = layout.num_blocks // layout.split
    tensors = [area.view(torch.int8).view(logical, -1) for _, area in layout.areas()]
    described = [CanonicalKVCacheTensor(tensor=one, page_size_bytes=one.shape[1]) for one in tensors]
    whole = [CanonicalKVCacheRef(tensor_idx=at, page_size_bytes=one.shape[1]) for at, one in enumerate(tensors)]
    return CanonicalKVCaches(tensors=described, group_data_refs=[whole])
