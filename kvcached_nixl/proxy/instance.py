# SPDX-License-Identifier: Apache-2.0
"""One server: whether it may be asked, what it is asked now, and what it has said of itself. Once per server."""

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

__all__ = ["Instance", "Load", "Place", "Role", "State"]


class Role(str, Enum):
    """What a server does for the router."""

    PREFILL = "prefill"
    DECODE = "decode"


class State(str, Enum):
    """Whether a server's health checks succeed."""

    NEW = "new"
    """Nothing is known yet; it is not asked."""
    UP = "up"
    DOWN = "down"


class Load(NamedTuple):
    """What a policy sees of a server.

    Attributes:
        name: host and port; stays the same as long as the server is known. Where the router says which data-parallel
            rank computes, each rank is one of its own, with ``#`` and its number behind the name.
        requests: legs that it works on.
        tokens: about how many tokens are still to be computed by it, prompt and answer.
    """

    name: str
    requests: int
    tokens: int


class Place(NamedTuple):
    """Where a request may go: a server, and which data-parallel rank of it computes; None leaves that to the server."""

    server: Instance
    rank: int | None


class Instance:
    """See the module. Its methods are for the event loop's thread.

    Attributes:
        ranks: of a prefill server: what its answers have said of it.
        requests, tokens: legs that it works on, and about what is to be computed for them.
        keeping: requests whose KV it keeps for a decode that has not begun to answer.
        is_doubted: it refused a connection, and no health check has succeeded since.
        last_failure: words for a person.
        reported_failures: hand-overs without KV that a decode server has counted, when last looked at.
    """

    def __init__(self, role: Role, url: str, connect_timeout_seconds: float) -> None:
        self.role = role
        self.url = url
        self.name = address_of(url)
        self.state = State.NEW
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
        self._of_ranks: dict[int, Load] = {}

    @property
    def is_usable(self) -> bool:
        """Whether new requests may go to it."""
        return self.state is State.UP and not self.is_draining

    @property
    def places(self) -> list[Place]:
        """Where at it a request may go: one place, but where it is known that it has several ranks to name."""
        return [Place(self, rank) for rank in self.ranks.named or (None,)]

    def load(self, rank: int | None) -> Load:
        """Of the whole server, or of one rank: of that, what was sent to it by name."""
        if rank is None:
            return Load(self.name, self.requests, self.tokens)
        return self._of_ranks.get(rank) or Load(f"{self.name}#{rank}", 0, 0)

    @property
    def is_busy(self) -> bool:
        """Whether stopping it now would cost a request."""
        return self.requests > 0 or self.keeping > 0

    @contextmanager
    def kept(self) -> Iterator[Callable[[], None]]:
        """Prefill has answered, and decode has not taken all of it: the block, or until what it yields is called."""
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
        """A leg of a request: counted while it lasts, and ended when the server is lost."""
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
        """A leg has failed: what it says of the server is looked into at once.

        Only a health check ends what else it works on: a server that is busy may refuse a connection, too.
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
        """Nothing goes to it any more, and whoever waits for it waits no longer."""
        self.state = State.DOWN
        self.last_failure = reason
        self.ranks.forget()
        for guard in tuple(self._guards):
            guard.end(LegFailed(RouterFailure.LOST, self.name, "its health checks fail", status=502))

    def came_up(self) -> None:
        self.state = State.UP
        self.is_doubted = self.is_warned = False

    def _count(self, rank: int | None, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens
        if rank is None:
            return
        before = self.load(rank)
        self._of_ranks[rank] = Load(before.name, before.requests + requests, before.tokens + tokens)
        if not self._of_ranks[rank].requests:
            del self._of_ranks[rank]
