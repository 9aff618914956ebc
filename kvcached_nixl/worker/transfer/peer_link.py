# SPDX-License-Identifier: Apache-2.0
"""What `transfer.peers` keeps of one address, and whom it tells what happens there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvcached_nixl.wire.causes import HandOverFailed
from kvcached_nixl.wire.handshake import Process
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.worker.transfer.handshake import ConnectedPeer

__all__ = ["Link", "PeerListener", "Waiting"]


class Waiting(NamedTuple):
    """Who needs a rank of an incarnation, "" for any."""

    incarnation: str
    known: Callable[[ConnectedPeer], None]
    failed: Callable[[HandOverFailed], None]


@dataclass(eq=False)
class Link:
    """What is known of an address.

    Attributes:
        known: whom it is connected to; None if it is not.
        answer: the handshake that ``known`` was made from.
        process: that of ``known``, if it is one of this host whose end is visible.
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
    process: Process | None = None
    last_agent: str | None = None
    is_asked: bool = False
    is_doubted: bool = False
    is_failing: bool = False
    tries: int = 0
    waiting: list[Waiting] = field(default_factory=list)

    @property
    def level(self) -> int:
        """Log level: a peer that may still write is asked until it answers or is fenced, so warn only once."""
        return logging.INFO if self.is_failing else logging.WARNING


class PeerListener(Protocol):
    """Depends on peers, and is told what happens to them (`Peers.listen`). Called on the transfer thread."""

    def is_used(self, agent: str) -> bool:
        """Whether a transfer still depends on an agent that was not used for FORGOTTEN_SECONDS."""
        ...

    def may_write(self, agent: str) -> bool:
        """Whether an agent may be writing into this rank's memory. Its connection is then kept even if its side channel
        fails: it has to be told to stop, and to answer that it has."""
        ...

    def dead(self, agent: str) -> None:
        """No address leads to an agent any more: another one answers in its place. Its process may still run."""
        ...

    def unreachable(self, agent: str) -> None:
        """Nobody listens at an agent's address: its process may have ended, or only its listener."""
        ...

    def disconnected(self, agent: str) -> None:
        """The connection to an agent is about to be taken down."""
        ...
