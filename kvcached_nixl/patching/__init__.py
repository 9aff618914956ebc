# SPDX-License-Identifier: Apache-2.0
"""Applies and removes patches. Knows nothing of vLLM.

`record` describes a patch as data. `seat` compares it with the live callable, and inserts and removes its wrapper.
`registry` applies patches in order and keeps their outcomes.
"""

from __future__ import annotations

from kvcached_nixl.patching.record import ANY_PARAMETERS, Call, Patch, PatchOutcome, PatchState, Target, parameter_lists
from kvcached_nixl.patching.registry import Registry

__all__ = ["ANY_PARAMETERS", "Call", "Patch", "PatchOutcome", "PatchState", "Registry", "Target", "parameter_lists"]
