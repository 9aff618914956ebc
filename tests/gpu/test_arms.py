# SPDX-License-Identifier: Apache-2.0
"""The arms of byte equivalence and of chaos on CUDA: kvcached's own pages, and a slab on the device and on the host.

kvcached's own pages are compared where every transport moves their bytes, however slowly; elsewhere the test says why
not. Stock P/D is compared, too: its answers show what rounding alone changes on this GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(3600)

ROOT = Path(__file__).resolve().parents[2]


def why_not_direct() -> str:
    """Why kvcached's pages must not be registered here; "" if they may."""
    from kvcached_nixl.cli import doctor

    return "; ".join(doctor.examine(("UCX",), 0).proof.why_not)


@pytest.mark.parametrize(
    "command",
    [
        ("byte_equivalence", "--quick", "--only", "staged, pull", "--only", "staged, push", "--only", "slab"),
        ("byte_equivalence", "--quick", "--only", "stock", "--only", "contiguous"),
        ("lease_recovery", "--only", "staged"),
    ],
    ids=["staged", "direct", "chaos"],
)
def test_arms(command: tuple[str, ...], capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    """Byte-identical to one stock instance, and 0 wrong when servers die."""
    from kvcached_nixl.vllm.adapter.versions import found_version

    if request.node.callspec.id == "direct" and (words := why_not_direct()):
        pytest.skip(f"kvcached's pages are staged here: {words}")
    module, *arguments = command
    vllm = str(found_version("vllm")).partition("+")[0]
    with capsys.disabled():
        done = subprocess.run(
            [sys.executable, "-m", "experiments", module, "--vllm", vllm, *arguments], cwd=ROOT, check=False
        )
    assert done.returncode == 0
