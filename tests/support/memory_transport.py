# SPDX-License-Identifier: Apache-2.0
"""A transport inside one process, for tests: it moves real bytes between real addresses, and fails on demand.

Nothing happens by itself: everything sent or posted waits in :attr:`Network.pending` until the test delivers, drops,
duplicates or fails it, in any order. ``Network(immediate=True)`` delivers immediately.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcached_nixl.transport.agent import Handle, Operation, Ranges, TransferState, Transport, TransportError, WriteGate

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
    agents: dict[str, MemoryAgent] = field(default_factory=dict)
    pending: dict[Posted, None] = field(default_factory=dict)
    vanished: set[str] = field(default_factory=set)
    gates: dict[str, MemoryGate] = field(default_factory=dict)
    num_opened: int = 0

    def open_gate(self, owner: str) -> MemoryGate:
        """Opens a gate that peers write through into an agent's memory."""
        self.num_opened += 1
        gate = MemoryGate(self, f"{owner}{GATE}{self.num_opened}")
        self.agents[gate.name] = gate.agent
        self.gates[gate.name] = gate
        return gate

    def agent(self, name: str) -> MemoryTransport:
        """Makes an agent; it replaces a dead one of the same name."""
        made = MemoryTransport(self, name)
        self.agents[name] = made.agent
        return made

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

    def closed(self, sender: str, receiver: str) -> None:
        """The sender has closed its connection to the receiver: what has failed over it moves nothing any more."""

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


class MemoryAgent:
    """What `transport.agent` uses of NIXL's agent, in memory. ``lost``: peers to which the connection is broken."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.inbox: list[tuple[str, bytes]] = []
        self.lost: set[str] = set()

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        heard: dict[str, list[bytes]] = {}
        for sender, notification in self.inbox:
            heard.setdefault(sender, []).append(notification)
        self.inbox = []
        return heard

    def add_remote_agent(self, metadata: bytes) -> str:
        name = metadata.decode(errors="replace")
        if name not in self.network.agents:
            raise KeyError(f"found no agent {name!r}")
        return name

    def remove_remote_agent(self, peer: str) -> None:
        self.lost.discard(peer)
        self.network.closed(self.name, peer)

    def get_xfer_descs(self, rows: npt.NDArray[np.uint64], memory_type: str) -> Ranges:
        return rows[:, :2].astype(np.int64)

    def send_notif(self, peer: str, notif_msg: bytes) -> None:
        self._require(peer)

    def initialize_xfer(self, operation: Operation, local: Ranges, remote: Ranges, peer: str, told: bytes) -> Posted:
        self._require(peer)
        return Posted(self.name, peer, told, operation, local, remote)

    def transfer(self, posted: Posted) -> None:
        """`MemoryTransport.post` posts it: what raises here is not seen."""

    def check_xfer_state(self, posted: Posted) -> str:
        return {TransferState.DONE: "DONE", TransferState.IN_FLIGHT: "PROC"}.get(posted.state, "ERR")

    def _require(self, peer: str) -> None:
        if peer in self.lost or peer not in self.network.agents:
            raise KeyError(f"found no connection to {peer!r}")


class MemoryTransport(Transport):
    """`Transport` over a `MemoryAgent`; made by :meth:`Network.agent`. ``refuse_posts``: posting raises."""

    def __init__(self, network: Network, name: str) -> None:
        self.agent = MemoryAgent(network, name)
        super().__init__(self.agent, "DRAM")
        self.network, self.name = network, name
        self.posted: list[Posted] = []
        self.refuse_posts = False

    @property
    def peers(self) -> frozenset[str]:
        """Names of the agents that were added and not removed."""
        return frozenset(self._peers)

    @property
    def inbox(self) -> list[tuple[str, bytes]]:
        return self.agent.inbox

    def lose(self, peer: str) -> None:
        """Breaks the connection, while both agents live: nothing arrives until the peer is removed and added again."""
        self.agent.lost.add(peer)
        for posted in [one for one in self.network.pending if (one.sender, one.receiver) == (self.name, peer)]:
            self.network.fail(posted)

    def send(self, peer: str, notification: bytes) -> None:
        super().send(peer, notification)
        self.network.post(Posted(self.name, peer, notification))

    def post(self, *arguments: Any, **named: Any) -> Handle:
        if self.refuse_posts:
            raise TransportError("nothing can be posted")
        posted = super().post(*arguments, **named)
        self.posted.append(posted)
        self.network.post(posted)
        return posted

    def state(self, handle: Handle) -> TransferState:
        state = super().state(handle)
        if state is TransferState.DONE and handle.untold:
            self.network.notify(handle)
        return state

    def release(self, handle: Handle) -> None:
        if handle.state is TransferState.IN_FLIGHT or handle.released:
            raise AssertionError(f"found a {handle.operation} {handle.state.value}, released: {handle.released}")
        handle.released = True

    def unreleased(self) -> list[Posted]:
        """Transfers whose handles were not released."""
        return [posted for posted in self.posted if not posted.released]


class MemoryGate(WriteGate):
    """Made by :meth:`Network.open_gate`. ``is_held``: `close` fails."""

    def __init__(self, network: Network, name: str) -> None:
        self.agent = self._agent = MemoryAgent(network, name)
        self.network, self.name = network, name
        self.is_held = False

    def close(self) -> bool:
        if not self.is_held and self.network.agents.get(self.name) is self.agent:
            self.network.kill(self.name)
        return not self.is_held
