# SPDX-License-Identifier: Apache-2.0
"""NIXL over kvcached's CUDA pages: what decides whether a transport may touch them directly.

kvcached 0.1.6 creates pages without a shareable handle type and without the GPUDirect RDMA flag (csrc/inc/gpu_vmm.hpp),
so which transports work, and at what speed, can only be found on hardware. The figures are printed with the device's
name; run with ``-s`` to see them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs an environment: bash experiments/env.sh")

TESTS = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("transports", ["cuda_copy,tcp", "cuda_ipc,cuda_copy,tcp", "all"])
def test_a_registration_follows_the_pages(transports: str) -> None:
    """Bytes are those of the page mapped now, before and after a remap, read and written; else it is unsafe."""
    finished = subprocess.run(
        [sys.executable, str(TESTS / "remap_probe.py"), "cuda"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "UCX_TLS": transports},
    )
    print(finished.stdout)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = json.loads(next(line for line in finished.stdout.splitlines() if line.startswith("{")))
    assert found["phases"]["backed"]["equal"]
    assert found["phases"]["again"]["equal"]
    assert found["phases"]["written"]["equal"]
