# SPDX-License-Identifier: Apache-2.0
"""How to patch. Knows nothing of vLLM.

Each builds on those before it: `call` is what a wrapper sees, `record` says what a patch is, `contract` compares it
with the live callable, `attach` puts the wrapper in and takes it out, `registry` does so in order and keeps the
outcomes.
"""

from __future__ import annotations

from kvcached_nixl.patching.call import Call, Decisions
from kvcached_nixl.patching.record import ANY_PARAMETERS, Outcome, Patch, Place, Seam, State, Target
from kvcached_nixl.patching.registry import Judge, Registry

__all__ = [
    "ANY_PARAMETERS",
    "Call",
    "Decisions",
    "Judge",
    "Outcome",
    "Patch",
    "Place",
    "Registry",
    "Seam",
    "State",
    "Target",
]
