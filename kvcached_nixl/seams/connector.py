# SPDX-License-Identifier: Apache-2.0
"""Where vLLM asks the NIXL connector how the KV cache must lie.

Runs in every process, while the engine's configuration is made.
"""

from __future__ import annotations

from kvcached_nixl.compat.locate import FACADE
from kvcached_nixl.patching import Call, Patch
from kvcached_nixl.worker.memory_order import required_memory_order

REQUIRED_LAYOUT = Patch(
    target=FACADE,
    attribute="get_required_kvcache_layout",
    kind="classmethod",
    process="every",
    parameters=("cls", "vllm_config"),
    versions="<0.26",
    needs="layout",
    why="kvcached's memory is token-major (NHD) whatever is asked for; called head-major, heads and tokens would swap "
    "between peers that split heads differently.",
    upstream="kvcached#311; vLLM's 4-D packed caches (0.26) made the stock choice right",
    remove_when="vLLM 0.25 is no longer supported",
)


@REQUIRED_LAYOUT.around
def get_required_kvcache_layout(call: Call) -> str | None:
    return required_memory_order(call.proceed())


SEAMS = (get_required_kvcache_layout,)
