# SPDX-License-Identifier: Apache-2.0
"""Sleep mode on a GPU: vLLM's own allocator unmaps what a worker allocates with its KV cache, but not the slab."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs an environment: bash experiments/env.sh")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"),
    pytest.mark.timeout(300),
]


def test_a_slab_outlives_a_sleep() -> None:
    """It is allocated inside `register_kv_caches`, in the KV cache's pool, whose other memory is unmapped."""
    from support.kvcached_memory import Geometry
    from vllm.device_allocator.cumem import CuMemAllocator

    from kvcached_nixl.worker.transfer.slab import Slab

    geometry, device = Geometry(num_pools=2), torch.device("cuda", 0)
    with device:
        caches, _ = geometry.allocate()
    layout = geometry.layout(caches)
    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="kv_cache"):
        slept = torch.ones(1 << 20, dtype=torch.uint8, device=device)
        slab = Slab(layout, 3, device)
    slab.gather([0, 1, 2], [0, 1, 2])
    before = [area.cpu() for _, area in slab.areas]
    free_bytes = torch.cuda.mem_get_info(device)[0]
    allocator.sleep(offload_tags=("weights",))
    assert torch.cuda.mem_get_info(device)[0] > free_bytes, "the pool was not unmapped, so nothing is shown"
    assert all(torch.equal(area.cpu(), was) for (_, area), was in zip(slab.areas, before, strict=True))
    allocator.wake_up()
    assert all(torch.equal(area.cpu(), was) for (_, area), was in zip(slab.areas, before, strict=True))
    del slept
