# SPDX-License-Identifier: Apache-2.0
"""A transport inside one process: real bytes at real addresses, and every fault on demand. For tests.

Nothing happens by itself: whatever is sent or written waits in :attr:`Network.pending` until the test delivers, drops,
doubles or fails it, in any order. ``Network(immediate=True)`` delivers at once.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from kvcached_nixl.transport.base import Handle, Ranges, State, TransportError

__all__ = ["MemoryTransport", "Network", "Operation"]


@dataclass(eq=False)
class Operation:
    """A notification, with the WRITE it belongs to if ``local`` and ``remote`` are not None."""

    sender: str
    receiver: str
    notification: bytes
    local: Ranges | None = None
    remote: Ranges | None = None
    state: State = State.IN_FLIGHT
    untold: bool = True
    released: bool = False

    @property
    def is_write(self) -> bool:
        return self.local is not None


@dataclass
class Network:
    """Agents by name, and what is under way between them, oldest first."""

    immediate: bool = False
    agents: dict[str, MemoryTransport] = field(default_factory=dict)
    pending: list[Operation] = field(default_factory=list)

    def agent(self, name: str) -> MemoryTransport:
        """A new agent; one of the same name takes the dead one's place."""
        self.agents[name] = MemoryTransport(self, name)
        return self.agents[name]

    def kill(self, name: str) -> None:
        """The process of an agent ends: what it had under way stops where it is, what goes to it fails."""
        del self.agents[name]
        for operation in [one for one in self.pending if name in (one.sender, one.receiver)]:
            self.fail(operation)

    def post(self, operation: Operation) -> None:
        self.pending.append(operation)
        if self.immediate:
            self.deliver(operation)

    def deliver(self, operation: Operation) -> None:
        """Move the bytes of a WRITE, whose notification then goes when its state is asked for; or hand one over."""
        self._end(operation, State.DONE, 1.0)
        if not operation.is_write:
            self.notify(operation)

    def notify(self, operation: Operation) -> None:
        """Hand over the notification; once more if it was handed over already."""
        operation.untold = False
        receiver = self.agents.get(operation.receiver)
        if receiver is not None:
            receiver.inbox.append((operation.sender, operation.notification))

    def drop(self, operation: Operation) -> None:
        """Lose the notification; the bytes of a WRITE arrive."""
        self._end(operation, State.DONE, 1.0)
        operation.untold = False

    def fail(self, operation: Operation, moved: float = 0.0) -> None:
        """End a WRITE with an error after a share of its ranges was ``moved``; lose its notification."""
        self._end(operation, State.FAILED, moved)

    def deliver_all(self) -> None:
        """Deliver until nothing is pending, what arises meanwhile included."""
        while self.pending:
            self.deliver(self.pending[0])

    def _end(self, operation: Operation, state: State, share: float) -> None:
        """Nothing of an operation is under way any more; a ``share`` of its ranges was moved."""
        self.pending.remove(operation)
        operation.state = state
        if operation.local is None or operation.remote is None or operation.receiver not in self.agents:
            return
        count = int(len(operation.local) * share)
        for (source, length), (target, _) in zip(operation.local[:count], operation.remote[:count], strict=True):
            ctypes.memmove(int(target), int(source), int(length))


class MemoryTransport:
    """See the protocol; made by :meth:`Network.agent`. While ``refuse_writes`` holds, no WRITE can be posted."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.inbox: list[tuple[str, bytes]] = []
        self.posted: list[Operation] = []
        self.refuse_writes = False
        self._peers: set[str] = set()
        self._lost: set[str] = set()

    def metadata(self) -> bytes:
        return self.name.encode()

    def add_peer(self, metadata: bytes, device_id: int = 0) -> str:
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
        self.network.post(Operation(self.name, peer, notification))

    def received(self) -> list[tuple[str, bytes]]:
        found, self.inbox = self.inbox, []
        return found

    def write(self, peer: str, local: Ranges, remote: Ranges, notification: bytes) -> Handle:
        self._require(peer)
        if self.refuse_writes:
            raise TransportError(f"no WRITE to {peer!r} can be posted")
        operation = Operation(self.name, peer, notification, local, remote)
        self.posted.append(operation)
        self.network.post(operation)
        return operation

    def state(self, handle: Handle) -> State:
        state: State = handle.state
        if state is State.DONE and handle.untold:
            self.network.notify(handle)
        return state

    def release(self, handle: Handle) -> None:
        if handle.state is State.IN_FLIGHT or handle.released:
            raise AssertionError(f"found a WRITE {handle.state.value}, released: {handle.released}; expected it ended")
        handle.released = True

    def unreleased(self) -> list[Operation]:
        """WRITEs whose handles were not given back."""
        return [operation for operation in self.posted if not operation.released]

    def _fail_pending(self, peer: str) -> None:
        for operation in [one for one in self.network.pending if (one.sender, one.receiver) == (self.name, peer)]:
            self.network.fail(operation)

    def _require(self, peer: str) -> None:
        if peer not in self._peers - self._lost or peer not in self.network.agents:
            raise TransportError(f"found no way to {peer!r}")
