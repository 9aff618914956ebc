# SPDX-License-Identifier: Apache-2.0
"""A worker extension that tells how long prefill has copied out of its blocks, beside what TransferProbe tells."""

from __future__ import annotations

import time
from typing import Any

from transfer_probe import TransferProbe


class StagingProbe(TransferProbe):
    """Runs in the worker process; hooks the copier of kvcached_nixl's instance, if it has one."""

    _copied_seconds: list[float]

    def kv_probe_time_copies(self) -> dict[str, Any]:
        """Note how long each copy takes from now on. Returns whether KV is staged."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._copied_seconds = seconds = []
        staging = vars(get_kv_transfer_group())["_kvcached_nixl"].thread._side.staging
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
        """How long was copied since the last call (seconds, all in all), and in how many pieces."""
        taken = list(self._copied_seconds)
        del self._copied_seconds[: len(taken)]
        return {"seconds": sum(taken), "copies": len(taken)}
