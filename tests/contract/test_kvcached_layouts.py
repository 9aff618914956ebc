# SPDX-License-Identifier: Apache-2.0
"""The real kvcached has the layout of ``kvcached_memory.Geometry``, and `worker.geometry.layout` reads it; and its pool
stays what it was at start, whatever limit is set."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from hostvmm import is_hostvmm_build
from support import FOLDER
from support.kvcached_memory import Geometry

TESTS = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.skipif(not is_hostvmm_build(), reason="the installed kvcached is not the build on host memory"),
    pytest.mark.timeout(180),
]
BASE = Geometry(num_kv_heads=4, head_size=32, block_size=16, num_blocks=10_000)
GEOMETRIES: dict[str, dict[str, Any]] = {
    "packed-HND": {"era": "packed", "head_major": True, "num_pools": 3},
    "packed": {"era": "packed"},
    "kv_apart": {"era": "kv_apart"},
    "mla": {"era": "mla", "num_pools": 3},
    "kv_apart-one head": {"era": "kv_apart", "num_kv_heads": 1},
}


def probed(script: str, *arguments: str, **environ: str) -> dict[str, Any]:
    """What a script of ``tests/support`` finds on a device of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
        "ENABLE_KVCACHED": "true",
        "KVCACHED_HOSTVMM_DEVICE": f"test-{uuid.uuid4().hex}",
        "KVCACHED_IPC_NAME": f"test-{uuid.uuid4().hex[:12]}",
        "KVCACHED_HOSTVMM_GIB": "1",
        **environ,
    }
    finished = subprocess.run(
        [sys.executable, str(FOLDER / f"{script}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        env=environment,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    # kvcached prints too.
    found: dict[str, Any] = json.loads(next(line for line in finished.stdout.splitlines() if line.startswith("{")))
    return found


@pytest.mark.parametrize("contiguous", [False, True], ids=["non-contiguous", "contiguous"])
@pytest.mark.parametrize(
    "geometry",
    [
        pytest.param(dataclasses.replace(BASE, **changed), id=name, marks=[pytest.mark.long] if place else [])
        for place, (name, changed) in enumerate(GEOMETRIES.items())
    ],
)
def test_descriptors_hold_what_attention_wrote_on_real_kvcached_pages(geometry: Geometry, contiguous: bool) -> None:
    """Written through attention's views on mapped pages, read back at the descriptors' addresses, block by block."""
    geometry = dataclasses.replace(geometry, contiguous=contiguous, reserved_blocks=geometry.num_blocks + 3)
    fields = {f.name: getattr(geometry, f.name) for f in dataclasses.fields(geometry) if f.name != "dtype"}
    found = probed("kvcached_layout_probe", json.dumps(fields), KVCACHED_CONTIGUOUS_LAYOUT=str(contiguous).lower())
    assert len(found["blocks"]) == 3
    assert found["reserved"] > geometry.num_blocks
    assert found["wrong"] == []
    assert [found["arrangement"], found["regions"]] == found["imitated"]
    assert len(found["regions"]) == geometry.expected_regions()


@pytest.mark.parametrize("shares", [("1.1",), ("0.5", "1.1")], ids=" then ".join)
def test_a_limit_above_the_pool_hands_out_the_pool_and_no_more(shares: tuple[str, ...]) -> None:
    """As ``kvctl limit-percent NAME 100`` sets it: the percentage is of the device."""
    found = probed("kvcached_limit_probe", *shares)
    assert found == {"blocks": 3199, "twice": 0, "beyond": 0}, "all but the null block"
