# SPDX-License-Identifier: Apache-2.0
"""Where vLLM calls us. One file per vLLM class, one `Patch` per method, no logic.

`PATCHES` is the one list of everything that is changed, in the order in which it is decided: the gate first, and
kvcached's own patch is taken off before ours go on.
"""

from __future__ import annotations

from kvcached_nixl.patching import Seam
from kvcached_nixl.seams import connector, frontend, naming, pausing, scheduler, weights
from kvcached_nixl.seams.factory import GATES
from kvcached_nixl.seams.superseded import patch_connector

__all__ = ["PATCHES"]

PATCHES: tuple[Seam, ...] = (
    *GATES,
    patch_connector,
    *connector.SEAMS,
    *scheduler.SEAMS,
    *pausing.SEAMS,
    *weights.SEAMS,
    *frontend.SEAMS,
    *naming.SEAMS,
)
