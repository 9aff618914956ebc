# SPDX-License-Identifier: Apache-2.0
"""A worker extension that reports when prefill's last step was computed and when decode had all KV.

Times are from the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import time
from typing import Any

from kv_probe import KvProbe


class TransferProbe(KvProbe):
    """Runs in the worker process, between two engine steps; hooks the connector's instance, as KvProbe does."""

    _times: dict[str, float]

    def kv_probe_time_transfers(self) -> dict[str, Any]:
        """Start recording the end of every step and of every receive."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        wait_for_save, get_finished = connector.wait_for_save, connector.get_finished
        self._times = times = {"computed": 0.0, "received": 0.0}

        def timed_wait_for_save() -> Any:
            # On a CPU, the computation of the step is complete when the worker calls this.
            times["computed"] = time.monotonic()
            return wait_for_save()

        def timed_get_finished(*args: Any) -> Any:
            found = get_finished(*args)
            if found[1]:
                times["received"] = time.monotonic()
            return found

        connector.wait_for_save, connector.get_finished = timed_wait_for_save, timed_get_finished
        return {}

    def kv_probe_times(self) -> dict[str, Any]:
        """Return when the last step that computed something ended, and when the last receive ended (seconds)."""
        return dict(self._times)
