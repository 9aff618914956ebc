# SPDX-License-Identifier: Apache-2.0
"""Registering once is enough on this machine: NIXL follows kvcached's pages as they come and go.

The same probe runs over CUDA memory in tests/gpu.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from kvcached_nixl.hostvmm import is_hostvmm_build

TESTS = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.skipif(not is_hostvmm_build(), reason="the installed kvcached is not the build on host memory"),
    pytest.mark.timeout(180),
]


def probe(**environ: str) -> Any:
    """What the probe found, in a process of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
        "ENABLE_KVCACHED": "true",
        "KVCACHED_HOSTVMM_DEVICE": f"test-{uuid.uuid4().hex}",
        "KVCACHED_IPC_NAME": f"test-{uuid.uuid4().hex[:12]}",
        "KVCACHED_HOSTVMM_GIB": "0.5",
        **environ,
    }
    finished = subprocess.run(
        [sys.executable, str(TESTS / "remap_probe.py"), "cpu"],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        env=environment,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return json.loads(next(line for line in finished.stdout.splitlines() if line.startswith("{")))["phases"]


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_a_read_finds_the_page_that_is_mapped_now(transports: str) -> None:
    """A page mapped, replaced and written under one registration is read and written where it is now."""
    phases = probe(UCX_TLS=transports)
    assert phases["backed"]["equal"]
    assert phases["again"]["equal"]
    assert phases["written"]["equal"]
    # The hazard behind the safety rules: reading what is not backed is no error, it is zeros.
    assert phases["unbacked"]["zeros"]


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_a_registration_that_pins_reads_and_writes_other_pages(transports: str) -> None:
    """What a network card would do: every transfer ends well, and none moves the bytes that are there."""
    phases = probe(UCX_TLS=transports, KVCACHED_HOSTVMM_REGISTRATION="pinned")
    assert not phases["backed"]["equal"]
    assert not phases["again"]["equal"]
    assert not phases["written"]["equal"]
