# SPDX-License-Identifier: Apache-2.0
"""One server: whether it may be asked, what it is asked now, and what it has said of itself. Once per server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvcached_nixl.proxy.address import address_of
from kvcached_nixl.proxy.connections import Connections
from kvcached_nixl.proxy.failure import Cause, LegFailed
from kvcached_nixl.proxy.guard import Guard
from kvcached_nixl.wire.params import KvTransferParams, RemotePrefill

__all__ = ["Found", "Instance", "Load", "Role", "State"]


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
        name: host and port; stays the same as long as the server is known.
        requests: legs that it works on.
        tokens: about how many tokens are still to be computed by it, prompt and answer.
    """

    name: str
    requests: int
    tokens: int


@dataclass(frozen=True)
class Found:
    """What a prefill server's own answer said of it.

    Attributes:
        start: drawn when its engine started; "" where it does not say.
        pushes: it writes; decode may be asked at the same time.
    """

    where: RemotePrefill
    start: str
    pushes: bool

    @classmethod
    def of(cls, params: KvTransferParams) -> Found:
        """Raises `Malformed`: a coordinate is missing."""
        manifest = params.manifest
        # A name alone leads decode to nothing at servers without this package: theirs are asked one after the other.
        pushes = params.transfer_mode == "push" and manifest is not None
        return cls(params.prefill, "" if manifest is None else manifest.start, pushes)


class Instance:
    """See the module. Its methods are for the event loop's thread.

    Attributes:
        found: of a prefill server; None before its first answer, and when it may not be what it was.
        requests, tokens: legs that it works on, and about what is to be computed for them.
        keeping: requests whose KV it keeps for a decode that has not begun to answer.
        is_doubted: it refused a connection, and no health check has succeeded since.
        last_failure: words for a person.
        reported_failures: hand-overs without KV that a decode server has counted, when last looked at.
    """

    def __init__(self, role: Role, url: str, connect_seconds: float) -> None:
        self.role = role
        self.url = url
        self.name = address_of(url)
        self.state = State.NEW
        self.is_draining = False
        self.is_doubted = False
        self.is_warned = False
        self.found: Found | None = None
        self.last_failure = ""
        self.reported_failures: float | None = None
        self.requests = 0
        self.keeping = 0
        self.tokens = 0
        self.suspected = asyncio.Event()
        self.quiet = asyncio.Event()
        self.quiet.set()
        self.connections = Connections(self.name, url, connect_seconds)
        self._guards: set[Guard] = set()

    @property
    def is_usable(self) -> bool:
        """Whether new requests may go to it."""
        return self.state is State.UP and not self.is_draining

    @property
    def load(self) -> Load:
        return Load(self.name, self.requests, self.tokens)

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
    def leg(self, tokens: int) -> Iterator[Guard]:
        """A leg of a request: counted while it lasts, and ended when the server is lost."""
        self.requests += 1
        self.tokens += tokens
        self.quiet.clear()
        guard = Guard()
        self._guards.add(guard)
        try:
            with guard:
                yield guard
        finally:
            self._guards.discard(guard)
            self.requests -= 1
            self.tokens -= tokens
            if not self.requests:
                self.quiet.set()

    def failed(self, failure: LegFailed) -> None:
        """A leg has failed: what it says of the server is looked into at once.

        Only a health check ends what else it works on: a server that is busy may refuse a connection, too.
        """
        self.last_failure = failure.words
        if failure.cause in (Cause.UNREACHABLE, Cause.BROKEN, Cause.TIME, Cause.RESTARTED, Cause.LOST):
            self.found = None
            self.suspected.set()
        if failure.cause is Cause.UNREACHABLE:
            self.is_doubted = True

    def went_down(self, words: str) -> None:
        """Nothing goes to it any more, and whoever waits for it waits no longer."""
        self.state = State.DOWN
        self.last_failure = words
        self.found = None
        for guard in tuple(self._guards):
            guard.end(LegFailed(Cause.LOST, self.name, "its health checks fail", status=502))

    def came_up(self) -> None:
        self.state = State.UP
        self.is_doubted = self.is_warned = False
