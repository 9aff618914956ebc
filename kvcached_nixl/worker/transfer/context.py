# SPDX-License-Identifier: Apache-2.0
"""What both roles share in a worker. Once per worker, owned by the transfer thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.transport.agent import Transport
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.handshake import Weights
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.worker.transfer.checksums import Checksums
from kvcached_nixl.worker.transfer.ownership_tokens import TokenBuffers
from kvcached_nixl.worker.transfer.peer_link import ConnectedPeer, Host
from kvcached_nixl.worker.transfer.peers import Peers
from kvcached_nixl.worker.transfer.staging import Staging
from kvcached_nixl.worker.transfer.topology import LocalRank, PeerRoutes
from kvcached_nixl.worker.transfer.transfer_queue import TransferQueue

__all__ = ["RecentSet", "WorkerContext"]

T = TypeVar("T")

CAPACITY = 65_536


class RecentSet(Generic[T]):
    """The last ``CAPACITY`` distinct members that were added."""

    def __init__(self) -> None:
        self._held: OrderedDict[T, None] = OrderedDict()

    def __contains__(self, thing: T) -> bool:
        return thing in self._held

    def add(self, thing: T) -> None:
        self._held[thing] = None
        if len(self._held) > CAPACITY:
            self._held.popitem(last=False)


@dataclass
class WorkerContext:
    """What everything that moves KV in one worker uses, whatever its role.

    Attributes:
        own: this rank's address, which a registration carries; None until the first step brings it.
        incarnation: of this engine; "" until the first step.
        weights: what this rank computes with; None until that is known.
        weight_names: of its tensors, as in `Weights.misfit`.
        host: tells which processes of this host live.
        staging: what KV passes through; None where NIXL touches the KV cache itself.
        waiting_for_buffer: called when a token buffer is free, by parts that still have to read their ownership token.
        clock: for timelines.
        distrusted: (host, port, incarnation) of engines whose bytes did not match their checksums.
    """

    clock: Clock
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
    weight_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    waiting_for_buffer: list[Callable[[], None]] = field(default_factory=list)
    distrusted: RecentSet[tuple[str, int, str]] = field(default_factory=RecentSet)

    def distrust(self, address: Peer, incarnation: str) -> None:
        """Use no more KV of this engine. Keyed by address as well: an incarnation is only what the peer claims."""
        self.distrusted.add((address.host, address.port, incarnation))

    def distrust_of(self, address: Peer, incarnation: str) -> HandOverFailed | None:
        """Returns why KV of an engine is not used; None if it may be."""
        if (address.host, address.port, incarnation) not in self.distrusted:
            return None
        reason = (
            "an earlier hand-over from this engine failed its checksum, so no KV of this engine is used. "
            'Restart both sides with "memory_path": "host" in kv_connector_extra_config'
        )
        return HandOverFailed(FailureCause.CHECKSUM, reason)

    def meet(
        self,
        address: Peer,
        incarnation: str,
        connected: Callable[[ConnectedPeer], None],
        failed: Callable[[HandOverFailed], None],
        *,
        is_doubted: bool = False,
    ) -> None:
        """Connect to a rank of prefill; fails if it computes with other weights. Else as `Peers.need`."""

        def met(known: ConnectedPeer) -> None:
            misfit = self.misfit_of(known)
            if misfit is None:
                connected(known)
            elif is_doubted:
                failed(misfit)
            else:
                # This may be an old handshake, and weights may have been updated since: repeat it once.
                self.meet(address, incarnation, connected, failed, is_doubted=True)

        self.peers.need(address, incarnation, met, failed, is_doubted=is_doubted)

    def misfit_of(self, known: ConnectedPeer) -> HandOverFailed | None:
        """Returns why KV of a peer cannot be used: it computes with other weights; None if it can."""
        if self.weights is None:
            return HandOverFailed(FailureCause.REFUSED, "the weights of this rank are not known yet")
        misfit = self.weights.misfit(known.rank.weights, self.weight_names)
        if not misfit:
            return None
        reason = f"prefill (engine {known.rank.engine_id}) computes with other weights: {misfit}"
        return HandOverFailed(FailureCause.REFUSED, f"{reason}. Load the same on both sides, or update the older side.")
