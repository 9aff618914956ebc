# SPDX-License-Identifier: Apache-2.0
"""A rank of another engine: its handshake, whether the two may exchange KV, and who is told what happens to it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvcached_nixl.transport.base import Transport
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.handshake import Process, RankHandshake, differences, read_answer, read_rank
from kvcached_nixl.wire.messages import Peer

__all__ = ["ConnectedPeer", "Handshaker", "Link", "PeerListener", "Waiting"]


class ConnectedPeer(NamedTuple):
    """A rank after its handshake. ``agent``: its name in the transport, which changes whenever the rank restarts."""

    agent: str
    incarnation: str
    rank: RankHandshake


@dataclass(frozen=True)
class Handshaker:
    """Checks handshake answers and adds peers to the transport. Once per worker, on the transfer thread.

    Attributes:
        compatibility: this rank's compatibility string; a peer's must be equal.
        fits: returns why a peer's memory does not fit this rank's, or "".
    """

    transport: Transport
    compatibility: str
    fits: Callable[[RankHandshake], str]

    def examine(self, address: Peer, compatibility: str, metadata: bytes) -> ConnectedPeer:
        """Check the answer from an address, and add the rank that answered as a peer.

        Raises:
            HandOverFailed: this rank and that one must not exchange KV, or another rank or engine answered.
            TransportError, ValueError: the answer cannot be read.
        """
        where = f"engine {address.engine_id} at {address.host}:{address.port}"
        if compatibility != self.compatibility:
            raise HandOverFailed(
                FailureCause.REFUSED,
                f"{where} is another kind of engine: {differences(compatibility, self.compatibility)}. Run the same "
                "vLLM, kvcached, kvcached_nixl and model with the same dtype and transfer_mode on both sides; "
                "`python -m kvcached_nixl` prints what each has.",
            )
        answer = read_answer(metadata)
        rank = read_rank(answer.rank)
        if (rank.engine_id, rank.tp_size, rank.tp_rank) != (address.engine_id, address.tp_size, address.tp_rank):
            raise HandOverFailed(
                FailureCause.UNREACHABLE if rank.engine_id != address.engine_id else FailureCause.REFUSED,
                f"engine {rank.engine_id} (rank {rank.tp_rank} of {rank.tp_size}) answers at {address.host}:"
                f"{address.port}; expected rank {address.tp_rank} of {address.tp_size} of engine {address.engine_id}",
            )
        misfit = self.fits(rank)
        if misfit:
            raise HandOverFailed(FailureCause.REFUSED, f"{where} does not fit: {misfit}")
        agent = self.transport.add_peer(rank.agent_metadata, rank.device_id, rank.memory_type)
        return ConnectedPeer(agent, answer.incarnation, rank)


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
