# SPDX-License-Identifier: Apache-2.0
"""How long decode keeps memory of a prefill server that has died from the GPU (vllm#58063).

NIXL keeps a connected rank's memory mapped. Where pages can be shared (``upstream/page-flags.diff``, with
``KVCACHED_SHAREABLE_PAGES=true``), and where the slab is on the device, the device has it back only when the connection
is taken down.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import torch

FREED_SECONDS = 60.0
"""A dead process of this host is looked for every 5 s (`peers.LOOK_SECONDS`); the driver takes a while to clean up."""
SLACK_BYTES = 64 << 20
"""What decode allocates meanwhile."""


def test_memory_of_a_dead_prefill_server_is_free_soon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from experiments.common.client import Client, Pair, http_client
    from experiments.common.model import make_model
    from experiments.common.servers import Running, prefill_and_decode

    async def hand_over(prefill_url: str, decode_url: str) -> None:
        async with http_client(1) as http:
            prompt = [3 + place % 500 for place in range(500)]
            pair = Pair(Client(prefill_url, http), Client(decode_url, http))
            await pair.hand_over(prompt, max_tokens=4, salt="x", request_id="x")

    kv_transfer = {"kv_connector": "NixlConnector"}
    specs = prefill_and_decode("dead", kv_transfer, model=make_model(), environment={"ENABLE_KVCACHED": "true"})
    with Running(specs[1:], tmp_path) as alone:
        (decode,) = alone.ready()
        before_bytes = torch.cuda.mem_get_info()[0]
        with Running(specs[:1], tmp_path) as other:
            (prefill,) = other.ready()
            asyncio.run(hand_over(prefill.base_url, decode.base_url))
            taken_bytes = before_bytes - torch.cuda.mem_get_info()[0]
            prefill.kill()
            begun = time.monotonic()
            while (missing := before_bytes - torch.cuda.mem_get_info()[0]) > SLACK_BYTES:
                assert time.monotonic() - begun < FREED_SECONDS, (
                    f"{missing >> 20} of {taken_bytes >> 20} MiB are missing"
                )
                time.sleep(0.1)
            with capsys.disabled():
                seconds = time.monotonic() - begun
                print(f"\n{torch.cuda.get_device_name(0)}: {taken_bytes >> 20} MiB were free after {seconds:.1f} s")
        decode.check_alive()
