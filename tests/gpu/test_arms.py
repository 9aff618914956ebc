# SPDX-License-Identifier: Apache-2.0
"""The arms of byte equivalence and of chaos on CUDA: kvcached's own pages, and a slab on the device and on the host.

Where the proof at start finds that registrations do not follow kvcached's pages, direct arms are refused at start and
reported as not compared: the answer that this tier is for.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs an environment: bash experiments/env.sh")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"),
    pytest.mark.timeout(3600),
]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "command",
    [
        ("byte_equivalence", "--quick", "--arm", "staged, pull", "--arm", "staged, push", "--arm", "slab"),
        ("byte_equivalence", "--quick", "--arm", "contiguous"),
        ("lease_recovery", "--arm", "staged"),
    ],
    ids=["staged", "direct", "chaos"],
)
def test_arms(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Byte-identical to one stock instance, and 0 wrong when servers die."""
    with capsys.disabled():
        done = subprocess.run([sys.executable, "-m", f"experiments.{command[0]}", *command[1:]], cwd=ROOT, check=False)
    assert done.returncode == 0
