# SPDX-License-Identifier: Apache-2.0
"""Applies and removes patches. Knows nothing of vLLM.

Each module uses the ones before it. `call` is the argument of a wrapper. `record` describes a patch as data. `contract`
compares a patch with the live callable. `attach` inserts the wrapper and removes it. `registry` applies patches in
order and keeps their outcomes.
"""

from __future__ import annotations

from kvcached_nixl.patching.call import Call
from kvcached_nixl.patching.record import ANY_PARAMETERS, Patch, PatchOutcome, PatchState, Seam, Target
from kvcached_nixl.patching.registry import Judge, Registry

__all__ = [
    "ANY_PARAMETERS",
    "Call",
    "Judge",
    "PatchOutcome",
    "Patch",
    "Registry",
    "Seam",
    "PatchState",
    "Target",
]
