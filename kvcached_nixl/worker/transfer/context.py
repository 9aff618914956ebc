# SPDX-License-Identifier: Apache-2.0
"""What both roles use of a worker. Once per worker, owned by the transfer thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.base import Transport
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.handshake import Weights
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.worker.staging.staging import Staging
from kvcached_nixl.worker.transfer.checksums import Checksums
from kvcached_nixl.worker.transfer.handshake import ConnectedPeer
from kvcached_nixl.worker.transfer.host import Host
from kvcached_nixl.worker.transfer.ownership_tokens import TokenBuffers
from kvcached_nixl.worker.transfer.peers import Peers
from kvcached_nixl.worker.transfer.recent_set import RecentSet
from kvcached_nixl.worker.transfer.topology import LocalRank, PeerRoutes
from kvcached_nixl.worker.transfer.transfer_queue import TransferQueue

__all__ = ["WorkerContext"]

logger = logging.getLogger(SERVER_LOGGER)


@dataclass
class WorkerContext:
    """What everything that moves KV in one worker uses, whatever its role.

    Attributes:
        own: this rank's address, which a registration names; None until the first step has told it.
        start: of this engine; "" until then.
        weights: what this rank computes with; None until that is known.
        host: what is known here of other processes.
        staging: what KV passes through; None where NIXL touches the KV cache itself.
        waiting_for_landing: shares that look at their word when a landing is free.
        distrusted: host, port and start of engines whose bytes were others than they said.
    """

    local: LocalRank
    transport: Transport
    peers: Peers
    transfer_queue: TransferQueue
    routes: PeerRoutes
    token_buffers: TokenBuffers
    checksums: Checksums
    host: Host
    staging: Staging | None = None
    own: Peer | None = None
    incarnation: str = ""
    weights: Weights | None = None
    waiting_for_buffer: list[Callable[[], None]] = field(default_factory=list)
    distrusted: RecentSet[tuple[str, int, str]] = field(default_factory=RecentSet)

    def distrust(self, address: Peer, incarnation: str) -> None:
        """Nothing more of an engine is used. What it says its start is, is no other address's."""
        self.distrusted.add((address.host, address.port, incarnation))

    def distrust_of(self, address: Peer, incarnation: str) -> HandOverFailed | None:
        """Why nothing of an engine is used; None if it may be."""
        if (address.host, address.port, incarnation) not in self.distrusted:
            return None
        reason = (
            "the bytes of another hand-over from this engine were not those that it sent, so none of its is used. "
            'Start both sides again, with "memory_path": "host" in kv_connector_extra_config'
        )
        return HandOverFailed(FailureCause.CHECKSUM, reason)

    def meet(
        self,
        address: Peer,
        incarnation: str,
        connected: Callable[[ConnectedPeer], None],
        failed: Callable[[HandOverFailed], None],
    ) -> None:
        """Meet a rank of prefill whose KV may be used here; ``start`` as of `Peers.need`."""

        def met(known: ConnectedPeer) -> None:
            # It is known from before: it may have been updated since, or this rank.
            if self.misfit_of(known) is None:
                connected(known)
            else:
                self.peers.need(address, incarnation, met_anew, failed, is_doubted=True)

        def met_anew(known: ConnectedPeer) -> None:
            misfit = self.misfit_of(known)
            if misfit is None:
                connected(known)
            else:
                failed(misfit)

        self.peers.need(address, incarnation, met, failed)

    def misfit_of(self, known: ConnectedPeer) -> HandOverFailed | None:
        """Why KV of a rank is not this rank's: it computes with other weights; None if it is."""
        if self.weights is None:
            return HandOverFailed(FailureCause.REFUSED, "what this rank computes with is not known yet")
        misfit = self.weights.misfit(known.rank.weights)
        if not misfit:
            return None
        reason = f"prefill (engine {known.rank.engine_id}) computes with other weights: {misfit}"
        return HandOverFailed(
            FailureCause.REFUSED, f"{reason}. Load the same on both sides, or update those that are older."
        )

    @staticmethod
    def contained(action: Callable[[str], None], failed: Callable[[HandOverFailed], None]) -> Callable[[str], None]:
        """What is called when a job has ended, so that an exception in it fails its owner and nobody else."""

        def ended(reason: str) -> None:
            try:
                action(reason)
            except Exception as defect:
                logger.exception("A hand-over fails by a defect of kvcached_nixl")
                failed(HandOverFailed(FailureCause.DEFECT, f"{type(defect).__name__}: {defect}"))

        return ended
