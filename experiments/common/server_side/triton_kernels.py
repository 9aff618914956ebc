# SPDX-License-Identifier: Apache-2.0
"""Runs Triton's kernels on a machine without a GPU by interpreting them, which is slow and needs no compiler.

vLLM's model runner V2 is built on Triton. vLLM's CPU build has that runner, too, but refuses it unless Triton lists a
backend "cpu". With TRITON_INTERPRET=1 Triton never calls a backend, so an empty one is enough.
"""

from __future__ import annotations

from types import ModuleType


def name_a_cpu_backend(backends: ModuleType) -> None:
    """Add a backend "cpu" that does nothing to ``triton.backends``, unless there is one."""
    nothing = type("Backend", (), {"driver": None, "compiler": None})
    backends.backends.setdefault("cpu", nothing)
