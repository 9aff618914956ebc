# SPDX-License-Identifier: Apache-2.0
"""kvcached's version windows with the installed vLLM and kvcached: open by proof, and shut where the gate is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcached_nixl.vllm.adapter.versions import BEYOND_KVCACHED, COUNTS_EXTERNAL_WEIGHTS, installed_has, installed_row
from kvcached_nixl.vllm.patches.windows import CONTACTS

PROBE = Path(__file__).parents[1] / "support" / "windows_probe.py"
IS_BEYOND = installed_has(BEYOND_KVCACHED)
NO_ADAPTER, OTHER_RUNNER = "no runner adapter", "requires Model Runner V2"
pytestmark = pytest.mark.skipif(float(installed_row().series) < 0.3, reason="kvcached patches other places below 0.30")


def probe(*arguments: str, **environ: str) -> Any:
    known = {name: value for name, value in os.environ.items() if not name.startswith(("ENABLE_KVCACHED", "KVCACHED"))}
    done = subprocess.run(
        [sys.executable, str(PROBE), *arguments], env=known | environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def test_they_are_open_with_the_gate() -> None:
    """kvcached's next check is reached: which model runner is used."""
    found, said = probe("state", ENABLE_KVCACHED="true")
    assert found["contains"] and OTHER_RUNNER in found["refusal"]
    assert "stay shut" not in said


@pytest.mark.skipif(not IS_BEYOND, reason="kvcached accepts this vLLM itself")
def test_without_this_package_kvcached_refuses() -> None:
    found, _ = probe("state", ENABLE_KVCACHED="true", KVCACHED_NIXL="0")
    assert not found["contains"] and NO_ADAPTER in found["refusal"]


@pytest.mark.skipif(not IS_BEYOND, reason="kvcached accepts this vLLM itself")
@pytest.mark.parametrize(
    "contact",
    [
        "vllm.v1.engine.utils:CoreEngineProcManager.shutdown",
        pytest.param("vllm.v1.worker.gpu_worker:Worker.determine_available_memory", marks=pytest.mark.long),
    ],
)
def test_a_contact_that_differs_keeps_them_shut(contact: str) -> None:
    """This package says what differs, and then kvcached refuses the engine."""
    found, said = probe("state", contact, ENABLE_KVCACHED="true")
    assert not found["contains"] and NO_ADAPTER in found["refusal"]
    assert "kvcached's version windows stay shut:" in said
    assert f"{contact.replace(':', '.')}: parameters (self, other)" in said


@pytest.mark.skipif(not installed_has(COUNTS_EXTERNAL_WEIGHTS), reason="kvcached's functions are complete")
def test_a_worker_on_a_gpu_gets_what_this_vllm_expects() -> None:
    """kvcached's functions, called as vLLM's worker calls them; without a GPU, and without a model."""
    found, _ = probe("memory", ENABLE_KVCACHED="true")
    assert found["budgets"] == [500, 400] and found["configured"] == [True]
    assert "500 bytes of weights" in found["refusal"]


def test_the_contacts_are_what_kvcached_changes() -> None:
    """But for its patch of the NIXL connector, which this package takes off."""
    found, _ = probe("changes", KVCACHED_NIXL="0")
    changed = {one for one in found if not one.startswith("vllm.distributed.kv_transfer.")}
    assert changed == {str(contact) for contact in CONTACTS}
