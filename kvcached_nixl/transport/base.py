# SPDX-License-Identifier: Apache-2.0
"""What a transfer is carried by. Two implementations; the same cases hold them to this (tests/contract/test_transport).

Promises that the rest relies on:

* A notification given to :meth:`Transport.write` arrives after every byte of that WRITE is in place, or not at all. It
  is sent when the writer asks for the state of the ended WRITE and not before: who stops asking never notifies.
* A WRITE that was posted cannot be called back (nixl#2067). Until its state is no longer IN_FLIGHT, both sides' memory
  belongs to it. A FAILED one may have written any part of its bytes.
* Notifications may come late, more than once, in another order, or never.

Threads: one thread posts, asks and sends. Adding and removing peers may happen on another one.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Handle", "Ranges", "State", "Transport", "TransportError"]

Ranges: TypeAlias = npt.NDArray[np.int64]
"""(n, 2): address and length in bytes."""

Handle: TypeAlias = Any
"""A posted WRITE. Keep it until it was released: NIXL ends a transfer whose handle is garbage."""


class State(Enum):
    IN_FLIGHT = "in flight"
    DONE = "done"
    FAILED = "failed"


class TransportError(Exception):
    """Nothing was posted or sent."""


class Transport(Protocol):
    """One agent and the peers it knows."""

    def metadata(self) -> bytes:
        """What a peer needs to add this agent."""
        ...

    def add_peer(self, metadata: bytes, device_id: int = 0) -> str:
        """Get to know an agent whose memory is on ``device_id``; returns its name. Adding it again changes nothing.

        Raises:
            TransportError: the metadata cannot be used.
        """
        ...

    def remove_peer(self, peer: str) -> None:
        """Forget an agent. What is in flight to it fails."""
        ...

    def send(self, peer: str, notification: bytes) -> None:
        """Send a notification that goes with no WRITE.

        Raises:
            TransportError: the peer is not known or cannot be reached.
        """
        ...

    def received(self) -> list[tuple[str, bytes]]:
        """(peer, notification) since the last call, oldest first for each peer."""
        ...

    def write(self, peer: str, local: Ranges, remote: Ranges, notification: bytes) -> Handle:
        """Post one WRITE of ``local`` ranges into ``remote`` ones, which correspond row by row.

        Raises:
            TransportError: nothing was posted.
        """
        ...

    def state(self, handle: Handle) -> State:
        """How a WRITE stands. Ask until it is not in flight: the answer DONE is what sends its notification."""
        ...

    def release(self, handle: Handle) -> None:
        """Give back a WRITE that is not in flight any more."""
        ...
