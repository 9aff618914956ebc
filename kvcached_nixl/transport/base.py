# SPDX-License-Identifier: Apache-2.0
"""The protocols that transfers use. The same tests check both implementations (tests/contract/test_transport).

Guarantees that the rest of the package relies on:

* A notification given to :meth:`Transport.post` with a WRITE arrives after every byte of that WRITE is in place, or not
  at all. It is sent only when the writer polls the state of the finished WRITE: a writer that stops polling never sends
  it.
* A posted transfer cannot be cancelled (nixl#2067). Until its state is no longer IN_FLIGHT, it may use the memory on
  both sides. A FAILED transfer may have moved any part of its bytes, and NIXL has not waited for the rest (nixl#2044):
  it is idle only after its peer was removed, which closes the connection. This holds on the side that posted it; on the
  other side removing a peer changes nothing (`WriteGate`).
* Notifications may arrive late, more than once, out of order, or never.

Threads: used by one thread.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Ranges: TypeAlias = npt.NDArray[np.int64]
"""(n, 2): address and length in bytes."""

Handle: TypeAlias = Any
"""A posted transfer. Keep a reference until it is released: NIXL ends a transfer whose handle is garbage-collected."""

Operation: TypeAlias = Literal["READ", "WRITE"]


class TransferState(Enum):
    IN_FLIGHT = "in flight"
    DONE = "done"
    FAILED = "failed"


class TransportError(Exception):
    """Nothing was posted or sent."""


class WriteGate(Protocol):
    """An agent that is used only for peers to write through into this side's memory.

    NIXL cannot revoke a peer's access. Removing the peer and deregistering the memory do not keep it from writing: over
    TCP, UCX stores what arrives at the address that the message names, and accepts data from any connected peer,
    whether it still has an endpoint to it or not. Closing the agent ends its sockets, its queue pairs and its keys. A
    gate does not stop writes that bypass all of these because the kernel or a device of the same host makes them
    (shared memory, ``process_vm_writev``, CUDA IPC; tests/contract/test_fencing.py).

    Threads: used by one thread at a time; opened and closed in the background, because that may take long.
    """

    @property
    def name(self) -> str:
        """The name under which peers know it after they have added it."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs to write through it."""
        ...

    def received(self) -> list[tuple[str, bytes]]:
        """As `Transport.received`, for the WRITEs that have come through this gate."""
        ...

    def close(self) -> bool:
        """Closes the gate: nothing can be written through it any more. Never raises.

        Returns: False if the gate is still open; call it again to try again.
        """
        ...


class Transport(Protocol):
    """One agent and the peers it knows."""

    def metadata(self) -> bytes:
        """What a peer needs to add this agent."""
        ...

    def add_peer(self, metadata: bytes, device_id: int = 0, memory_type: str = "") -> str:
        """Adds a peer's agent; returns its name. Idempotent.

        Args:
            device_id, memory_type: device and NIXL's name of the memory that the peer's handshake describes; "" is this
                side's memory type.

        Raises:
            TransportError: the metadata cannot be used.
        """
        ...

    def remove_peer(self, peer: str) -> None:
        """Removes a peer's agent and closes the connection. Transfers in flight to it fail. Never raises."""
        ...

    def send(self, peer: str, notification: bytes) -> None:
        """Sends a notification without a transfer.

        Raises:
            TransportError: the peer was not added or cannot be reached.
        """
        ...

    def received(self) -> list[tuple[str, bytes]]:
        """(peer, notification) since the last call, oldest first for each peer.

        Raises:
            TransportError: the agent did not return them.
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
        """Posts one transfer between ``local`` and ``remote`` ranges, which correspond row by row.

        Args:
            notification: sent with a WRITE.
            is_host: the ranges are in registered host memory, not in KV memory.

        Raises:
            TransportError: nothing was posted.
        """
        ...

    def state(self, handle: Handle) -> TransferState:
        """The state of a transfer. Poll until it is not in flight: the call that returns DONE notifies the peer."""
        ...

    def release(self, handle: Handle) -> None:
        """Releases a transfer that is no longer in flight. Never raises."""
        ...
