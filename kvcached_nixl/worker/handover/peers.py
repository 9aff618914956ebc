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
from typing import NamedTuple, TypeAlias

from kvcached_nixl.clock import Clock
from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.base import TransportError
from kvcached_nixl.wire.causes import Cause, HandOverFailed
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.worker.handover.meeting import Known, Meeting

__all__ = ["Ask", "Peers"]

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
    start: str
    known: Callable[[Known], None]
    failed: Callable[[HandOverFailed], None]


@dataclass(eq=False)
class _Link:
    address: Peer
    known: Known | None = None
    last_agent: str | None = None
    is_asked: bool = False
    is_failing: bool = False
    tries: int = 0
    waiting: list[_Waiting] = field(default_factory=list)

    @property
    def level(self) -> int:
        """Of what is said about it: one that may still write is asked until it answers or is fenced."""
        return logging.INFO if self.is_failing else logging.WARNING


class Peers:
    """See the module.

    Args:
        meeting: how a rank is met.
        wake: called, on any thread, when a handshake has ended.

    Attributes:
        is_used: whether somebody still counts on an agent that has not been named for long.
        may_write: whether an agent may be writing here: its connection is kept without its side channel, for it is to
            be told to stop, and to say that it has.
        gone: called with an agent that is known by no address any more: another one answers in its place. It may live.
        unreachable: called with an agent where nobody listens: its process may have ended, or its listener only.
        forgotten: called with an agent whose connection is taken down.
    """

    def __init__(
        self,
        meeting: Meeting,
        clock: Clock,
        ask: Ask,
        wake: Callable[[], None],
    ) -> None:
        self._meeting = meeting
        self._transport = meeting.transport
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
        self.is_used: Callable[[str], bool] = lambda agent: False
        self.may_write: Callable[[str], bool] = lambda agent: False
        self.forgotten: Callable[[str], None] = lambda agent: None
        self.gone: Callable[[str], None] = lambda agent: None
        self.unreachable: Callable[[str], None] = lambda agent: None
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        """Ranks that are known or asked."""
        return len(self._links)

    def need(
        self,
        address: Peer,
        start: str,
        known: Callable[[Known], None],
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
        if link.known is not None and start in ("", link.known.start) and not (is_doubted or link.is_failing):
            known(link.known)
            return
        link.waiting.append(_Waiting(start, known, failed))
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

        def tell(known: Known, is_fresh: bool = False) -> None:
            if only not in (None, known.agent):
                if is_fresh:
                    self.dropped["meant for another agent"] += 1
                else:
                    # Whoever has asked may have been started since this one was met.
                    self.need(address, "", lambda known: tell(known, True), untold, is_doubted=True)
                return
            try:
                self._transport.send(known.agent, notification)
            except TransportError as cause:
                logger.info("%s", cause)
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
            if link.is_asked or (link.last_agent is not None and self.is_used(link.last_agent)):
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
            known = self._meeting.meet(link.address, *future.result())
        except ConnectionRefusedError:
            agent, words = link.last_agent, f"nobody listens at {link.address.host}:{link.address.port}"
            self._fail(link, Cause.UNREACHABLE, words, is_gone=False)
            if agent is not None:
                # Its listener may start again, and its workers outlive it: that it is gone is for others to say.
                self.unreachable(agent)
        except OSError as cause:
            if link.tries < HANDSHAKE_TRIES:
                logger.log(link.level, "No handshake with %s yet, it is asked again: %s", link.address, cause)
                self._begin(link)
            else:
                self._fail(link, Cause.UNREACHABLE, f"no handshake with {link.address}: {cause}", is_gone=False)
        except HandOverFailed as cause:
            self._fail(link, cause.cause, str(cause), is_gone=True)
        except (TransportError, ValueError) as cause:
            self._fail(link, Cause.PROTOCOL, f"no handshake with {link.address}: {cause}", is_gone=False)
        except Exception as defect:
            logger.exception("A handshake fails by a defect of kvcached_nixl")
            words = f"no handshake with {link.address}: {type(defect).__name__}: {defect}"
            self._fail(link, Cause.DEFECT, words, is_gone=False)
        else:
            self._know(link, known)

    def _know(self, link: _Link, known: Known) -> None:
        place = (link.address.host, link.address.port, link.address.tp_rank)
        before = self._places.get(place)
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
        self._places[place] = link.address
        self._addresses.setdefault(known.agent, {})[link.address] = None
        self._connections.setdefault(known.agent, object())
        waiting, link.waiting = link.waiting, []
        for one in waiting:
            if one.start in ("", known.start):
                self._tell(one, known)
            else:
                one.failed(HandOverFailed(Cause.START, _STARTED_AGAIN))

    def _tell(self, one: _Waiting, known: Known) -> None:
        try:
            one.known(known)
        except Exception as defect:
            logger.exception("A hand-over fails by a defect of kvcached_nixl")
            one.failed(HandOverFailed(Cause.DEFECT, f"{type(defect).__name__}: {defect}"))

    def _fail(self, link: _Link, cause: Cause, words: str, *, is_gone: bool) -> None:
        logger.log(link.level, "%s", words)
        link.tries, link.is_failing = 0, True
        if is_gone:
            self._let_go(link)
        elif link.known is None or not self.may_write(link.known.agent):
            # What is in flight to somebody who does not answer ends with the connection.
            self._forget(link)
        waiting, link.waiting = link.waiting, []
        for one in waiting:
            one.failed(HandOverFailed(cause, words))
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
            self.gone(agent)

    def _forget(self, link: _Link) -> None:
        """The connection over an address is given up; the last one to an agent is taken down."""
        known, link.known = link.known, None
        if known is not None and all(other.known is None for other in self._links_of(known.agent)):
            self._connections.pop(known.agent, None)
            self.forgotten(known.agent)
            self._transport.remove_peer(known.agent)

    def _links_of(self, agent: str) -> list[_Link]:
        """An engine may be named in several ways: by an address and by a name."""
        return [self._links[address] for address in self._addresses.get(agent, ())]

    def _drop(self, link: _Link) -> None:
        self._let_go(link)
        self._links.pop(link.address, None)
        self._unused.pop(link.address, None)
        place = (link.address.host, link.address.port, link.address.tp_rank)
        if self._places.get(place) == link.address:
            del self._places[place]
