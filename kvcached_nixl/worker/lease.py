# SPDX-License-Identifier: Apache-2.0
"""Prefill's leases: a request that ends is granted one, decode's beats renew it, and what is not renewed expires.

In place of the stock worker's dictionary, of which it looks at the first entry only: there, a renewed lease shelters
the expired ones behind it (vLLM up to 0.30), and here the first entry is the one that ends first. Nothing here blocks,
sleeps, sends or starts a thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcached_nixl.clock import Clock
from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.lease import EXTENSION

__all__ = ["Leases"]


class Leases(Deadlines[PrefillRequestId]):
    """When each lease ends, in the clock's seconds. Once per worker.

    Args:
        lease_seconds: how long a request's blocks are kept for decode when it has ended.
    """

    def __init__(self, clock: Clock, *, lease_seconds: float) -> None:
        super().__init__()
        self._clock = clock
        self._lease_seconds = lease_seconds

    def grant(self, request_id: PrefillRequestId) -> None:
        """The request has ended."""
        self[request_id] = self._clock.now_seconds() + self._lease_seconds

    def renew(self, request_ids: Iterable[PrefillRequestId]) -> None:
        """A beat was read. It renews what is held; it takes nothing away, and revives nothing that is gone.

        What nobody has looked for is held even if its time is over: beats are read before anyone looks, so a step of
        prefill's may be as long as it likes if decode has beaten meanwhile.
        """
        extended = self._clock.now_seconds() + EXTENSION * self._lease_seconds
        ends = self._at_seconds.get
        self.move({request_id: extended for request_id in request_ids if ends(request_id, extended) < extended})
