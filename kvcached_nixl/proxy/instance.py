# SPDX-License-Identifier: Apache-2.0
"""One server: its health, its load, and what its responses said about it. Once per server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple

from kvcached_nixl.proxy.address import address_of
from kvcached_nixl.proxy.cancel_scope import Guard
from kvcached_nixl.proxy.connections import Connections
from kvcached_nixl.proxy.failure import LegFailed, RouterFailure
from kvcached_nixl.proxy.ranks import Ranks

__all__ = ["Instance", "InstanceLoad", "Booking", "Role", "Health"]


class Role(str, Enum):
    """The role of a server."""

    PREFILL = "prefill"
    DECODE = "decode"


class Health(str, Enum):
    """Health of a server, as its health checks report it."""

    NEW = "new"
    """Not checked yet, so it gets no requests."""
    UP = "up"
    DOWN = "down"


class InstanceLoad(NamedTuple):
    """What a policy knows about a server.

    Attributes:
        name: host and port; constant while the server is known. Where the router chooses the data-parallel rank, each
            rank is a candidate of its own, named ``HOST:PORT#RANK``.
        requests: number of legs in flight.
        tokens: estimated number of tokens of those legs, prompt and output.
    """

    name: str
    requests: int
    tokens: int


class Booking(NamedTuple):
    """Where a request can go: a server and one of its data-parallel ranks. If ``rank`` is None, the server chooses."""

    server: Instance
    rank: int | None


class Instance:
    """See the module. Call its methods on the event loop's thread only.

    Attributes:
        ranks: of a prefill server: what its responses said about its data-parallel ranks.
        requests, tokens: number of legs in flight, and an estimate of their tokens.
        keeping: number of requests whose KV it keeps until decode begins to respond.
        is_doubted: a connection could not be opened, and no health check has succeeded since.
        is_warned: a warning about responses without kv_transfer_params was logged.
        last_failure: text for the operator.
        reported_failures: hand-over failures that a decode server reported at the last check; None before the first.
        suspected: set when a leg failed in a way that calls for a health check at once.
        quiet: set while no leg is in flight.
    """

    def __init__(self, role: Role, url: str, connect_timeout_seconds: float) -> None:
        self.role = role
        self.url = url
        self.name = address_of(url)
        self.state = Health.NEW
        self.is_draining = False
        self.is_doubted = False
        self.is_warned = False
        self.ranks = Ranks(self.name)
        self.last_failure = ""
        self.reported_failures: float | None = None
        self.requests = 0
        self.keeping = 0
        self.tokens = 0
        self.suspected = asyncio.Event()
        self.quiet = asyncio.Event()
        self.quiet.set()
        self.connections = Connections(self.name, url, connect_timeout_seconds)
        self._guards: set[Guard] = set()
        self._of_ranks: dict[int, InstanceLoad] = {}

    @property
    def is_usable(self) -> bool:
        """Whether new requests may go to this server."""
        return self.state is Health.UP and not self.is_draining

    @property
    def places(self) -> list[Booking]:
        """Where a request can go on this server: one place per rank if several are known, otherwise one place."""
        return [Booking(self, rank) for rank in self.ranks.named or (None,)]

    def load(self, rank: int | None) -> InstanceLoad:
        """Load of the whole server, or of one rank. For a rank only the legs are counted that named it."""
        if rank is None:
            return InstanceLoad(self.name, self.requests, self.tokens)
        return self._of_ranks.get(rank) or InstanceLoad(f"{self.name}#{rank}", 0, 0)

    @property
    def is_busy(self) -> bool:
        """Whether stopping it now would cost a request."""
        return self.requests > 0 or self.keeping > 0

    @contextmanager
    def kept(self) -> Iterator[Callable[[], None]]:
        """Count a request whose KV prefill keeps: until the yielded function is called, or the block is left."""
        is_kept = True

        def taken() -> None:
            nonlocal is_kept
            self.keeping -= is_kept
            is_kept = False

        self.keeping += 1
        try:
            yield taken
        finally:
            taken()

    @contextmanager
    def leg(self, tokens: int, rank: int | None = None) -> Iterator[Guard]:
        """One leg of a request: counted as load, and ended with an error when the server is found dead."""
        self._count(rank, 1, tokens)
        self.quiet.clear()
        guard = Guard()
        self._guards.add(guard)
        try:
            with guard:
                yield guard
        finally:
            self._guards.discard(guard)
            self._count(rank, -1, -tokens)
            if not self.requests:
                self.quiet.set()

    def failed(self, failure: LegFailed) -> None:
        """Record a failed leg, and start a health check at once if the failure may be the server's.

        The other legs of the server go on until a health check fails: a busy server may refuse a connection, too.
        """
        self.last_failure = failure.reason
        if failure.cause in (
            RouterFailure.UNREACHABLE,
            RouterFailure.BROKEN,
            RouterFailure.TIME,
            RouterFailure.RESTARTED,
            RouterFailure.LOST,
        ):
            self.ranks.forget()
            self.suspected.set()
        if failure.cause is RouterFailure.UNREACHABLE:
            self.is_doubted = True

    def went_down(self, reason: str) -> None:
        """Mark the server as down, and end all its legs with an error."""
        self.state = Health.DOWN
        self.last_failure = reason
        self.ranks.forget()
        for guard in tuple(self._guards):
            guard.end(LegFailed(RouterFailure.LOST, self.name, "its health checks fail", status=502))

    def came_up(self) -> None:
        self.state = Health.UP
        self.is_doubted = self.is_warned = False

    def _count(self, rank: int | None, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens
        if rank is None:
            return
        before = self.load(rank)
        self._of_ranks[rank] = InstanceLoad(before.name, before.requests + requests, before.tokens + tokens)
        if not self._of_ranks[rank].requests:
            del self._of_ranks[rank]
