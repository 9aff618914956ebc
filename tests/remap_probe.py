# SPDX-License-Identifier: Apache-2.0
"""NIXL over kvcached's pages: registered once, while pages come and go below the registration.

Run in a process of its own with UCX_TLS chosen by the caller; argv: ``cuda`` or ``cpu`` (kvcached on host memory).
Prints one JSON object: for every phase whether the bytes that arrived are the bytes that attention would see, and the
seconds of registration and of each read and write.

Phases, all under the registration made before any page was backed:

    backed     a page is mapped, written, and read by the peer
    again      the page is unmapped and another one mapped at its address, written, and read
    written    the peer writes into the page; the owner sees it
    unbacked   the page is unmapped; what the peer reads then (zeros, from kvcached's shared zero page) is reported
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

PAGE_BYTES = 2 << 20
PAGES = 16


def main(device: str) -> dict[str, Any]:
    if device == "cpu":
        from kvcached_nixl.hostvmm import activate

        activate()
    from kvcached import vmm_ops
    from nixl._api import nixl_agent, nixl_agent_config

    memory_type = "VRAM" if device == "cuda" else "DRAM"
    vmm_ops.init_kvcached("cuda:0", PAGE_BYTES, False)
    (pool,) = vmm_ops.create_kv_tensors(2 * PAGES * PAGE_BYTES, 1, "cuda:0", 1)
    pool = pool.view(torch.uint8)
    owner = nixl_agent("owner", nixl_agent_config(num_threads=0))
    peer = nixl_agent("peer", nixl_agent_config(num_threads=0))
    staging = torch.zeros(PAGE_BYTES, dtype=torch.uint8, device="cuda" if device == "cuda" else "cpu")

    begun = time.perf_counter()
    owner.register_memory([(pool.data_ptr(), PAGES * PAGE_BYTES, 0, "")], memory_type)
    found: dict[str, Any] = {"register_seconds": time.perf_counter() - begun, "phases": {}}
    peer.register_memory([(staging.data_ptr(), PAGE_BYTES, 0, "")], memory_type)
    peer.add_remote_agent(owner.get_agent_metadata())

    def move(operation: str) -> float:
        begun = time.perf_counter()
        local = peer.get_xfer_descs([(staging.data_ptr(), PAGE_BYTES, 0)], memory_type)
        remote = peer.get_xfer_descs([(pool.data_ptr() + 3 * PAGE_BYTES, PAGE_BYTES, 0)], memory_type)
        handle = peer.initialize_xfer(operation, local, remote, "owner")
        state = peer.transfer(handle)
        while state == "PROC" and time.perf_counter() - begun < 30:
            state = peer.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"{operation} ended as {state!r}")
        peer.release_xfer_handle(handle)
        return time.perf_counter() - begun

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    page = pool[3 * PAGE_BYTES : 4 * PAGE_BYTES]
    for phase, value in (("backed", 1), ("again", 2)):
        vmm_ops.map_to_kv_tensors([3 * PAGE_BYTES])
        page.fill_(value)
        synchronize()
        seconds = move("READ")
        synchronize()
        found["phases"][phase] = {"equal": bool((staging == value).all()), "seconds": seconds}
        if phase == "backed":
            vmm_ops.unmap_from_kv_tensors([3 * PAGE_BYTES])
    staging.fill_(7)
    synchronize()
    seconds = move("WRITE")
    synchronize()
    found["phases"]["written"] = {"equal": bool((page == 7).all()), "seconds": seconds}
    vmm_ops.unmap_from_kv_tensors([3 * PAGE_BYTES])
    synchronize()
    seconds = move("READ")
    synchronize()
    found["phases"]["unbacked"] = {"zeros": bool((staging == 0).all()), "seconds": seconds}
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name(0)
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
