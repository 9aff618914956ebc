# SPDX-License-Identifier: Apache-2.0
"""Leases: prefill grants one when a request ends, decode's heartbeats renew it, and one that is not renewed expires.

A request may wait in decode's queue for longer than a lease before its blocks are allocated (vllm#38027). So decode
renews the lease from the request's arrival until it has the KV. Nothing here blocks, sleeps or starts a thread. Owned
by the transfer thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcached_nixl.deadlines import Clock, Deadlines
from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.wire.lease import EXTENSION, INTERVAL
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import LeaseRenewal

__all__ = ["Leases", "Renewals"]

SHORTEST_INTERVAL_SECONDS = 0.05
"""Shortest time between two heartbeats, whatever lease the client's parameters name."""
MOST_DUE = 256
"""Most leases that are renewed in one turn, to bound its cost; the others follow in the next turn."""


class Leases(Deadlines[PrefillRequestId]):
    """Prefill: when each lease ends, in the clock's seconds.

    Args:
        lease_seconds: how long a request's blocks are kept for decode after it has ended.
    """

    def __init__(self, clock: Clock, *, lease_seconds: float) -> None:
        super().__init__()
        self._clock = clock
        self._lease_seconds = lease_seconds

    def grant(self, request_id: PrefillRequestId) -> None:
        """The request has ended: its lease begins."""
        self[request_id] = self._clock.now_seconds() + self._lease_seconds

    def renew(self, request_ids: Iterable[PrefillRequestId]) -> None:
        """Handle a heartbeat: extends leases that exist, never shortens one, and never revives one that was removed.

        A lease exists until `take_due` removes it, even if its time has passed. Heartbeats are read before `take_due`
        is called, so a step of prefill may take any time if decode has sent heartbeats meanwhile.
        """
        extended = self._clock.now_seconds() + EXTENSION * self._lease_seconds
        ends = self._at_seconds.get
        self.move({request_id: extended for request_id in request_ids if ends(request_id, extended) < extended})


class Renewals:
    """Decode: which leases to renew, and when the next heartbeat of each is due.

    Several requests may want the same request of prefill; its lease is renewed once, as long as one of them wants it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lease_of: dict[DecodeRequestId, tuple[RemotePrefill, str]] = {}
        self._wanted_by: dict[tuple[RemotePrefill, str], set[DecodeRequestId]] = {}
        self._interval_seconds: dict[tuple[RemotePrefill, str], float] = {}
        self._due = Deadlines[tuple[RemotePrefill, str]]()

    def __len__(self) -> int:
        """Number of requests whose leases are renewed."""
        return len(self._lease_of)

    @property
    def first_seconds(self) -> float | None:
        """When the next heartbeat is due, in the clock's seconds; None if none is."""
        return self._due.first_seconds

    def begin(self, renewal: LeaseRenewal) -> None:
        """A request has arrived. Its first heartbeat is due at once: how long it took to arrive is unknown."""
        request_id, lease_seconds = renewal.request_id, renewal.lease_seconds
        if request_id in self._lease_of:
            return
        lease = self._lease_of[request_id] = renewal.prefill, renewal.name
        wanting = self._wanted_by.setdefault(lease, set())
        if not wanting:
            self._due[lease] = self._clock.now_seconds()
            self._interval_seconds[lease] = max(INTERVAL * lease_seconds, SHORTEST_INTERVAL_SECONDS)
        wanting.add(request_id)

    def end(self, request_id: DecodeRequestId) -> None:
        """The request has its KV, or has ended. Idempotent."""
        lease = self._lease_of.pop(request_id, None)
        if lease is None:
            return
        wanting = self._wanted_by[lease]
        wanting.discard(request_id)
        if not wanting:
            del self._wanted_by[lease], self._interval_seconds[lease]
            self._due.pop(lease, None)

    def take_due(self) -> dict[RemotePrefill, list[str]]:
        """Returns the names whose leases are to be renewed now, by the engine that holds them."""
        now = self._clock.now_seconds()
        found: dict[RemotePrefill, list[str]] = {}
        due = self._due.take_due(now, MOST_DUE)
        self._due.move({lease: now + self._interval_seconds[lease] for lease in due})
        for prefill, name in due:
            found.setdefault(prefill, []).append(name)
        return found
