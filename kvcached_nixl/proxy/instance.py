# SPDX-License-Identifier: Apache-2.0
"""One server: its health, its load, and what its responses said about it. Once per server."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple

from kvcached_nixl.proxy.address import address_of
from kvcached_nixl.proxy.cancel_scope import Guard
from kvcached_nixl.proxy.failure import LegFailed, RouterFailure
from kvcached_nixl.proxy.kind import Capacity, Kind
from kvcached_nixl.proxy.ranks import Ranks

__all__ = ["Instance", "InstanceLoad", "Booking", "Role", "Health", "Leg"]

FIRST_DOUBT_SECONDS = 0.5
MOST_DOUBT_SECONDS = 30.0
_DOUBTFUL = (
    RouterFailure.UNREACHABLE,
    RouterFailure.CONNECT,
    RouterFailure.BROKEN,
    RouterFailure.TIME,
    RouterFailure.RESTARTED,
    RouterFailure.LOST,
)


class Role(str, Enum):
    """The role of a server."""

    PREFILL = "prefill"
    DECODE = "decode"


class Health(str, Enum):
    """Health of a server, by its health checks and its responses."""

    NEW = "new"
    """Not checked yet, so it gets no requests."""
    UP = "up"
    SILENT = "silent"
    """It has sent nothing for long. It gets requests only if most servers of its role are silent."""
    DOWN = "down"
    """Nobody listens there, or it says itself that it cannot serve."""


class InstanceLoad(NamedTuple):
    """What a policy knows about a server.

    Attributes:
        name: host and port; constant while the server is known. Where the router chooses the data-parallel rank, each
            rank is a candidate of its own, named ``HOST:PORT#RANK``.
        requests: number of legs in flight.
        tokens: estimated number of tokens of those legs, prompt and output.
        room_tokens: of KV that it has room for beside what it has to do, by what it said last; infinite if it does not
            say it. Of the whole server.
    """

    name: str
    requests: int
    tokens: int
    room_tokens: float = math.inf


class Booking(NamedTuple):
    """Where a request can go: a server and one of its data-parallel ranks. If ``rank`` is None, the server chooses."""

    server: Instance
    rank: int | None


class Leg:
    """One request to a server that is in flight.

    Attributes:
        guard: ends it.
        heard_seconds: ``time.monotonic`` of the last byte from the server, or of the leg's begin.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self.guard = Guard()
        self.heard_seconds = time.monotonic()

    def heard(self) -> None:
        """The server has sent something."""
        self.heard_seconds = self._instance.heard_seconds = time.monotonic()


class Instance:
    """See the module. Call its methods on the event loop's thread only.

    Attributes:
        ranks: of a prefill server: what its responses said about its data-parallel ranks.
        kind: which servers it can hand over to; None if that is not known, and tried.
        capacity: what it said last of its memory.
        sent_tokens: of a decode server: of prompts that were sent to it since then, less those that have ended.
        epoch: drawn when it was added, and again when it goes down; no two servers of one name share one.
        weight: its share of the requests, relative to the others of its role.
        requests, tokens: number of legs in flight, and an estimate of their tokens.
        computing_tokens: of a decode server: of prompts that it computes itself now.
        keeping: number of requests whose KV it keeps until decode begins to respond.
        heard_seconds: ``time.monotonic`` of its last byte, of a leg or a check; at first, of its creation.
        is_warned: a warning about responses without kv_transfer_params was logged.
        last_failure: text for the operator.
        reported_failures: hand-over failures that a decode server reported at the last check; None before the first.
        suspected: set when a leg failed in a way that calls for a health check and a look at its metrics at once.
        quiet: set while no leg is in flight.
        next_look_seconds: ``time.monotonic`` of the next health check.
    """

    def __init__(self, role: Role, url: str, weight: float = 1.0) -> None:
        self.role = role
        self.weight = weight
        self.kind: Kind | None = None
        self.capacity: Capacity | None = None
        self.sent_tokens = 0
        self.epoch = time.monotonic_ns()
        self.url = url.rstrip("/")
        self.name = address_of(url)
        self.state = Health.NEW
        self.is_draining = False
        self.is_warned = False
        self.ranks = Ranks(self.name)
        self.last_failure = ""
        self.reported_failures: float | None = None
        self.requests = 0
        self.keeping = 0
        self.tokens = 0
        self.computing_tokens = 0
        self.heard_seconds = time.monotonic()
        self.next_look_seconds = self.heard_seconds
        self.suspected = asyncio.Event()
        self.quiet = asyncio.Event()
        self.quiet.set()
        self._legs: set[Leg] = set()
        # Number of legs, and their tokens.
        self._of_ranks: dict[int, tuple[int, int]] = {}
        self._failed_in_row = 0
        self._doubted_until_seconds = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether new requests may go to this server."""
        return self.state is Health.UP and not self.is_draining

    @property
    def is_doubted(self) -> bool:
        """Whether its last legs failed, so that other servers are preferred for a while."""
        return time.monotonic() < self._doubted_until_seconds

    @property
    def places(self) -> list[Booking]:
        """Where a request can go on this server: one place per rank if several are known, otherwise one place."""
        return [Booking(self, rank) for rank in self.ranks.named or (None,)]

    def load(self, rank: int | None) -> InstanceLoad:
        """Load of the whole server, or of one rank. For a rank only the legs are counted that named it."""
        if rank is None:
            return InstanceLoad(self.name, self.requests, self.tokens, self.room_tokens(1.0))
        return InstanceLoad(f"{self.name}#{rank}", *self._of_ranks.get(rank, (0, 0)), self.room_tokens(1.0))

    def heard_of_capacity(self, capacity: Capacity | None) -> None:
        """One of its engines has said its capacity with an answer; it counts if the server has no other engine."""
        if capacity is not None and self.capacity is not None and self.capacity.num_engines == 1:
            self.capacity = capacity

    def room_tokens(self, fill: float) -> float:
        """How many tokens of prompts it may still get until it has ``fill`` times as much to do as it can hold.

        Infinite if it does not say what it can hold.
        """
        if self.capacity is None:
            return math.inf
        demand_tokens = max(0.0, self.capacity.demand_tokens + self.sent_tokens)
        return max(0.0, fill * self.capacity.tokens - demand_tokens)

    @property
    def is_busy(self) -> bool:
        """Whether stopping it now would cost a request."""
        return self.requests > 0 or self.keeping > 0

    @contextmanager
    def counted(self, *, keeping: int = 0, computing_tokens: int = 0) -> Iterator[Callable[[], None]]:
        """Count a request by these attributes: until the yielded function is called, or the block is left."""
        left = [(keeping, computing_tokens)]

        def add(sign: int, counts: tuple[int, int]) -> None:
            self.keeping += sign * counts[0]
            self.computing_tokens += sign * counts[1]

        def done() -> None:
            if left:
                add(-1, left.pop())

        add(1, left[0])
        try:
            yield done
        finally:
            done()

    @contextmanager
    def leg(self, tokens: int, rank: int | None = None) -> Iterator[Leg]:
        """One leg of a request, counted as load."""
        self._count(rank, 1, tokens)
        self.quiet.clear()
        leg = Leg(self)
        self._legs.add(leg)
        try:
            with leg.guard:
                yield leg
        finally:
            self._legs.discard(leg)
            self._count(rank, -1, -tokens)
            if not self.requests:
                self.quiet.set()

    def failed(self, failure: LegFailed) -> None:
        """Record a failed leg, and start a health check at once if the failure may be the server's.

        The other legs go on: a busy server may refuse a connection, too. But other servers are preferred, for a time
        that doubles with each failure in a row.
        """
        self.last_failure = failure.reason
        if failure.cause is RouterFailure.HANDOVER:
            # Its weights may have been changed, or those of the other side.
            self.suspected.set()
        if failure.cause not in _DOUBTFUL:
            return
        doubt_seconds = min(FIRST_DOUBT_SECONDS * 2.0 ** min(self._failed_in_row, 16), MOST_DOUBT_SECONDS)
        self._failed_in_row += 1
        self._doubted_until_seconds = time.monotonic() + doubt_seconds
        self.ranks.forget()
        self.suspected.set()

    def succeeded(self) -> None:
        """Record a response, or a health check that succeeded."""
        self._failed_in_row = 0
        self._doubted_until_seconds = 0.0

    def end_legs(self, reason: str, silent_seconds: float = 0.0) -> None:
        """End the legs that have heard nothing for ``silent_seconds``, with an error."""
        now = time.monotonic()
        for leg in tuple(self._legs):
            if now - leg.heard_seconds >= silent_seconds:
                leg.guard.end(LegFailed(RouterFailure.LOST, self.name, reason, status=502))

    def _count(self, rank: int | None, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens
        if rank is None:
            return
        others, other_tokens = self._of_ranks.get(rank, (0, 0))
        self._of_ranks[rank] = others + requests, other_tokens + tokens
        if not self._of_ranks[rank][0]:
            del self._of_ranks[rank]
