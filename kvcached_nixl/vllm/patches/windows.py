# SPDX-License-Identifier: Apache-2.0
"""Opens kvcached's version windows for vLLM 0.31 and later.

Runs in: every process, while vLLM is being imported, before kvcached patches it.
"""

from __future__ import annotations

import logging

from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.vllm.adapter.locate import KVCACHED_PATCH_MANAGER, KVCACHED_VERSION_RANGE
from kvcached_nixl.vllm.adapter.series import BEYOND_KVCACHED
from kvcached_nixl.vllm.patches.actions.windows import WINDOWS

__all__ = ["SEAMS"]

_UPSTREAM = "kvcached 0.1.6, kvcached/integration/version_utils.py and vllm/autopatch.py"
_REMOVE_WHEN = "kvcached accepts these versions itself"

CONTAINS = Patch(
    target=KVCACHED_VERSION_RANGE,
    attribute="contains",
    process="every",
    parameters=("self", "ver"),
    versions=BEYOND_KVCACHED.later,
    why="kvcached refuses vLLM from 0.31 on by its number, though its patches fit.",
    upstream=_UPSTREAM,
    remove_when=_REMOVE_WHEN,
)


@CONTAINS.around
def contains(call: Call) -> bool:
    return bool(call.proceed()) or WINDOWS.contains(call.instance, call.argument("ver"))


APPLY_ALL_PATCHES = Patch(
    target=KVCACHED_PATCH_MANAGER,
    attribute="apply_all_patches",
    process="every",
    parameters=("self",),
    versions=BEYOND_KVCACHED.later,
    why="kvcached only warns when one of its patches fails, and its windows would stay open.",
    upstream=_UPSTREAM,
    remove_when=_REMOVE_WHEN,
)


@APPLY_ALL_PATCHES.around
def apply_all_patches(call: Call) -> dict[str, bool]:
    found = WINDOWS.while_patched(call.instance.library_name, call.proceed, logging.getLogger(SERVER_LOGGER))
    call.note("kvcached's version windows are open" if WINDOWS.is_open else "kvcached's version windows stay shut")
    return found


SEAMS = (contains, apply_all_patches)
