# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's CPU build compute a gated delta net that has drafts.

The block of a request's state is then taken from a table with several columns. Torch takes a single such index for
contiguous, whatever its stride is, and the kernel refuses its stride.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


def copy_indices(custom_ops: ModuleType) -> None:
    """Give the kernel of ``vllm._custom_ops`` indices of its own."""
    compute = custom_ops.fused_sigmoid_gating_delta_rule_update_cpu

    def computed(*, initial_state_indices: Any, **arguments: Any) -> Any:
        own = initial_state_indices.new_empty(initial_state_indices.shape).copy_(initial_state_indices)
        return compute(initial_state_indices=own, **arguments)

    custom_ops.fused_sigmoid_gating_delta_rule_update_cpu = computed
