# SPDX-License-Identifier: Apache-2.0
"""Applies and removes patches. Knows nothing of vLLM.

`patch` describes one as data, compares it with the live callable, and inserts and removes its wrapper. `registry`
applies patches in order and keeps their outcomes.
"""

from __future__ import annotations

from kvcached_nixl.patching.patch import ANY_PARAMETERS, Call, Patch, Target, parameter_lists
from kvcached_nixl.patching.registry import PatchOutcome, PatchState, Registry

__all__ = ["ANY_PARAMETERS", "Call", "Patch", "PatchOutcome", "PatchState", "Registry", "Target", "parameter_lists"]
