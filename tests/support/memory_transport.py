# SPDX-License-Identifier: Apache-2.0
"""A transport inside one process, for tests: it moves real bytes between real addresses, and fails on demand.

Nothing happens by itself: everything sent or posted waits in :attr:`Network.pending` until the test delivers, drops,
duplicates or fails it, in any order. ``Network(immediate=True)`` delivers immediately.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from kvcached_nixl.transport.agent import Handle, Operation, Ranges, TransferState, TransportError

GATE = "#"
"""Between an agent's name and a number, in the name of a gate to its memory."""


@dataclass(eq=False)
class Posted:
    """A notification, with its transfer if ``local`` and ``remote`` are not None.

    Attributes:
        sender, receiver: the agent that posted it, and the other one.
        untold: the notification was not delivered yet.
    """

    sender: str
    receiver: str
    notification: bytes
    operation: Operation | None = None
    local: Ranges | None = None
    remote: Ranges | None = None
    state: TransferState = TransferState.IN_FLIGHT
    untold: bool = True
    released: bool = False

    @property
    def is_transfer(self) -> bool:
        return self.local is not None


@dataclass
class Network:
    """Agents by name, and what is pending between them, oldest first.

    Attributes:
        gates: the agents that are open gates; ``num_opened``: how many were ever opened.
    """

    immediate: bool = False
    agents: dict[str, MemoryTransport] = field(default_factory=dict)
    pending: dict[Posted, None] = field(default_factory=dict)
    vanished: set[str] = field(default_factory=set)
    gates: dict[str, MemoryGate] = field(default_factory=dict)
    num_opened: int = 0

    def open_gate(self, owner: str) -> MemoryGate:
        """Opens a gate that peers write through into an agent's memory."""
        self.num_opened += 1
        gate = MemoryGate(self, f"{owner}{GATE}{self.num_opened}")
        self.agents[gate.name] = gate.inner
        self.gates[gate.name] = gate
        return gate

    def agent(self, name: str) -> MemoryTransport:
        """Makes an agent; it replaces a dead one of the same name."""
        self.agents[name] = MemoryTransport(self, name)
        return self.agents[name]

    def kill(self, name: str) -> None:
        """Ends the process of an agent: everything pending from it or to it fails."""
        for end in [name, *(gate for gate in self.agents if gate.startswith(name + GATE))]:
            del self.agents[end]
            self.gates.pop(end, None)
            for posted in [one for one in self.pending if end in (one.sender, one.receiver)]:
                self.fail(posted)

    def vanish(self, name: str) -> None:
        """The host of an agent vanishes: nothing arrives from it, and transfers to it never finish."""
        self.vanished.add(name)

    def post(self, posted: Posted) -> None:
        self.pending[posted] = None
        if self.immediate:
            self.deliver(posted)

    def deliver(self, posted: Posted) -> None:
        """Moves the bytes of a transfer, whose notification is delivered when its state is polled; or delivers a
        notification."""
        if self.is_stuck(posted):
            return
        self._end(posted, TransferState.DONE, 1.0)
        if not posted.is_transfer:
            self.notify(posted)

    def notify(self, posted: Posted) -> None:
        """Delivers the notification; called again, delivers it again."""
        posted.untold = False
        receiver = self.agents.get(posted.receiver)
        if receiver is not None and posted.notification:
            receiver.inbox.append((posted.sender, posted.notification))

    def drop(self, posted: Posted) -> None:
        """Loses the notification; the bytes of a transfer arrive."""
        self._end(posted, TransferState.DONE, 1.0)
        posted.untold = False

    def fail(self, posted: Posted, moved: float = 0.0) -> None:
        """Ends a transfer with an error after a fraction ``moved`` of its ranges; loses its notification."""
        self._end(posted, TransferState.FAILED, moved)

    def deliver_all(self) -> None:
        """Delivers until nothing is pending that can arrive, including what is sent in the meantime."""
        while waiting := [one for one in self.pending if not self.is_stuck(one)]:
            for posted in waiting:
                if posted in self.pending:
                    self.deliver(posted)

    def is_stuck(self, posted: Posted) -> bool:
        """Whether it cannot arrive, because its sender or receiver has vanished."""
        return bool(self.vanished & {one.partition(GATE)[0] for one in (posted.sender, posted.receiver)})

    def _end(self, posted: Posted, state: TransferState, share: float) -> None:
        """Ends it in a state, after moving a fraction ``share`` of its ranges."""
        del self.pending[posted]
        posted.state = state
        if posted.local is None or posted.remote is None or posted.receiver not in self.agents:
            return
        count = int(len(posted.local) * share)
        here, there = posted.local[:count], posted.remote[:count]
        sources, targets = (here, there) if posted.operation == "WRITE" else (there, here)
        for (source, length), (target, _) in zip(sources.tolist(), targets.tolist(), strict=True):
            ctypes.memmove(target, source, length)


class MemoryTransport:
    """`transport.agent.Transport` in memory; made by :meth:`Network.agent`. ``refuse_posts``: posting raises."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.inbox: list[tuple[str, bytes]] = []
        self.posted: list[Posted] = []
        self.refuse_posts = False
        self.keeps_posted = True
        self._peers: dict[str, object] = {}
        self._lost: set[str] = set()
        self._leaving: dict[str, object] = {}
        self._in_flight: list[Posted] = []
        self._failed: list[Posted] = []

    @property
    def peers(self) -> frozenset[str]:
        """Names of the agents that were added and not removed."""
        return frozenset(self._peers)

    def metadata(self) -> bytes:
        return self.name.encode()

    def add_peer(self, metadata: bytes, device_id: int = 0, memory_type: str = "") -> str:
        name = metadata.decode(errors="replace")
        if name not in self.network.agents:
            raise TransportError(f"found no agent {name!r}")
        if name in self._leaving and any(one.receiver == name for one in self._failed):
            raise TransportError(f"the connection to {name!r} is not closed yet")
        self._peers.setdefault(name, self._leaving.pop(name, None) or object())
        return name

    def connection(self, peer: str) -> object:
        return self._peers.get(peer)

    def remove_peer(self, peer: str) -> None:
        """Transfers in flight stay there, and keep the connection open."""
        if (connection := self._peers.pop(peer, None)) is not None:
            self._leaving[peer] = connection
            self._close_idle(peer)

    def _close_idle(self, peer: str) -> None:
        if peer in self._leaving and not any(one.receiver == peer for one in self._in_flight):
            del self._leaving[peer]
            self.closed(peer)

    def closed(self, peer: str) -> None:
        """The connection to a peer was closed: what has failed over it moves nothing any more."""
        self._lost.discard(peer)
        self._failed = [one for one in self._failed if one.receiver != peer]

    def lose(self, peer: str) -> None:
        """Breaks the connection, while both agents live: nothing arrives until the peer is removed and added again."""
        self._lost.add(peer)
        self._fail_pending(peer)

    def send(self, peer: str, notification: bytes) -> None:
        self._require(peer)
        self.network.post(Posted(self.name, peer, notification))

    def received(self) -> list[tuple[str, bytes]]:
        found, self.inbox = self.inbox, []
        return found

    def post(
        self,
        operation: Operation,
        peer: str,
        local: Ranges,
        remote: Ranges,
        notification: bytes = b"",
        *,
        is_host: bool = False,
    ) -> Handle:
        self._require(peer)
        if self.refuse_posts:
            raise TransportError(f"a {operation} with {peer!r} cannot be posted")
        posted = Posted(self.name, peer, notification, operation, local, remote)
        if self.keeps_posted:
            self.posted.append(posted)
        self._in_flight.append(posted)
        self.network.post(posted)
        return posted

    def state(self, handle: Handle) -> TransferState:
        state: TransferState = handle.state
        if state is TransferState.DONE and handle.untold:
            self.network.notify(handle)
        if state is not TransferState.IN_FLIGHT and handle in self._in_flight:
            self._in_flight.remove(handle)
            if state is TransferState.FAILED:
                self._failed.append(handle)
            self._close_idle(handle.receiver)
        return state

    def is_idle(self, handle: Handle) -> bool:
        return handle not in self._failed

    def release(self, handle: Handle) -> None:
        if handle.state is TransferState.IN_FLIGHT or handle.released:
            raise AssertionError(f"found a {handle.operation} {handle.state.value}, released: {handle.released}")
        handle.released = True

    def unreleased(self) -> list[Posted]:
        """Transfers whose handles were not released."""
        return [posted for posted in self.posted if not posted.released]

    def _fail_pending(self, peer: str) -> None:
        for posted in [one for one in self.network.pending if (one.sender, one.receiver) == (self.name, peer)]:
            self.network.fail(posted)

    def _require(self, peer: str) -> None:
        if peer not in self._peers.keys() - self._lost or peer not in self.network.agents:
            raise TransportError(f"found no connection to {peer!r}")


class MemoryGate:
    """See `kvcached_nixl.transport.agent.WriteGate`; made by :meth:`Network.open_gate`.

    Attributes:
        is_held: `close` fails.
        inner: the gate's agent.
    """

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.inner = MemoryTransport(network, name)
        self.is_held = False

    @property
    def name(self) -> str:
        return self.inner.name

    def metadata(self) -> bytes:
        return self.inner.metadata()

    def received(self) -> list[tuple[str, bytes]]:
        return self.inner.received()

    def close(self) -> bool:
        if not self.is_held and self.network.agents.get(self.name) is self.inner:
            self.network.kill(self.name)
        return not self.is_held
