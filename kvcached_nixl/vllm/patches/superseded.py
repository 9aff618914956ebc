# SPDX-License-Identifier: Apache-2.0
"""Disables kvcached's own patch of the NIXL connector, which this package replaces.

Runs in: every process, while vLLM is being imported.
"""

from __future__ import annotations

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.vllm.adapter.locate import KVCACHED_PATCH
from kvcached_nixl.vllm.patches.actions.superseded import take_off

__all__ = ["patch_connector"]

PATCH_CONNECTOR = Patch(
    target=KVCACHED_PATCH,
    attribute="patch_connector",
    process="every",
    parameters=("self",),
    why="kvcached's own patch inflates num_blocks to the whole reservation and refuses the contiguous layout.",
    upstream="kvcached 0.1.6, kvcached/integration/vllm/nixl_compat.py",
    remove_when="kvcached no longer has NixlConnectorPatch",
    when_unsupported=True,
    when_absent="skip",
    prepare=take_off,
)


@PATCH_CONNECTOR.around
def patch_connector(call: Call) -> bool:
    call.note("kvcached asked to patch NixlConnector: superseded, nothing was changed")
    return True
