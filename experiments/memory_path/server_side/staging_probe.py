# SPDX-License-Identifier: Apache-2.0
"""A worker extension that reports how long prefill copied KV out of its blocks, and when kvcached got the blocks back.

Also reports what TransferProbe reports. Needs an executor that runs the worker in the engine's process.
"""

from __future__ import annotations

import time
from typing import Any

from transfer_probe import TransferProbe


class StagingProbe(TransferProbe):
    """Runs in the worker process; hooks the copier of kvcached_nixl's instance, if it has one."""

    _copied_seconds: list[float]
    _freed: dict[str, float]

    def kv_probe_time_copies(self) -> dict[str, Any]:
        """Start recording how long each copy takes, and when blocks are freed. Returns whether KV is staged."""
        from kvcached.kv_cache_manager import KVCacheManager
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._copied_seconds = seconds = []
        self._freed = freed = {"at": 0.0}
        free = KVCacheManager.free

        def timed_free(*args: Any) -> Any:
            # Noted before the call: free unmaps pages, too, which takes time.
            freed["at"] = time.monotonic()
            return free(*args)

        KVCacheManager.free = timed_free
        staging = vars(get_kv_transfer_group())["_kvcached_nixl"].thread._context.staging
        if staging is None:
            return {"staged": False}
        do = staging.copier._do

        def timed_do(*args: Any) -> Any:
            begun = time.monotonic()
            failed = do(*args)
            seconds.append(time.monotonic() - begun)
            return failed

        staging.copier._do = timed_do
        return {"staged": True}

    def kv_probe_copied(self) -> dict[str, Any]:
        """Return the total seconds of copying since the last call, the number of copies, and when blocks were last
        freed (monotonic seconds)."""
        taken = list(self._copied_seconds)
        del self._copied_seconds[: len(taken)]
        return {"seconds": sum(taken), "copies": len(taken), "freed": self._freed["at"]}
