# SPDX-License-Identifier: Apache-2.0
"""What a handshake found out of a rank of another engine, and whether the two may exchange KV."""

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
    """A rank after its handshake. ``agent``: as the transport calls it; another one after each start."""

    agent: str
    incarnation: str
    rank: RankHandshake


@dataclass(frozen=True)
class Handshaker:
    """How this rank meets others. Once per worker, on the transfer thread.

    Attributes:
        compatibility: this rank's own string, which a peer must equal.
        fits: says in words what of a peer's memory does not fit this rank's, or "".
    """

    transport: Transport
    compatibility: str
    fits: Callable[[RankHandshake], str]

    def examine(self, address: Peer, compatibility: str, metadata: bytes) -> ConnectedPeer:
        """Examine what was answered at an address, and add whoever it is as a peer.

        Raises:
            HandOverFailed: this rank and that one must not exchange KV, or another one answers.
            TransportError, ValueError: what was answered cannot be read.
        """
        where = f"engine {address.engine_id} at {address.host}:{address.port}"
        if compatibility != self.compatibility:
            raise HandOverFailed(
                FailureCause.REFUSED,
                f"{where} is another kind of engine: {differences(compatibility, self.compatibility)}. Run the same "
                "vLLM, kvcached, kvcached_nixl and model with the same KVCACHED_CONTIGUOUS_LAYOUT, dtype and "
                "transfer_mode on both sides; `python -m kvcached_nixl` prints what each has.",
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
