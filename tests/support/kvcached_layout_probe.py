# SPDX-License-Identifier: Apache-2.0
"""Run by test_kvcached_layouts.py in a separate process, because the real kvcached chooses its layout once per process.

argv: the fields of a Geometry as JSON. Allocates with kvcached, takes blocks from kvcached's manager, writes one block
after the other through attention's views, and prints the bytes that the planned descriptors of that block then hold.
"""

from __future__ import annotations

import ctypes
import json
import sys

import torch

from kvcached_nixl.worker.geometry.layout import plan
from support.kvcached_memory import Geometry


def main(geometry: Geometry) -> dict[str, object]:
    from kvcached.integration.vllm import interfaces

    latent = geometry.is_latent
    one_buffer = latent or geometry.era == "packed"
    interfaces.init_kvcached(is_worker=True, device="cuda:0")
    tensors = interfaces.alloc_kv_cache(
        geometry.shape(geometry.num_blocks),
        geometry.block_size,
        geometry.dtype,
        "cuda",
        geometry.num_pools,
        attention_type="MLA" if latent else "MHA",
        kv_layout="HND" if geometry.head_major else "NHD",
    )
    manager = interfaces.get_kv_cache_manager(
        geometry.num_blocks,
        geometry.block_size,
        geometry.page_bytes // geometry.block_size // (1 if one_buffer else 2),
        geometry.num_pools,
        num_kv_buffers=1 if one_buffer else 2,
    )
    block_ids = manager.alloc(3)
    caches = {f"layer.{index}": tensor for index, tensor in enumerate(tensors)}
    layout = geometry.layout(caches)
    one = torch.ones(1, dtype=geometry.dtype).view(torch.uint8).numpy().tobytes()
    wrong = []
    for block_id in block_ids:
        for cache in caches.values():
            cache[block_id].fill_(1)
        for other in block_ids:
            held = b"".join(
                ctypes.string_at(region.address + other * region.block_bytes, region.block_bytes)
                for region in layout.regions
            )
            byte = one * (len(held) // len(one)) if other == block_id else bytes(len(held))
            if held != byte or len(held) != geometry.block_bytes_of_all_layers():
                wrong.append([block_id, other])
        for cache in caches.values():
            cache[block_id].zero_()
    like = geometry.allocate()[0]
    imitation = plan(
        like,
        axes=geometry.axes(),
        pages=dict.fromkeys(like, geometry.page()),
        num_blocks=geometry.num_blocks,
        num_pools=geometry.num_pools,
    )
    found = {
        "blocks": block_ids,
        "reserved": max(tensors[0].shape[:2]),
        "wrong": wrong,
        "arrangement": layout.arrangement.name,
        "regions": [region.block_bytes for region in layout.regions],
        "imitated": [imitation.arrangement.name, [region.block_bytes for region in imitation.regions]],
    }
    manager.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(main(Geometry(**json.loads(sys.argv[1])))))
