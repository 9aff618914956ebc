# SPDX-License-Identifier: Apache-2.0
"""processes.py: who has started whom, as the kernel tells it."""

from __future__ import annotations

import subprocess
import sys

import psutil


def test_a_program_that_has_started_this_process_is_found_through_others() -> None:
    """`vllm-rs serve` starts Python, which starts the engine."""
    said = "from kvcached_nixl.processes import has_ancestor; import sys; print(has_ancestor(sys.argv[1]))"
    mine = psutil.Process().name()
    between = f"import subprocess, sys; subprocess.run([{sys.executable!r}, '-c', {said!r}, sys.argv[1]])"
    for program, is_found in ((mine, "True"), ("vllm-rs", "False")):
        found = subprocess.run([sys.executable, "-c", between, program], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == is_found
