# SPDX-License-Identifier: Apache-2.0
"""A transport inside one process: real bytes at real addresses, and every fault on demand. For tests.

Nothing happens by itself: whatever is sent or posted waits in :attr:`Network.pending` until the test delivers, drops,
doubles or fails it, in any order. ``Network(immediate=True)`` delivers at once.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from kvcached_nixl.transport.base import Handle, Operation, Ranges, State, TransportError

__all__ = ["MemoryGate", "MemoryTransport", "Network", "Posted"]


GATE = "#"
"""Between an agent's name and a number, in the name of a gate to its memory."""


@dataclass(eq=False)
class Posted:
    """A notification, with the transfer it belongs to if ``local`` and ``remote`` are not None.

    Attributes:
        sender, receiver: who posted it, and with whom.
    """

    sender: str
    receiver: str
    notification: bytes
    operation: Operation | None = None
    local: Ranges | None = None
    remote: Ranges | None = None
    state: State = State.IN_FLIGHT
    untold: bool = True
    released: bool = False

    @property
    def is_transfer(self) -> bool:
        return self.local is not None


@dataclass
class Network:
    """Agents by name, and what is under way between them, oldest first.

    Attributes:
        gates: those of the agents that are open gates; ``num_opened``: how many there ever were.
    """

    immediate: bool = False
    agents: dict[str, MemoryTransport] = field(default_factory=dict)
    pending: dict[Posted, None] = field(default_factory=dict)
    vanished: set[str] = field(default_factory=set)
    gates: dict[str, MemoryGate] = field(default_factory=dict)
    num_opened: int = 0

    def open_gate(self, owner: str) -> MemoryGate:
        """What others write through into an agent's memory."""
        self.num_opened += 1
        gate = MemoryGate(self, f"{owner}{GATE}{self.num_opened}")
        self.agents[gate.name] = gate.inner
        self.gates[gate.name] = gate
        return gate

    def agent(self, name: str) -> MemoryTransport:
        """A new agent; one of the same name takes the dead one's place."""
        self.agents[name] = MemoryTransport(self, name)
        return self.agents[name]

    def kill(self, name: str) -> None:
        """The process of an agent ends: what it had under way stops where it is, what goes to it fails."""
        for end in [name, *(gate for gate in self.agents if gate.startswith(name + GATE))]:
            del self.agents[end]
            self.gates.pop(end, None)
            for posted in [one for one in self.pending if end in (one.sender, one.receiver)]:
                self.fail(posted)

    def vanish(self, name: str) -> None:
        """The host of an agent is gone without a word: nothing comes from it, and what goes to it never ends."""
        self.vanished.add(name)

    def post(self, posted: Posted) -> None:
        self.pending[posted] = None
        if self.immediate:
            self.deliver(posted)

    def deliver(self, posted: Posted) -> None:
        """Move the bytes of a transfer, whose notification then goes when its state is asked for; or hand one over."""
        if self.is_stuck(posted):
            return
        self._end(posted, State.DONE, 1.0)
        if not posted.is_transfer:
            self.notify(posted)

    def notify(self, posted: Posted) -> None:
        """Hand over the notification; once more if it was handed over already."""
        posted.untold = False
        receiver = self.agents.get(posted.receiver)
        if receiver is not None and posted.notification:
            receiver.inbox.append((posted.sender, posted.notification))

    def drop(self, posted: Posted) -> None:
        """Lose the notification; the bytes of a transfer arrive."""
        self._end(posted, State.DONE, 1.0)
        posted.untold = False

    def fail(self, posted: Posted, moved: float = 0.0) -> None:
        """End a transfer with an error after a share of its ranges was ``moved``; lose its notification."""
        self._end(posted, State.FAILED, moved)

    def deliver_all(self) -> None:
        """Deliver until nothing is pending that can arrive, what arises meanwhile included."""
        while waiting := [one for one in self.pending if not self.is_stuck(one)]:
            for posted in waiting:
                if posted in self.pending:
                    self.deliver(posted)

    def is_stuck(self, posted: Posted) -> bool:
        """Whether it cannot arrive, as long as who has vanished does not come back."""
        return bool(self.vanished & {one.partition(GATE)[0] for one in (posted.sender, posted.receiver)})

    def _end(self, posted: Posted, state: State, share: float) -> None:
        """Nothing of it is under way any more; a ``share`` of its ranges was moved."""
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
    """See the protocol; made by :meth:`Network.agent`. While ``refuse_posts`` holds, nothing can be posted."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.inbox: list[tuple[str, bytes]] = []
        self.posted: list[Posted] = []
        self.refuse_posts = False
        self.keeps_posted = True
        self._peers: set[str] = set()
        self._lost: set[str] = set()

    def metadata(self) -> bytes:
        return self.name.encode()

    def add_peer(self, metadata: bytes, device_id: int = 0, memory_type: str = "") -> str:
        name = metadata.decode(errors="replace")
        if name not in self.network.agents:
            raise TransportError(f"found no agent {name!r}")
        self._peers.add(name)
        return name

    def remove_peer(self, peer: str) -> None:
        self._peers.discard(peer)
        self._lost.discard(peer)
        self._fail_pending(peer)

    def lose(self, peer: str) -> None:
        """The connection is gone and both agents live: nothing reaches the peer until it is removed and added again."""
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
            raise TransportError(f"no {operation} with {peer!r} can be posted")
        posted = Posted(self.name, peer, notification, operation, local, remote)
        if self.keeps_posted:
            self.posted.append(posted)
        self.network.post(posted)
        return posted

    def state(self, handle: Handle) -> State:
        state: State = handle.state
        if state is State.DONE and handle.untold:
            self.network.notify(handle)
        return state

    def release(self, handle: Handle) -> None:
        if handle.state is State.IN_FLIGHT or handle.released:
            raise AssertionError(f"found a {handle.operation} {handle.state.value}, released: {handle.released}")
        handle.released = True

    def unreleased(self) -> list[Posted]:
        """Transfers whose handles were not given back."""
        return [posted for posted in self.posted if not posted.released]

    def _fail_pending(self, peer: str) -> None:
        for posted in [one for one in self.network.pending if (one.sender, one.receiver) == (self.name, peer)]:
            self.network.fail(posted)

    def _require(self, peer: str) -> None:
        if peer not in self._peers - self._lost or peer not in self.network.agents:
            raise TransportError(f"found no way to {peer!r}")


class MemoryGate:
    """See `kvcached_nixl.transport.base.Gate`; made by :meth:`Network.open_gate`.

    Attributes:
        is_held: it does not close.
        inner: the agent that it is.
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
