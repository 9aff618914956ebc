# SPDX-License-Identifier: Apache-2.0
"""Connections of a push: which rank of the other side is known under which agent, and handshakes under way.

A handshake runs in a pool of threads, so a peer that hangs holds up no other. A connection that is lost between living
engines is made anew by another one; meanwhile the agent stays known, for what is in flight to it. Owned by the writer
thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.base import Transport
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.wire.push import Peer
from kvcached_nixl.worker.push_commands import Connected, PeerGone

__all__ = ["Connections", "Made", "NotMade"]

logger = logging.getLogger(SERVER_LOGGER)

HANDSHAKES_AT_ONCE = 8
HANDSHAKE_TRIES = 5
"""In a row, of a peer that listens and does not answer: one that stands still for seconds has not gone."""


class Made(NamedTuple):
    """A handshake is done. ``gone``: another agent that was known there, and is not any more."""

    agent: str
    planes: Planes
    gone: str | None


class NotMade(NamedTuple):
    """A handshake failed. ``gone``: the agent that was known there, if it is known now that nobody lives there."""

    address: Peer
    cause: Exception
    gone: str | None


class Connections:
    """See the module.

    Args:
        connect: asks a rank; blocks, on a thread of the pool. Raises `PeerGone` if the rank is gone for good, anything
            else if that is not known.
        wake: called, on any thread, when a handshake has ended.
    """

    def __init__(self, transport: Transport, connect: Callable[[Peer], Connected], wake: Callable[[], None]) -> None:
        self._transport = transport
        self._connect = connect
        self._wake = wake
        self._agents: dict[Peer, str] = {}
        self._lost: set[Peer] = set()
        self._asked: dict[Peer, Future[Connected]] = {}
        self._unanswered: Counter[Peer] = Counter()
        self._pool = ThreadPoolExecutor(HANDSHAKES_AT_ONCE, thread_name_prefix="kvcached-nixl-handshake")

    @property
    def is_asking(self) -> bool:
        """Whether a handshake is under way."""
        return bool(self._asked)

    def agent_at(self, address: Peer) -> str | None:
        """Who is known there, also while the connection is lost."""
        return self._agents.get(address)

    def addresses_of(self, agents: Collection[str]) -> list[Peer]:
        """Where these are known."""
        return [address for address, agent in self._agents.items() if agent in agents]

    def agents_at(self, addresses: Collection[Peer]) -> list[str] | None:
        """Who is known at each of these; None until somebody is at all of them and no connection is lost."""
        if any(address not in self._agents or address in self._lost for address in addresses):
            return None
        return [self._agents[address] for address in addresses]

    def ask(self, address: Peer, *, again: bool = False) -> None:
        """Begin a handshake with a rank, unless one is under way; ``again``: also with one that is known."""
        if (again or address not in self._agents) and address not in self._asked:
            self._asked[address] = self._pool.submit(self._connect, address)
            self._asked[address].add_done_callback(lambda _: self._wake())

    def make_anew(self, address: Peer) -> None:
        """The connection was lost; NIXL makes no other one while it knows the agent."""
        if address not in self._asked:
            self._transport.remove_peer(self._agents[address])
            self.ask(address, again=True)
            self._lost.add(address)

    def take_ended(self) -> list[Made | NotMade]:
        """Handshakes that have ended since the last call; who does not answer is asked again first."""
        done = [(address, future) for address, future in self._asked.items() if future.done()]
        return [ended for address, future in done if (ended := self._ended(address, future)) is not None]

    def close(self) -> None:
        """Begin no further handshake."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ended(self, address: Peer, future: Future[Connected]) -> Made | NotMade | None:
        del self._asked[address]
        known = self._agents.get(address)
        try:
            connected = future.result()
            agent = self._transport.add_peer(connected.metadata, connected.device_id)
        except Exception as cause:  # noqa: BLE001 - a handshake may fail in any way; its requests say how
            self._unanswered[address] += 1
            if isinstance(cause, OSError) and self._unanswered[address] < HANDSHAKE_TRIES:
                logger.warning("No handshake with %s yet, it is asked again: %s", address, cause)
                self.ask(address, again=True)
                return None
            logger.warning("No handshake with %s: %s", address, cause)
            self._settle(address)
            is_gone = isinstance(cause, PeerGone) and known is not None
            return NotMade(address, cause, self._forget(address) if is_gone else None)
        self._settle(address)
        gone = self._forget(address) if known not in (None, agent) else None
        self._agents[address] = agent
        return Made(agent, connected.planes, gone)

    def _settle(self, address: Peer) -> None:
        del self._unanswered[address]
        self._lost.discard(address)

    def _forget(self, address: Peer) -> str:
        agent = self._agents.pop(address)
        self._transport.remove_peer(agent)
        return agent
