# SPDX-License-Identifier: Apache-2.0
"""What a transfer is carried by. Two implementations; the same cases hold them to this (tests/contract/test_transport).

Promises that the rest relies on:

* A notification given to :meth:`Transport.post` with a WRITE arrives after every byte of that WRITE is in place, or not
  at all. It is sent when the writer asks for the state of the ended WRITE and not before: who stops asking never
  notifies.
* A transfer that was posted cannot be called back (nixl#2067). Until its state is no longer IN_FLIGHT, the memory on
  both sides belongs to it. A FAILED one may have moved any part of its bytes, and NIXL has not waited for the rest
  (nixl#2044): it is quiet when its peer was removed, which takes the connection down, and not before. That is so on the
  side that has posted it; on the other side removing a peer changes nothing (`Gate`).
* Notifications may come late, more than once, in another order, or never.

Threads: one thread uses it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Gate", "Handle", "Operation", "Ranges", "State", "Transport", "TransportError"]

Ranges: TypeAlias = npt.NDArray[np.int64]
"""(n, 2): address and length in bytes."""

Handle: TypeAlias = Any
"""A posted transfer. Keep it until it was released: NIXL ends a transfer whose handle is garbage."""

Operation: TypeAlias = Literal["READ", "WRITE"]


class State(Enum):
    IN_FLIGHT = "in flight"
    DONE = "done"
    FAILED = "failed"


class TransportError(Exception):
    """Nothing was posted or sent."""


class Gate(Protocol):
    """What peers write through into this side's memory: an agent that nothing else is done with.

    NIXL has no word that takes back what a peer was allowed. Removing the peer and deregistering the memory do not keep
    it from writing: over TCP, UCX puts what arrives where it says, and takes what has connected whether it still has an
    endpoint to it or not. What ends with the agent are its sockets, its queue pairs and its keys. What is written by
    the kernel or a device of the same host, past all of those (shared memory, ``process_vm_writev``, CUDA IPC), a gate
    does not stop (tests/contract/test_fencing.py).

    Threads: one after the other; opened and closed where that may take a while.
    """

    @property
    def name(self) -> str:
        """As peers call it once they have added it."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs to write through it."""
        ...

    def received(self) -> list[tuple[str, bytes]]:
        """As `Transport.received`, of the WRITEs that have come through it."""
        ...

    def close(self) -> bool:
        """Nothing comes through any more, unless False: then it is still there. Again tries again. Never raises."""
        ...


class Transport(Protocol):
    """One agent and the peers it knows."""

    def metadata(self) -> bytes:
        """What a peer needs to add this agent."""
        ...

    def add_peer(self, metadata: bytes, device_id: int = 0, memory_type: str = "") -> str:
        """Get to know an agent; returns its name. Adding it again changes nothing.

        Args:
            device_id, memory_type: of the memory that its handshake describes, as NIXL counts and calls them; a type
                of "" is this side's own.

        Raises:
            TransportError: the metadata cannot be used.
        """
        ...

    def remove_peer(self, peer: str) -> None:
        """Forget an agent and take the connection down. What is in flight to it fails. Never raises."""
        ...

    def send(self, peer: str, notification: bytes) -> None:
        """Send a notification that goes with no transfer.

        Raises:
            TransportError: the peer is not known or cannot be reached.
        """
        ...

    def received(self) -> list[tuple[str, bytes]]:
        """(peer, notification) since the last call, oldest first for each peer.

        Raises:
            TransportError: the agent cannot be asked.
        """
        ...

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
        """Post one transfer between ``local`` and ``remote`` ranges, which correspond row by row.

        Args:
            notification: goes with a WRITE.
            is_host: the ranges are in registered host memory, not in KV memory.

        Raises:
            TransportError: nothing was posted.
        """
        ...

    def state(self, handle: Handle) -> State:
        """How a transfer stands. Ask until it is not in flight: the answer DONE is what sends its notification."""
        ...

    def release(self, handle: Handle) -> None:
        """Give back a transfer that is not in flight any more. Never raises."""
        ...
