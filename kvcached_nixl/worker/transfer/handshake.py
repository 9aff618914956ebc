# SPDX-License-Identifier: Apache-2.0
"""The result of a handshake with a rank of another engine, and the check whether the two may exchange KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvcached_nixl.transport.base import Transport
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.handshake import RankHandshake, differences, read_answer, read_rank
from kvcached_nixl.wire.messages import Peer

__all__ = ["ConnectedPeer", "Handshaker"]


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
