# SPDX-License-Identifier: Apache-2.0
"""Connections to ranks of other engines: made by a handshake, made again when lost, forgotten when not used.

NIXL keeps memory of a connected rank mapped, and where that is an accelerator's, the memory of a rank that has ended is
not free before the connection is taken down: a server that is to take its place does not start (vllm#58063). So ranks
that are not used are looked after: a process of this host by its number, any other one by a handshake. An equal answer
changes nothing, since NIXL keeps something of every one that it is given.

A rank that does not answer, answers wrongly or is dead fails only the requests that name it. Handshakes run on another
thread, and are repeated if there is no answer in time. Owned by the transfer thread; once per worker.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from kvcached_nixl.deadlines import Clock, Deadlines
from kvcached_nixl.processes import Host
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.agent import Transport, TransportError
from kvcached_nixl.transport.side_channel import SideChannel
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.worker.transfer.topology import ConnectedPeer, LocalRank, examine

logger = logging.getLogger(SERVER_LOGGER)

HANDSHAKE_TRIES = 5
"""Handshakes in a row with a peer that does not answer, before it fails: one that stalls for seconds may be alive."""
FORGOTTEN_SECONDS = 600.0
"""A peer that is not used for so long is forgotten; to use it again costs one handshake."""
LOOK_SECONDS = 5.0
"""A connected peer that is not used for so long is looked after; multiplied if there are many."""
LOOKS = 8
"""Peers that are looked after in LOOK_SECONDS, at most about."""


@contextlib.contextmanager
def contained(failed: Callable[[HandOverFailed], None]) -> Iterator[None]:
    """An exception is logged and fails this hand-over only. As a decorator: of a callback."""
    try:
        yield
    except Exception as defect:
        logger.exception("internal error in kvcached_nixl; this hand-over fails")
        failed(HandOverFailed(FailureCause.DEFECT, f"{type(defect).__name__}: {defect}"))


_STARTED_AGAIN = "prefill was restarted, or its weights were changed, since it made the parameters"

_Waiting: TypeAlias = tuple[str, Callable[[ConnectedPeer], None], Callable[[HandOverFailed], None]]
"""Who needs a rank: of which incarnation, "" for any; what is called once it is known, or else."""


@dataclass(eq=False)
class _Link:
    """What is known of an address.

    Attributes:
        known: whom it is connected to; None if it is not.
        answer: the handshake that ``known`` was made from.
        last_agent: whom it was connected to last, until another one answers.
        is_asked: a handshake is under way.
        is_doubted: somebody depends on how it ends, so an equal answer is looked at, too.
        is_failing: the last handshake has failed.
        tries: handshakes in a row without an answer.
        waiting: who is told how the handshake ends.
    """

    address: Peer
    known: ConnectedPeer | None = None
    answer: tuple[str, bytes] | None = None
    last_agent: str | None = None
    is_asked: bool = False
    is_doubted: bool = False
    is_failing: bool = False
    tries: int = 0
    waiting: list[_Waiting] = field(default_factory=list)

    @property
    def level(self) -> int:
        """Log level: a peer that may still write is asked until it answers or is fenced, so warn only once."""
        return logging.INFO if self.is_failing else logging.WARNING


class PeerListener:
    """Depends on peers, and is told what happens to them (`Peers.listen`). Called on the transfer thread. This one
    depends on none."""

    def is_used(self, agent: str) -> bool:
        """Whether something still depends on an agent, although no message was sent to it for FORGOTTEN_SECONDS."""
        return False

    def may_write(self, agent: str) -> bool:
        """Whether an agent may be writing into this rank's memory. Its connection is then kept even if its side channel
        fails: it has to be told to stop, and to answer that it has."""
        return False

    def dead(self, agent: str) -> None:
        """No address leads to an agent any more: another one answers in its place. Its process may still run."""

    def unreachable(self, agent: str) -> None:
        """Nobody listens at an agent's address: its process may have ended, or only its listener."""

    def disconnected(self, agent: str) -> None:
        """The connection to an agent is about to be taken down, or the agent to be forgotten."""


@dataclass(eq=False)
class Peers:
    """See the module.

    Attributes:
        compatibility: this rank's; a peer's must be equal.
        wake: called, on any thread, when a handshake has ended.
    """

    transport: Transport
    local: LocalRank
    compatibility: str
    clock: Clock
    channel: SideChannel
    host: Host
    wake: Callable[[], None]
    dropped: Counter[str] = field(default_factory=Counter)
    _links: dict[Peer, _Link] = field(default_factory=dict)
    _places: dict[tuple[str, int, int], Peer] = field(default_factory=dict)
    _ended: deque[tuple[_Link, Future[tuple[str, bytes]]]] = field(default_factory=deque)
    _unused: Deadlines[Peer] = field(default_factory=Deadlines)
    _looked_at: Deadlines[Peer] = field(default_factory=Deadlines)
    _listeners: tuple[PeerListener, ...] = ()

    def listen(self, *listeners: PeerListener) -> None:
        """Tell ``listeners`` what happens to peers. Call once, before any peer is used."""
        self._listeners = listeners

    def need(
        self,
        address: Peer,
        incarnation: str,
        known: Callable[[ConnectedPeer], None],
        failed: Callable[[HandOverFailed], None],
        *,
        is_doubted: bool = False,
    ) -> None:
        """Call either ``known`` or ``failed``, now or when a handshake has ended. ``incarnation``: of the engine that
        is meant; "" for any. ``is_doubted``: do a handshake even if a peer is known here, because it may have ended."""
        link = self._link(address)
        found, is_doubted = link.known, is_doubted or link.is_failing
        if found is None or is_doubted or incarnation not in ("", found.incarnation):
            link.waiting.append((incarnation, known, failed))
            self._begin(link)
            return
        if found.process is None and self.host.sees(found.rank.process):
            # The handshake could not look at it, for lack of file descriptors.
            found.process = found.rank.process
        known(found)

    def probe(self, address: Peer) -> None:
        """Find out whether a rank's engine still answers."""
        self._begin(self._link(address))

    def doubt(self, agent: str) -> None:
        """A transfer to an agent has failed: find out whether its engine still answers."""
        for link in self._links_of(agent):
            self._begin(link)

    def send(
        self,
        address: Peer,
        notification: bytes,
        *,
        only: str | None = None,
        is_repeated: bool = True,
        waits: bool = True,
    ) -> None:
        """Send a notification to a rank, after a handshake if there is no connection to it. ``only``: the agent that it
        is meant for; if another one answers at the address, nothing is sent. ``waits``: also for a handshake that was
        begun before. What is sent again and again does not, so that no more of it waits here than one of each rank.

        If the connection turns out to be lost, it is sent once more over a new one, where ``is_repeated``. It may still
        get lost: rely on an answer or a deadline.
        """

        def tell(known: ConnectedPeer, is_fresh: bool = False) -> None:
            if only not in (None, known.agent):
                if is_fresh:
                    self.dropped["meant for another agent"] += 1
                else:
                    # The agent in `only` may have been started at this address since the last handshake.
                    self.need(address, "", lambda known: tell(known, True), untold, is_doubted=True)
                return
            try:
                self.transport.send(known.agent, notification)
            except TransportError as error:
                logger.info("%s", error)
                self.lost(known.agent)
                if is_repeated:
                    self.send(address, notification, only=only, is_repeated=False)
                else:
                    self.dropped["not sent"] += 1

        def untold(_: HandOverFailed) -> None:
            self.dropped["not sent"] += 1

        begun = self._links.get(address)
        if not waits and begun is not None and begun.known is None and begun.is_asked:
            self.dropped["not sent"] += 1
            return
        link = self._link(address)
        if link.known is not None:
            # Use the existing connection, even if the peer's side channel does not answer.
            tell(link.known)
        else:
            self.need(address, "", tell, untold)

    def lost(self, agent: str) -> None:
        """The connection to an agent has failed. Its process may be alive, so take the connection down and begin a new
        handshake."""
        links = [link for link in self._links_of(agent) if link.known is not None]
        for link in links:
            logger.warning("Lost the connection to %s; repeating the handshake", link.address)
            self._forget(link)
        for link in links:
            self._begin(link)

    def turn(self) -> None:
        """Handle handshakes that have ended, look after peers that are not used, and forget them in the end."""
        while self._ended:
            self._take(*self._ended.popleft())
        now = self.clock.now_seconds()
        for address in self._unused.take_due(now):
            link = self._links[address]
            if link.is_asked or self._is_used(link.last_agent):
                self._unused[address] = now + FORGOTTEN_SECONDS
            else:
                self._drop(link)
        for address in self._looked_at.take_due(now):
            self._look_later(address)
            link, known = self._links[address], self._links[address].known
            if known is None:
                continue
            if known.process is None:
                self._begin(link, is_doubted=False)
            elif self.host.is_dead(known.process):
                where = f"rank {address.rank} of engine {address.engine_id}"
                self._unreachable(link, f"the process of {where} has ended")

    def _look_later(self, address: Peer) -> None:
        seconds = LOOK_SECONDS * max(1.0, len(self._links) / LOOKS)
        self._looked_at[address] = self.clock.now_seconds() + seconds

    def _link(self, address: Peer) -> _Link:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = _Link(address)
        self._unused[address] = self.clock.now_seconds() + FORGOTTEN_SECONDS
        self._look_later(address)
        return link

    def _begin(self, link: _Link, *, is_doubted: bool = True) -> None:
        link.is_doubted |= is_doubted
        if link.is_asked:
            return
        link.is_asked = True
        future = self.channel.ask(link.address.host, link.address.port, link.address.tp_rank, link.address.pp_rank)

        def ended(future: Future[tuple[str, bytes]]) -> None:
            self._ended.append((link, future))
            self.wake()

        future.add_done_callback(ended)

    def _take(self, link: _Link, future: Future[tuple[str, bytes]]) -> None:
        is_doubted, link.is_asked, link.is_doubted = link.is_doubted, False, False
        link.tries += 1
        try:
            answer = future.result()
            if link.known is not None and not is_doubted and answer == link.answer:
                link.tries, link.is_failing = 0, False
                return
            incarnation, rank = examine(self.local, self.compatibility, link.address, *answer)
            agent = self.transport.add_peer(rank.agent_metadata, rank.device_id, rank.memory_type)
        except ConnectionRefusedError:
            # Its listener may restart, and its workers may outlive it: this does not mean that the agent is dead.
            self._unreachable(link, f"nobody listens at {link.address.host}:{link.address.port}")
        except OSError as error:
            if not is_doubted and self._is_used(link.last_agent):
                # What it is used for moves bytes, or has an end of its own.
                link.tries = 0
            elif link.tries < HANDSHAKE_TRIES:
                logger.log(link.level, "No handshake with %s yet, trying again: %s", link.address, error)
                self._begin(link, is_doubted=is_doubted)
            else:
                self._fail(link, FailureCause.UNREACHABLE, f"no handshake with {link.address}: {error}", is_gone=False)
        except HandOverFailed as error:
            self._fail(link, error.cause, str(error), is_gone=True)
        except (TransportError, ValueError) as error:
            self._fail(link, FailureCause.PROTOCOL, f"no handshake with {link.address}: {error}", is_gone=False)
        except Exception as defect:
            logger.exception("internal error in kvcached_nixl; this handshake fails")
            reason = f"no handshake with {link.address}: {type(defect).__name__}: {defect}"
            self._fail(link, FailureCause.DEFECT, reason, is_gone=False)
        else:
            process = rank.process if self.host.sees(rank.process) else None
            self._know(link, ConnectedPeer(agent, incarnation, rank, process))
            link.answer = answer

    def _know(self, link: _Link, known: ConnectedPeer) -> None:
        place = (link.address.host, link.address.port, link.address.rank)
        before = self._places.get(place)
        if before is not None and before != link.address and before in self._links:
            if self._links[before].is_asked:
                # Its own handshake is under way and may end differently: one address may answer as two engines.
                self._let_go(self._links[before])
            else:
                self._drop(self._links[before])
        if link.last_agent not in (None, known.agent):
            others = [other for other in self._links_of(link.last_agent) if other is not link]
            self._let_go(link)
            for other in others:
                # The old agent was known under other addresses, too: a handshake checks each of them.
                self._begin(other)
        link.known, link.last_agent, link.tries, link.is_failing = known, known.agent, 0, False
        self._places[place] = link.address
        waiting, link.waiting = link.waiting, []
        for incarnation, connected, failed in waiting:
            if incarnation in ("", known.incarnation):
                with contained(failed):
                    connected(known)
            else:
                failed(HandOverFailed(FailureCause.RESTARTED, _STARTED_AGAIN))

    def _unreachable(self, link: _Link, reason: str) -> None:
        agent = link.last_agent
        self._fail(link, FailureCause.UNREACHABLE, reason, is_gone=False)
        if agent is not None:
            for one in self._listeners:
                one.unreachable(agent)

    def _fail(self, link: _Link, cause: FailureCause, reason: str, *, is_gone: bool) -> None:
        logger.log(link.level, "%s", reason)
        link.tries, link.is_failing = 0, True
        if is_gone:
            self._let_go(link)
        elif link.known is None or not any(one.may_write(link.known.agent) for one in self._listeners):
            # The peer does not answer: taking the connection down ends the transfers in flight to it.
            self._forget(link)
        waiting, link.waiting = link.waiting, []
        for _, _, failed in waiting:
            failed(HandOverFailed(cause, reason))
        if link.known is None and not link.waiting and not link.is_asked and link.last_agent is None:
            self._drop(link)

    def _let_go(self, link: _Link) -> None:
        """The agent known at this address is not there any more; it is dead if no other address leads to it."""
        self._forget(link)
        agent, link.last_agent = link.last_agent, None
        if agent is not None and not self._links_of(agent):
            for one in self._listeners:
                # Also if the connection was taken down before: there may be new ones to gates of the agent.
                one.disconnected(agent)
            for one in self._listeners:
                one.dead(agent)

    def _forget(self, link: _Link) -> None:
        """Give up this address's use of the connection; the last address of an agent takes the connection down."""
        known, link.known = link.known, None
        if known is not None and all(other.known is None for other in self._links_of(known.agent)):
            for one in self._listeners:
                one.disconnected(known.agent)
            self.transport.remove_peer(known.agent)

    def _is_used(self, agent: str | None) -> bool:
        return agent is not None and any(one.is_used(agent) for one in self._listeners)

    def _links_of(self, agent: str | None) -> list[_Link]:
        """Returns all links to an agent: an engine may be known under several addresses, by IP address and by name."""
        return [link for link in self._links.values() if link.last_agent == agent]

    def _drop(self, link: _Link) -> None:
        self._let_go(link)
        self._links.pop(link.address, None)
        self._unused.pop(link.address, None)
        self._looked_at.pop(link.address, None)
        place = (link.address.host, link.address.port, link.address.rank)
        if self._places.get(place) == link.address:
            del self._places[place]
