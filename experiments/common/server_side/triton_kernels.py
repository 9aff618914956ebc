# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels on a machine without a GPU: interpreted, which is slow and needs no compiler.

vLLM's model runner V2 is built on Triton. Its build for CPUs has such a runner, too, and refuses it unless Triton names
a backend "cpu"; with TRITON_INTERPRET=1 Triton asks no backend for anything.
"""

from __future__ import annotations

from types import ModuleType


def name_a_cpu_backend(backends: ModuleType) -> None:
    """``triton.backends`` lists a backend that does nothing, if it has none for CPUs."""
    nothing = type("Backend", (), {"driver": None, "compiler": None})
    backends.backends.setdefault("cpu", nothing)
