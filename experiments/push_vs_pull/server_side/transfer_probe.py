# SPDX-License-Identifier: Apache-2.0
"""A worker extension that tells when prefill's last step had been computed and when decode had everything.

Times are the machine's monotonic clock, which all processes of it share.
"""

from __future__ import annotations

import time
from typing import Any

from kv_probe import KvProbe


class TransferProbe(KvProbe):
    """Runs in the worker process, between two engine steps; hooks the connector's instance, as KvProbe does."""

    _times: dict[str, float]

    def kv_probe_time_transfers(self) -> dict[str, Any]:
        """Note the end of every step and of every receive from now on."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        wait_for_save, get_finished = connector.wait_for_save, connector.get_finished
        self._times = times = {"computed": 0.0, "received": 0.0}

        def timed_wait_for_save() -> Any:
            # The CPU worker has computed when it gets here.
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
        """When the last step with something to compute had ended, and when the last receive had (seconds)."""
        return dict(self._times)
