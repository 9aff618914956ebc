# SPDX-License-Identifier: Apache-2.0
"""Run by test_kvcached_layouts.py in a separate process: the real kvcached's pool after its limit was changed.

argv: the limits to set one after the other (``kvctl limit``), as shares of the pool. Takes all blocks that the last one
leaves, and prints how many there are, how many were handed out twice, and how many do not exist.
"""

from __future__ import annotations

import json
import sys
import time

import vllm  # noqa: F401 - loads the patches

from support.kvcached_memory import Geometry

POLL_SECONDS = 0.35
"""kvcached looks at its limit every 0.1 s."""


def main(shares: list[float]) -> dict[str, int]:
    from kvcached.cli.utils import get_kv_cache_limit, update_kv_cache_limit
    from kvcached.integration.vllm import interfaces

    geometry = Geometry(num_blocks=3200, num_pools=1, block_size=16, num_kv_heads=16, head_size=128)
    interfaces.init_kvcached(is_worker=True, device="cuda:0")
    shape, size = geometry.shape(geometry.num_blocks), geometry.block_size
    interfaces.alloc_kv_cache(shape, size, geometry.dtype, "cuda", 1, attention_type="MHA", kv_layout="NHD")
    manager = interfaces.get_kv_cache_manager(
        geometry.num_blocks, size, geometry.page_bytes // size // 2, 1, num_kv_buffers=2
    )
    manager.alloc(0)
    whole = get_kv_cache_limit(manager.ipc_name).total_size
    for share in shares:
        update_kv_cache_limit(manager.ipc_name, int(whole * share))
        time.sleep(POLL_SECONDS)
        manager.alloc(0)  # as `EngineBlocks.apply_limit` does
    taken: list[int] = []
    while (blocks := manager.alloc(min(32, manager.available_size()))) and len(taken) < 2 * geometry.num_blocks:
        taken += blocks
    manager.shutdown()
    return {
        "blocks": len(taken),
        "twice": len(taken) - len(set(taken)),
        "beyond": sum(block >= geometry.num_blocks for block in taken),
    }


if __name__ == "__main__":
    print(json.dumps(main([float(share) for share in sys.argv[1:]])))
