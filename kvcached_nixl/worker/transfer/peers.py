# SPDX-License-Identifier: Apache-2.0
"""Ranks of other engines: met by a handshake, met anew when the connection is lost, forgotten when they are gone.

Everything is per rank: one that does not answer, answers wrongly or is gone costs only what names it. Handshakes run
elsewhere (``ask``), any number at a time, and are asked again where nobody answers in time. Owned by the transfer
thread; once per worker.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from kvcached_nixl.clock import Clock
from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.base import TransportError
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.worker.transfer.handshake import ConnectedPeer, Handshaker

__all__ = ["Ask", "PeerListener", "Peers"]

logger = logging.getLogger(SERVER_LOGGER)

Ask: TypeAlias = Callable[[str, int, int], "Future[tuple[str, bytes]]"]
"""(host, port, tensor-parallel rank) -> (compatibility string, metadata), later, on any thread. Fails with
`ConnectionRefusedError` if nobody listens, with another `OSError` or a `TimeoutError` if that is not known."""

HANDSHAKE_TRIES = 5
"""In a row, of a peer that listens and does not answer: one that stands still for seconds has not gone."""
FORGOTTEN_SECONDS = 600.0
"""A peer that nothing names for so long is forgotten; to meet it again costs one handshake."""


_STARTED_AGAIN = "prefill has been started again, or its weights were changed, since it made the parameters"


class _Waiting(NamedTuple):
    incarnation: str
    known: Callable[[ConnectedPeer], None]
    failed: Callable[[HandOverFailed], None]


@dataclass(eq=False)
class _Link:
    address: Peer
    known: ConnectedPeer | None = None
    last_agent: str | None = None
    is_asked: bool = False
    is_failing: bool = False
    tries: int = 0
    waiting: list[_Waiting] = field(default_factory=list)

    @property
    def level(self) -> int:
        """Of what is said about it: one that may still write is asked until it answers or is fenced."""
        return logging.INFO if self.is_failing else logging.WARNING


class PeerListener(Protocol):
    """Who counts on peers, and hears what becomes of them; `Peers.listen`. On the transfer thread."""

    def is_used(self, agent: str) -> bool:
        """Whether somebody still counts on an agent that has not been named for long."""
        ...

    def may_write(self, agent: str) -> bool:
        """Whether an agent may be writing here: its connection is kept without its side channel, for it is to be told
        to stop, and to say that it has."""
        ...

    def dead(self, agent: str) -> None:
        """An agent is known by no address any more: another one answers in its place. Its process may live."""
        ...

    def unreachable(self, agent: str) -> None:
        """Nobody listens where an agent was: its process may have ended, or its listener only."""
        ...

    def disconnected(self, agent: str) -> None:
        """The connection to an agent is being taken down."""
        ...


class Peers:
    """See the module.

    Args:
        handshaker: examines what is answered at an address.
        wake: called, on any thread, when a handshake has ended.
    """

    def __init__(
        self,
        handshaker: Handshaker,
        clock: Clock,
        ask: Ask,
        wake: Callable[[], None],
    ) -> None:
        self._handshaker = handshaker
        self._transport = handshaker.transport
        self._clock = clock
        self._ask = ask
        self._wake = wake
        self._links: dict[Peer, _Link] = {}
        self._addresses: dict[str, dict[Peer, None]] = {}
        # One from an agent's first handshake until it is removed, whatever handshakes there are meanwhile.
        self._connections: dict[str, object] = {}
        self._places: dict[tuple[str, int, int], Peer] = {}
        self._ended: deque[tuple[_Link, Future[tuple[str, bytes]]]] = deque()
        self._unused = Deadlines[Peer]()
        self._listener: PeerListener | None = None
        self.dropped: Counter[str] = Counter()

    def listen(self, listener: PeerListener) -> None:
        """Tell ``listener`` what becomes of peers; once, before any is named."""
        self._listener = listener

    def __len__(self) -> int:
        """Ranks that are known or asked."""
        return len(self._links)

    def need(
        self,
        address: Peer,
        incarnation: str,
        known: Callable[[ConnectedPeer], None],
        failed: Callable[[HandOverFailed], None],
        *,
        is_doubted: bool = False,
    ) -> None:
        """Call one of the two, now or when a handshake has ended.

        Args:
            start: of the engine that is meant; "" for any.
            is_doubted: whoever is known there may have ended; a handshake tells.
        """
        link = self._link(address)
        if (
            link.known is not None
            and incarnation in ("", link.known.incarnation)
            and not (is_doubted or link.is_failing)
        ):
            known(link.known)
            return
        link.waiting.append(_Waiting(incarnation, known, failed))
        self._begin(link)

    def probe(self, address: Peer) -> None:
        """Find out whether a rank's engine still answers."""
        self._begin(self._link(address))

    def doubt(self, agent: str) -> None:
        """Something of an agent has failed: find out whether its engine still answers."""
        for link in self._links_of(agent):
            self._begin(link)

    def send(self, address: Peer, notification: bytes, *, only: str | None = None, is_repeated: bool = True) -> None:
        """Tell a rank something, after a handshake if need be, and once more over another connection where one is lost.

        It may get lost all the same: count on an answer or a deadline.

        Args:
            only: an agent; whoever else answers at the address is told nothing.
        """

        def tell(known: ConnectedPeer, is_fresh: bool = False) -> None:
            if only not in (None, known.agent):
                if is_fresh:
                    self.dropped["meant for another agent"] += 1
                else:
                    # Whoever has asked may have been started since this one was met.
                    self.need(address, "", lambda known: tell(known, True), untold, is_doubted=True)
                return
            try:
                self._transport.send(known.agent, notification)
            except TransportError as error:
                logger.info("%s", error)
                self.lost(known.agent)
                if is_repeated:
                    self.send(address, notification, only=only, is_repeated=False)
                else:
                    self.dropped["not sent"] += 1

        def untold(_: HandOverFailed) -> None:
            self.dropped["not sent"] += 1

        link = self._link(address)
        if link.known is not None:
            # Over the connection that there is, whether its side channel answers or not.
            tell(link.known)
        else:
            self.need(address, "", tell, untold)

    def is_known(self, agent: str) -> bool:
        """Whether there is a connection to an agent."""
        return self.connection(agent) is not None

    def connection(self, agent: str) -> object:
        """What stands for the present connection to an agent; another one, or None, once that is lost."""
        return self._connections.get(agent)

    def lost(self, agent: str) -> None:
        """The connection to a rank does not work any more. It may live: whatever names it next begins a handshake."""
        links = [link for link in self._links_of(agent) if link.known is not None]
        for link in links:
            logger.warning("The connection to %s is lost; there will be another handshake with it", link.address)
            self._forget(link)
        for link in links:
            self._begin(link)

    def turn(self) -> None:
        """Take in what handshakes have found out, and forget who is not named any more."""
        while self._ended:
            self._take(*self._ended.popleft())
        for address in self._unused.take_due(self._clock.now_seconds()):
            link = self._links[address]
            if link.is_asked or self._is_used(link.last_agent):
                self._unused[address] = self._clock.now_seconds() + FORGOTTEN_SECONDS
            else:
                self._drop(link)

    def _link(self, address: Peer) -> _Link:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = _Link(address)
        self._unused[address] = self._clock.now_seconds() + FORGOTTEN_SECONDS
        return link

    def _begin(self, link: _Link) -> None:
        if link.is_asked:
            return
        link.is_asked = True
        future = self._ask(link.address.host, link.address.port, link.address.tp_rank)

        def ended(future: Future[tuple[str, bytes]]) -> None:
            self._ended.append((link, future))
            self._wake()

        future.add_done_callback(ended)

    def _take(self, link: _Link, future: Future[tuple[str, bytes]]) -> None:
        link.is_asked = False
        link.tries += 1
        try:
            known = self._handshaker.examine(link.address, *future.result())
        except ConnectionRefusedError:
            agent, reason = link.last_agent, f"nobody listens at {link.address.host}:{link.address.port}"
            self._fail(link, FailureCause.UNREACHABLE, reason, is_gone=False)
            if agent is not None and self._listener is not None:
                # Its listener may start again, and its workers outlive it: that it is gone is for others to say.
                self._listener.unreachable(agent)
        except OSError as error:
            if link.tries < HANDSHAKE_TRIES:
                logger.log(link.level, "No handshake with %s yet, it is asked again: %s", link.address, error)
                self._begin(link)
            else:
                self._fail(link, FailureCause.UNREACHABLE, f"no handshake with {link.address}: {error}", is_gone=False)
        except HandOverFailed as error:
            self._fail(link, error.cause, str(error), is_gone=True)
        except (TransportError, ValueError) as error:
            self._fail(link, FailureCause.PROTOCOL, f"no handshake with {link.address}: {error}", is_gone=False)
        except Exception as defect:
            logger.exception("A handshake fails by a defect of kvcached_nixl")
            reason = f"no handshake with {link.address}: {type(defect).__name__}: {defect}"
            self._fail(link, FailureCause.DEFECT, reason, is_gone=False)
        else:
            self._know(link, known)

    def _know(self, link: _Link, known: ConnectedPeer) -> None:
        local = (link.address.host, link.address.port, link.address.tp_rank)
        before = self._places.get(local)
        if before is not None and before != link.address and before in self._links:
            if self._links[before].is_asked:
                # Its own answer is on its way, and may be another one: one address may answer as two engines.
                self._let_go(self._links[before])
            else:
                self._drop(self._links[before])
        if link.last_agent not in (None, known.agent):
            others = [other for other in self._links_of(link.last_agent) if other is not link]
            self._let_go(link)
            for other in others:
                # It was known by other names, too: whether it is still there is asked under all of them.
                self._begin(other)
        link.known, link.last_agent, link.tries, link.is_failing = known, known.agent, 0, False
        self._places[local] = link.address
        self._addresses.setdefault(known.agent, {})[link.address] = None
        self._connections.setdefault(known.agent, object())
        waiting, link.waiting = link.waiting, []
        for one in waiting:
            if one.incarnation in ("", known.incarnation):
                self._tell(one, known)
            else:
                one.failed(HandOverFailed(FailureCause.RESTARTED, _STARTED_AGAIN))

    def _tell(self, one: _Waiting, known: ConnectedPeer) -> None:
        try:
            one.known(known)
        except Exception as defect:
            logger.exception("A hand-over fails by a defect of kvcached_nixl")
            one.failed(HandOverFailed(FailureCause.DEFECT, f"{type(defect).__name__}: {defect}"))

    def _fail(self, link: _Link, cause: FailureCause, reason: str, *, is_gone: bool) -> None:
        logger.log(link.level, "%s", reason)
        link.tries, link.is_failing = 0, True
        if is_gone:
            self._let_go(link)
        elif link.known is None or not self._may_write(link.known.agent):
            # What is in flight to somebody who does not answer ends with the connection.
            self._forget(link)
        waiting, link.waiting = link.waiting, []
        for one in waiting:
            one.failed(HandOverFailed(cause, reason))
        if link.known is None and not link.waiting and not link.is_asked and link.last_agent is None:
            self._drop(link)

    def _let_go(self, link: _Link) -> None:
        """Who was known at an address is not there any more; it is gone for good if it is known nowhere else."""
        self._forget(link)
        agent, link.last_agent = link.last_agent, None
        if agent is None:
            return
        addresses = self._addresses[agent]
        del addresses[link.address]
        if not addresses:
            del self._addresses[agent]
            if self._listener is not None:
                self._listener.dead(agent)

    def _forget(self, link: _Link) -> None:
        """The connection over an address is given up; the last one to an agent is taken down."""
        known, link.known = link.known, None
        if known is not None and all(other.known is None for other in self._links_of(known.agent)):
            self._connections.pop(known.agent, None)
            if self._listener is not None:
                self._listener.disconnected(known.agent)
            self._transport.remove_peer(known.agent)

    def _is_used(self, agent: str | None) -> bool:
        return agent is not None and self._listener is not None and self._listener.is_used(agent)

    def _may_write(self, agent: str) -> bool:
        return self._listener is not None and self._listener.may_write(agent)

    def _links_of(self, agent: str) -> list[_Link]:
        """An engine may be named in several ways: by an address and by a name."""
        return [self._links[address] for address in self._addresses.get(agent, ())]

    def _drop(self, link: _Link) -> None:
        self._let_go(link)
        self._links.pop(link.address, None)
        self._unused.pop(link.address, None)
        local = (link.address.host, link.address.port, link.address.tp_rank)
        if self._places.get(local) == link.address:
            del self._places[local]
