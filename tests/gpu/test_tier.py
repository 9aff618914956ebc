# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPUOffloadingSpec copies blocks of kvcached's layouts to host memory and back. Since vLLM 0.28."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("era", ["kv_apart", "packed", "mla"])
def test_blocks_come_back_from_host_memory(era: str, contiguous: bool) -> None:
    """Into other blocks; and no other block changes."""
    from support.kvcached_memory import Geometry
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

    from kvcached_nixl.vllm.patches.tier import memory_of

    geometry = Geometry(era=era, contiguous=contiguous, num_blocks=9)
    with torch.device("cuda", 0):
        caches, memory = geometry.allocate()
    for pool in memory:
        pool.view(torch.uint8).random_(256)
    before = {name: cache.clone() for name, cache in caches.items()}
    worker = CPUOffloadingWorker(memory_of(geometry.layout(caches)), blocks_per_chunk=1, num_cpu_blocks=4)
    stored, loaded = ([3, 1], [5, 8])
    kept = CPULoadStoreSpec([2, 0])
    assert worker.submit_store(0, GPULoadStoreSpec(stored, group_sizes=[2], block_indices=[0]), kept)
    worker.wait({0})
    assert worker.submit_load(1, kept, GPULoadStoreSpec(loaded, group_sizes=[2], block_indices=[0]))
    worker.wait({1})
    assert [one.success for one in worker.get_finished()] == [True, True]
    for name, cache in caches.items():
        expected = before[name].clone()
        expected[loaded] = before[name][stored]
        assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))
    worker.shutdown()
