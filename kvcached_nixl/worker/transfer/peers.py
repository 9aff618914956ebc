# SPDX-License-Identifier: Apache-2.0
"""Connections to ranks of other engines: made by a handshake, made again when lost, forgotten when not used.

NIXL keeps memory of a connected rank mapped, and where that is an accelerator's, the memory of a rank that has ended is
not free before the connection is taken down: a server that is to take its place does not start (vllm#58063). So ranks
that are not used are looked after: a process of this host by its number, any other one by a handshake. An equal answer
changes nothing, since NIXL keeps something of every one that it is given.

Everything is per rank: one that does not answer, answers wrongly or is dead fails only the requests that name it.
Handshakes run on another thread (``ask``), any number at a time, and are repeated if there is no answer in time. Owned
by the transfer thread; once per worker.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeAlias

from kvcached_nixl.deadlines import Clock, Deadlines
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.agent import Transport, TransportError
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.worker.transfer.peer_link import ConnectedPeer, Host, Link, PeerListener, Waiting
from kvcached_nixl.worker.transfer.topology import LocalRank, examine

__all__ = ["Ask", "Peers", "contained"]

logger = logging.getLogger(SERVER_LOGGER)

Ask: TypeAlias = Callable[[str, int, int], "Future[tuple[str, bytes]]"]
"""(host, port, tensor-parallel rank) -> (compatibility string, metadata) in a future that any thread may complete. It
fails with `ConnectionRefusedError` if nobody listens, with another `OSError` or `TimeoutError` if that is not known."""

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


class Peers:
    """See the module.

    Args:
        compatibility: this rank's compatibility string.
        ask: begins a handshake.
        host: tells which processes of this host live.
        wake: called, on any thread, when a handshake has ended.
    """

    def __init__(
        self,
        transport: Transport,
        local: LocalRank,
        compatibility: str,
        clock: Clock,
        ask: Ask,
        host: Host,
        wake: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._local = local
        self._compatibility = compatibility
        self._clock = clock
        self._ask = ask
        self._host = host
        self._wake = wake
        self._links: dict[Peer, Link] = {}
        # Kept from an agent's first handshake until it is removed; later handshakes with it do not change it.
        self._connections: dict[str, object] = {}
        self._places: dict[tuple[str, int, int], Peer] = {}
        self._ended: deque[tuple[Link, Future[tuple[str, bytes]]]] = deque()
        self._unused = Deadlines[Peer]()
        self._looked_at = Deadlines[Peer]()
        self._listeners: tuple[PeerListener, ...] = ()
        self.dropped: Counter[str] = Counter()

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
        """Call either ``known`` or ``failed``, now or when a handshake has ended.

        Args:
            incarnation: of the engine that is meant; "" for any.
            is_doubted: do a handshake even if a peer is known at this address, because it may have ended.
        """
        link = self._link(address)
        if (
            link.known is not None
            and incarnation in ("", link.known.incarnation)
            and not (is_doubted or link.is_failing)
        ):
            known(link.known)
            return
        link.waiting.append(Waiting(incarnation, known, failed))
        self._begin(link)

    def probe(self, address: Peer) -> None:
        """Begin a handshake to find out whether a rank's engine still answers."""
        self._begin(self._link(address))

    def doubt(self, agent: str) -> None:
        """A transfer to an agent has failed: find out whether its engine still answers."""
        for link in self._links_of(agent):
            self._begin(link)

    def send(self, address: Peer, notification: bytes, *, only: str | None = None, is_repeated: bool = True) -> None:
        """Send a notification to a rank, after a handshake if there is no connection to it.

        If the connection turns out to be lost, it is sent once more over a new one. It may still get lost: rely on an
        answer or a deadline.

        Args:
            only: the agent that it is meant for; if another one answers at the address, nothing is sent.
            is_repeated: whether to send it once more if the connection is lost.
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
            # Use the existing connection, even if the peer's side channel does not answer.
            tell(link.known)
        else:
            self.need(address, "", tell, untold)

    def connection(self, agent: str) -> object:
        """Returns an object that stands for the current connection to an agent; once that is lost, another or None."""
        return self._connections.get(agent)

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
        now = self._clock.now_seconds()
        for address in self._unused.take_due(now):
            link = self._links[address]
            if link.is_asked or self._is_used(link.last_agent):
                self._unused[address] = now + FORGOTTEN_SECONDS
            else:
                self._drop(link)
        for address in self._looked_at.take_due(now):
            self._look_later(address)
            self._look(self._links[address])

    def _look(self, link: Link) -> None:
        """Find out whether a connected peer is still there."""
        if link.known is None:
            return
        if link.process is None:
            self._begin(link, is_doubted=False)
        elif self._host.is_dead(link.process):
            where = f"rank {link.address.tp_rank} of engine {link.address.engine_id}"
            self._unreachable(link, f"the process of {where} has ended")

    def _look_later(self, address: Peer) -> None:
        seconds = LOOK_SECONDS * max(1.0, len(self._links) / LOOKS)
        self._looked_at[address] = self._clock.now_seconds() + seconds

    def _link(self, address: Peer) -> Link:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = Link(address)
        self._unused[address] = self._clock.now_seconds() + FORGOTTEN_SECONDS
        self._look_later(address)
        return link

    def _begin(self, link: Link, *, is_doubted: bool = True) -> None:
        link.is_doubted |= is_doubted
        if link.is_asked:
            return
        link.is_asked = True
        future = self._ask(link.address.host, link.address.port, link.address.tp_rank)

        def ended(future: Future[tuple[str, bytes]]) -> None:
            self._ended.append((link, future))
            self._wake()

        future.add_done_callback(ended)

    def _take(self, link: Link, future: Future[tuple[str, bytes]]) -> None:
        is_doubted, link.is_asked, link.is_doubted = link.is_doubted, False, False
        link.tries += 1
        try:
            answer = future.result()
            if link.known is not None and not is_doubted and answer == link.answer:
                link.tries, link.is_failing = 0, False
                return
            incarnation, rank = examine(self._local, self._compatibility, link.address, *answer)
            agent = self._transport.add_peer(rank.agent_metadata, rank.device_id, rank.memory_type)
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
            self._know(link, ConnectedPeer(agent, incarnation, rank))
            link.answer = answer

    def _know(self, link: Link, known: ConnectedPeer) -> None:
        local = (link.address.host, link.address.port, link.address.tp_rank)
        before = self._places.get(local)
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
        link.process = known.rank.process if self._host.sees(known.rank.process) else None
        self._places[local] = link.address
        self._connections.setdefault(known.agent, object())
        waiting, link.waiting = link.waiting, []
        for one in waiting:
            if one.incarnation in ("", known.incarnation):
                with contained(one.failed):
                    one.known(known)
            else:
                one.failed(HandOverFailed(FailureCause.RESTARTED, _STARTED_AGAIN))

    def _unreachable(self, link: Link, reason: str) -> None:
        agent = link.last_agent
        self._fail(link, FailureCause.UNREACHABLE, reason, is_gone=False)
        if agent is not None:
            for one in self._listeners:
                one.unreachable(agent)

    def _fail(self, link: Link, cause: FailureCause, reason: str, *, is_gone: bool) -> None:
        logger.log(link.level, "%s", reason)
        link.tries, link.is_failing = 0, True
        if is_gone:
            self._let_go(link)
        elif link.known is None or not any(one.may_write(link.known.agent) for one in self._listeners):
            # The peer does not answer: taking the connection down ends the transfers in flight to it.
            self._forget(link)
        waiting, link.waiting = link.waiting, []
        for one in waiting:
            one.failed(HandOverFailed(cause, reason))
        if link.known is None and not link.waiting and not link.is_asked and link.last_agent is None:
            self._drop(link)

    def _let_go(self, link: Link) -> None:
        """The agent known at this address is not there any more; it is dead if no other address leads to it."""
        self._forget(link)
        agent, link.last_agent = link.last_agent, None
        if agent is not None and not self._links_of(agent):
            for one in self._listeners:
                one.dead(agent)

    def _forget(self, link: Link) -> None:
        """Give up this address's use of the connection; the last address of an agent takes the connection down."""
        known, link.known = link.known, None
        if known is not None and all(other.known is None for other in self._links_of(known.agent)):
            self._connections.pop(known.agent, None)
            for one in self._listeners:
                one.disconnected(known.agent)
            self._transport.remove_peer(known.agent)

    def _is_used(self, agent: str | None) -> bool:
        return agent is not None and any(one.is_used(agent) for one in self._listeners)

    def _links_of(self, agent: str | None) -> list[Link]:
        """Returns all links to an agent: an engine may be known under several addresses, by IP address and by name."""
        return [link for link in self._links.values() if link.last_agent == agent]

    def _drop(self, link: Link) -> None:
        self._let_go(link)
        self._links.pop(link.address, None)
        self._unused.pop(link.address, None)
        self._looked_at.pop(link.address, None)
        local = (link.address.host, link.address.port, link.address.tp_rank)
        if self._places.get(local) == link.address:
            del self._places[local]
