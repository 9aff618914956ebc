# SPDX-License-Identifier: Apache-2.0
"""Two engines of one GPU whose memory is taken: one gives way to the other. tests/e2e has the rest of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

LEFT_BYTES = 4 << 20
"""Less than a page group of the model, so nothing can be mapped; beside what kvcached leaves to others of any GPU."""
_TAKE = """
import sys, torch
torch.cuda.init()
torch.zeros(1, device="cuda")
free = torch.cuda.mem_get_info()[0]
taken = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print(torch.cuda.mem_get_info()[0], flush=True)
sys.stdin.read()
"""


@contextmanager
def all_taken_but(left_bytes: int) -> Iterator[int]:
    """Another process takes the GPU's free memory; yields how much of it is left."""
    with subprocess.Popen(
        [sys.executable, "-c", _TAKE, str(left_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        try:
            yield int(other.stdout.readline())
        finally:
            other.stdin.close()


def test_what_nobody_fetches_gives_way_to_another_engine_on_the_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from support.pressed_servers import gets_its_memory, keep_offers, neighbours, revoked

    from experiments.common.servers import Running, Server
    from experiments.lease_recovery.arms import PULL

    async def run(keeps: Server, waits: Server) -> None:
        # What it allocates beside its KV cache it has from then on.
        await gets_its_memory(waits)
        await keep_offers(keeps)
        left_to_others = 1.0 - float(os.environ.get("KVCACHED_GPU_UTILIZATION", "0.95"))
        total_bytes = torch.cuda.mem_get_info()[1]
        with all_taken_but(int(total_bytes * left_to_others) + LEFT_BYTES) as left_bytes:
            await gets_its_memory(waits)
        found = revoked(keeps)
        with capsys.disabled():
            print(f"\n{torch.cuda.get_device_name(0)}: {left_bytes >> 20} MiB are free; taken back: {found}")
        assert set(found) == {"neighbour"}
        for server in (keeps, waits):
            server.check_alive()

    with Running(neighbours(PULL, KVCACHED_PAGE_PREALLOC_ENABLED="false"), tmp_path) as running:
        asyncio.run(run(*running.ready()))
