# SPDX-License-Identifier: Apache-2.0
"""Chooses the servers of one request, and waits while none is up. Once per request."""

from __future__ import annotations

import time

import anyio

from kvcached_nixl.proxy.failure import LegFailed, Refusal, RouterFailure
from kvcached_nixl.proxy.fleet import Fleet
from kvcached_nixl.proxy.instance import Booking, Role
from kvcached_nixl.proxy.kind import Kind
from kvcached_nixl.proxy.policy import Wanted
from kvcached_nixl.proxy.record import Record

__all__ = ["ServerChoice"]

LOOK_AGAIN_SECONDS = 1.0
"""How long a request for which no pair fits waits before the servers are looked at again."""
NO_PAIR = "No prefill and no decode server that are up have the same model, version and direction. Try again."


class ServerChoice:
    """See the module. Waiting for servers takes at most ``queue_timeout_seconds`` per request, from `begin` on.

    Args:
        wanted: what the request needs of a server.
        preferred: a prefill server that is to be preferred, by name; "" for none.
    """

    def __init__(self, fleet: Fleet, wanted: Wanted, record: Record, preferred: str) -> None:
        self._fleet = fleet
        self._wanted = wanted
        self._record = record
        self._preferred = preferred
        self._tried: set[str] = set()
        self._deadline_seconds = 0.0

    def begin(self) -> None:
        """The request is admitted: from now on its waiting counts."""
        self._deadline_seconds = time.monotonic() + self._fleet.options.queue_timeout_seconds

    @property
    def has_time(self) -> bool:
        """Whether the request may still wait for a server."""
        return time.monotonic() < self._deadline_seconds

    def extend(self, seconds: float) -> None:
        """Let this time, in which the request did not wait for a server, not count."""
        self._deadline_seconds += seconds

    def avoid(self, name: str) -> None:
        """Choose this server again only if there is no other."""
        self._tried.add(name)

    async def choose(
        self, role: Role, beside: Role | None = None, prefill: str = "", fits: Kind | None = None
    ) -> Booking:
        """Returns where the request goes. Waits in the queue while none is up that `Fleet.choose` would take.

        Args:
            prefill: name of the server that ``fits`` is the kind of.

        Raises:
            Refusal: none came up in time.
            LegFailed: decode servers are up, but none fits this prefill server any more.
        """
        with self._record.trace.part("queue", role=role.value):
            return await self._chosen(role, beside, prefill, fits)

    async def _chosen(self, role: Role, beside: Role | None, prefill: str, fits: Kind | None) -> Booking:
        while True:
            place = self._fleet.choose(role, self._wanted, self._tried, self._preferred, beside, fits)
            if place is not None:
                return place
            left_seconds = self._deadline_seconds - time.monotonic()
            missing = next((one for one in (role, beside) if one is not None and not self._fleet.is_up(one)), None)
            message = f"No {missing.value} server is up. Try again." if missing else NO_PAIR
            if missing is None:
                self._fleet.suspect()
                left_seconds = min(left_seconds, LOOK_AGAIN_SECONDS)
                if prefill:
                    reason = "no decode server that fits it is up any more"
                    raise LegFailed(RouterFailure.NO_SERVER, prefill, reason, status=503)
            missing = missing or role
            if left_seconds <= 0 or not self._fleet.has(missing):
                retry_seconds = self._fleet.retry_seconds(missing)
                raise Refusal(503, RouterFailure.NO_SERVER, message, retry_after_seconds=retry_seconds)
            with anyio.move_on_after(left_seconds):
                await self._fleet.change()
