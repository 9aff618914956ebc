# SPDX-License-Identifier: Apache-2.0
"""How fast KV is staged, by the size of the slab, and what that takes from a step that computes beside it.

A GPU's rates go into docs/measurements.md. Without a GPU the same code runs on little memory.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("torch", reason="needs an environment: bash experiments/env.sh")
import torch
from support.kvcached_memory import Geometry

from kvcached_nixl.worker.transfer.slab import Slab

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu", 0 if IS_GPU else None)
SLABS_MIB = (64, 256, 1024, 2048) if IS_GPU else (2, 4)
ROUNDS = 8
pytestmark = [pytest.mark.timeout(300), *([pytest.mark.gpu] if IS_GPU else [])]


def seconds(work: Callable[[], object]) -> float:
    """How long the device needs for it."""
    begun = time.perf_counter()
    work()
    if IS_GPU:
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - begun


@pytest.mark.parametrize("contiguous", [False, True])
def test_rates(contiguous: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The layers of an 8B model, as kvcached lays them out, in blocks that are anywhere."""
    geometry = Geometry("packed", contiguous, num_pools=32 if IS_GPU else 4, num_kv_heads=8, head_size=128)
    block_bytes = geometry.block_bytes_of_all_layers()
    num_blocks = (SLABS_MIB[-1] << 20) // block_bytes
    geometry = dataclasses.replace(geometry, num_blocks=num_blocks, reserved_blocks=num_blocks + 8)
    with DEVICE:
        caches, _ = geometry.allocate()
    layout = geometry.layout(caches)
    size = 4096 if IS_GPU else 256
    factor = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)

    def compute() -> None:
        for _ in range(64):
            torch.mm(factor, factor)

    compute()
    alone = min(seconds(compute) for _ in range(3))
    for mib in SLABS_MIB:
        num_slots = (mib << 20) // block_bytes
        slab = Slab(layout, num_slots, DEVICE)
        blocks, slots = torch.randperm(num_blocks)[:num_slots].tolist(), list(range(num_slots))
        num_gb = num_slots * block_bytes / 1e9
        rates = []
        for copy, pair in ((slab.gather, (blocks, slots)), (slab.scatter, (slots, blocks))):
            copy(*pair)
            rates.append(num_gb / min(seconds(lambda copy=copy, pair=pair: copy(*pair)) for _ in range(ROUNDS)))  # type: ignore[misc]
        beside = beside_copies(slab, blocks, slots, compute)
        with capsys.disabled():
            print(
                f"\nslab of {mib} MiB, {'contiguous' if contiguous else 'layers apart'}: gather {rates[0]:.1f} GB/s, "
                f"scatter {rates[1]:.1f} GB/s; a step beside copies takes {beside / alone:.2f} times as long"
            )
        assert min(rates) > 0


def beside_copies(slab: Slab, blocks: Sequence[int], slots: Sequence[int], compute: Callable[[], None]) -> float:
    """Seconds of a step while another thread copies without a pause, on a stream of its own."""
    ended, begun = threading.Event(), threading.Event()

    def copy() -> None:
        stream = torch.cuda.Stream() if IS_GPU else None
        with torch.cuda.stream(stream):
            while not ended.is_set():
                slab.gather(blocks, slots)
                if stream is not None:
                    stream.synchronize()
                begun.set()

    copying = threading.Thread(target=copy)
    copying.start()
    begun.wait()
    try:
        return min(seconds(compute) for _ in range(3))
    finally:
        ended.set()
        copying.join()
