# SPDX-License-Identifier: Apache-2.0
"""NIXL over kvcached's CUDA pages: the proof that a server makes when it starts, on this hardware.

kvcached 0.1.6 creates pages without a shareable handle type and without the GPUDirect RDMA flag (csrc/inc/gpu_vmm.hpp),
so which transports work, and at what speed, can only be found on hardware. Some are expected not to work: KV is staged
then. Those that work must be right.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

READ_SECONDS = 20.0
"""For the environment's versions, not for a prover."""


@pytest.mark.parametrize("transports", ["cuda_copy,tcp", "cuda_ipc,cuda_copy,tcp", "all"])
def test_a_registration_follows_the_pages(
    transports: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes are those of the page mapped now, before and after a remap, read and written; and the answer is kept."""
    from kvcached_nixl.cli import doctor
    from kvcached_nixl.proof.find import find
    from kvcached_nixl.settings import MemoryPath

    monkeypatch.setenv("UCX_TLS", transports)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = doctor.examine(("UCX",), 0)
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name(0)}\n{doctor.render(found)}")
    assert found.platform.memory_type == "VRAM"
    lanes = found.proof.lanes
    assert {lane.name: lane.wrong for lane in lanes if lane.wrong} == {}
    assert any(not (lane.unusable or lane.never) for lane in lanes), "nothing could be moved at all"
    assert (found.proof.memory_path is MemoryPath.DIRECT) is found.proof.is_direct
    begun = time.monotonic()
    assert find(found.proof.question) == found.proof
    assert time.monotonic() - begun < READ_SECONDS
