# SPDX-License-Identifier: Apache-2.0
"""Times steps, transfers and copies; for `kv_probe`, in the worker process.

Times are from the machine's monotonic clock, which all its processes share. Needs an executor that runs the worker in
the engine's process.
"""

from __future__ import annotations

import time
from typing import Any


class KvTimes:
    """Methods of `KvProbe`, which hook the connector's instance, as its others do."""

    # Set by KvProbe.
    _kv_probe_connector: Any
    _kv_probe_side: Any
    _times: dict[str, float]
    _copied_seconds: list[float]

    def kv_probe_time_transfers(self) -> dict[str, Any]:
        """Start recording the end of every step and of every receive. Idempotent."""
        if hasattr(self, "_times"):
            return {}
        connector = self._kv_probe_connector
        wait_for_save, get_finished = connector.wait_for_save, connector.get_finished
        self._times = times = {"computed": 0.0, "received": 0.0, "freed": 0.0}

        def timed_wait_for_save() -> Any:
            # On a CPU, the computation of the step is complete when the worker calls this.
            times["computed"] = time.monotonic()
            return wait_for_save()

        def timed_get_finished(*args: Any) -> Any:
            found = get_finished(*args)
            side = self._kv_probe_side
            if found[1] or (side is not None and side._report.ended):
                times["received"] = time.monotonic()
            return found

        connector.wait_for_save, connector.get_finished = timed_wait_for_save, timed_get_finished
        return {}

    def kv_probe_times(self) -> dict[str, Any]:
        """Return when the last step that computed something ended, when the last receive ended, and, after
        `kv_probe_time_copies`, when blocks were last freed."""
        return dict(self._times)

    def kv_probe_time_copies(self) -> dict[str, Any]:
        """Start recording how long each copy takes, and when blocks are freed. Returns whether KV is staged."""
        from kvcached.kv_cache_manager import KVCacheManager

        times, free = self._times, KVCacheManager.free
        self._copied_seconds = seconds = []

        def timed_free(*args: Any) -> Any:
            # Noted before the call: free unmaps pages, too, which takes time.
            times["freed"] = time.monotonic()
            return free(*args)

        KVCacheManager.free = timed_free
        staging = self._kv_probe_side.thread._context.staging
        if staging is None:
            return {"staged": False}

        def timed(copy: Any) -> Any:
            def timed_copy(*args: Any) -> None:
                begun = time.monotonic()
                copy(*args)
                seconds.append(time.monotonic() - begun)

            return timed_copy

        staging.slab.gather, staging.slab.scatter = timed(staging.slab.gather), timed(staging.slab.scatter)
        return {"staged": True}

    def kv_probe_copied(self) -> dict[str, Any]:
        taken = list(self._copied_seconds)
        del self._copied_seconds[: len(taken)]
        return {"seconds": sum(taken)}
