# SPDX-License-Identifier: Apache-2.0
"""Prefill's leases: a request that ends is granted one, decode's beats renew it, and what is not renewed expires.

The stock worker keeps them in a dictionary and looks at its first entry only, so a renewed lease shelters expired ones
behind it (vLLM 0.22 to 0.30). Nothing here blocks, sleeps, sends or starts a thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcached_nixl.clock import Clock
from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.ids import PrefillRequestId

__all__ = ["Leases"]


class Leases:
    """See the module. Once per worker.

    Args:
        extension_seconds: how long a beat lets a lease last from then on, at least.
    """

    def __init__(self, clock: Clock, *, extension_seconds: float) -> None:
        self._clock = clock
        self._extension_seconds = extension_seconds
        self._ends = Deadlines[PrefillRequestId]()

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, request_id: PrefillRequestId) -> bool:
        return request_id in self._ends

    def grant(self, request_id: PrefillRequestId, seconds: float) -> None:
        """The request has ended, and its blocks are kept for ``seconds`` from now on."""
        self._ends.set(request_id, self._clock.now_seconds() + seconds)

    def renew(self, request_ids: Iterable[PrefillRequestId]) -> None:
        """A beat came. It renews what is held; it takes nothing away, and revives nothing that is over."""
        now = self._clock.now_seconds()
        for request_id in request_ids:
            ends = self._ends.get(request_id)
            if ends is not None and now < ends < now + self._extension_seconds:
                self._ends.set(request_id, now + self._extension_seconds)

    def end(self, request_id: PrefillRequestId) -> None:
        """Everything was fetched, or nobody will fetch it. Again is harmless."""
        self._ends.discard(request_id)

    def expire(self) -> list[PrefillRequestId]:
        """Those whose time is over, each once; their blocks are to be given back now."""
        return self._ends.take_due(self._clock.now_seconds())

    @property
    def next_seconds(self) -> float | None:
        """When the next one is over, if it is not renewed."""
        return self._ends.first_seconds
