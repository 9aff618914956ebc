# SPDX-License-Identifier: Apache-2.0
"""The patches: where vLLM calls this package. One file per vLLM class, one `Patch` per method, no logic.

`PATCHES` lists everything that is patched, in the order in which it is decided: first the gate, then the removal of
kvcached's own patch, then the others.
"""

from __future__ import annotations

from kvcached_nixl.patching import Seam
from kvcached_nixl.vllm.patches import (
    completed,
    connector,
    frontend,
    naming,
    pausing,
    scheduler,
    states,
    transfer_config,
    weights,
    windows,
)
from kvcached_nixl.vllm.patches.factory import GATES
from kvcached_nixl.vllm.patches.superseded import patch_connector

__all__ = ["PATCHES"]

PATCHES: tuple[Seam, ...] = (
    *GATES,
    patch_connector,
    *windows.SEAMS,
    *transfer_config.SEAMS,
    *completed.SEAMS,
    *connector.SEAMS,
    *states.SEAMS,
    *scheduler.SEAMS,
    *pausing.SEAMS,
    *weights.SEAMS,
    *frontend.SEAMS,
    *naming.SEAMS,
)
