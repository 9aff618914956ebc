# SPDX-License-Identifier: Apache-2.0
"""What both roles share in a worker, and the connections to the gates that prefill writes through
(`transport.agent.WriteGate`). Once per worker, owned by the transfer thread.

A registration names the gate to write through. The connection is kept until a newer gate of the same rank is used and
no WRITE to the old one is in flight; or until its rank is forgotten; or until a WRITE fails, because decode has closed
the gate or is dead.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.processes import Host
from kvcached_nixl.settings import MemoryPath, Settings
from kvcached_nixl.transport.agent import Transport, TransportError
from kvcached_nixl.transport.side_channel import SideChannel
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.handshake import Weights
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.worker.outcomes import OutcomeQueue
from kvcached_nixl.worker.transfer.checksums import Checksums
from kvcached_nixl.worker.transfer.ownership_tokens import BUCKETS, TokenArray, TokenBuffers, TokenTable
from kvcached_nixl.worker.transfer.peers import PeerListener, Peers
from kvcached_nixl.worker.transfer.staging import Staging
from kvcached_nixl.worker.transfer.topology import ConnectedPeer, LocalRank
from kvcached_nixl.worker.transfer.transfer_queue import TransferQueue

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


class GateConnections(PeerListener):
    """Connections to the write gates of decode's ranks, beside those to their own ``agents``."""

    def __init__(self, transport: Transport, agents: Peers) -> None:
        self._transport = transport
        self._agents = agents
        # Per rank, metadata -> name of its gates, the newest one last.
        self._of_agent: dict[str, dict[bytes, str]] = {}
        self._agent_of: dict[str, str] = {}
        self._used: Counter[str] = Counter()

    def use(self, known: ConnectedPeer, metadata: bytes) -> str:
        """Returns the agent name to post a WRITE to; call `used` when the WRITE has ended. ``metadata``: of the gate,
        from the registration. Raises `HandOverFailed`: the gate cannot be reached, or belongs to another rank."""
        of_agent = self._of_agent.get(known.agent, {})
        name = of_agent.get(metadata)
        if name is None:
            try:
                name = self._transport.add_peer(metadata, known.rank.device_id, known.rank.memory_type)
            except TransportError as error:
                raise HandOverFailed(FailureCause.LOST, f"decode's write gate was not reached: {error}") from error
            if self._agent_of.setdefault(name, known.agent) != known.agent:
                raise HandOverFailed(FailureCause.PROTOCOL, "decode named a write gate of another rank")
            before = list(of_agent.values())
            self._of_agent.setdefault(known.agent, {})[metadata] = name
            for other in before:
                self._remove_unused(other)
        self._used[name] += 1
        return name

    def used(self, gate: str) -> None:
        """A WRITE through this gate has ended."""
        self._used -= Counter({gate: 1})
        self._remove_unused(gate)

    def lost(self, gate: str) -> None:
        """A transfer has failed: take the connection down, because only that ends what is left of the transfer."""
        agent = self._agent_of.get(gate)
        if agent is None:
            self._agents.lost(gate)
            return
        self._remove(gate)
        # Decode may have closed its gate, or be dead: a handshake with its own agent tells.
        self._agents.doubt(agent)

    def disconnected(self, agent: str) -> None:
        """Remove a rank's gates, which ends what is in flight to them."""
        for gate in dict.fromkeys(self._of_agent.get(agent, {}).values()):
            self._remove(gate)

    def _remove_unused(self, gate: str) -> None:
        agent = self._agent_of.get(gate)
        if agent is not None and not self._used[gate] and gate != next(reversed(self._of_agent[agent].values())):
            self._remove(gate)

    def _remove(self, gate: str) -> None:
        agent = self._agent_of.pop(gate)
        others = {metadata: name for metadata, name in self._of_agent.pop(agent).items() if name != gate}
        if others:
            self._of_agent[agent] = others
        self._transport.remove_peer(gate)


@dataclass
class WorkerContext:
    """What everything that moves KV in one worker uses, whatever its role.

    Attributes:
        wake: set by any thread to wake the transfer thread.
        local: describes the slab's memory where KV is staged, else the KV cache's.
        tokens: registered host memory for ownership tokens, (BUCKETS and buffers, TOKENS_PER_BUCKET), all 0.
        staging: what KV passes through; None where NIXL touches the KV cache itself.
        memory_path: where the memory is that KV is moved from and to.
        own: this rank's address, which a registration carries; None until the first step brings it.
        incarnation: of this engine; "" until the first step.
        weights: what this rank computes with; None until that is known.
        weight_names: of its tensors, as in `Weights.misfit`.
        dropped: counts messages that were ignored.
        distrusted: (host, port, incarnation) of engines whose bytes did not match their checksums.
    """

    settings: Settings
    clock: Clock
    channel: SideChannel
    wake: threading.Event
    transport: Transport
    local: LocalRank
    tokens: TokenArray
    compatibility: str
    checksums: Checksums
    host: Host
    staging: Staging | None = None
    memory_path: MemoryPath = MemoryPath.DIRECT
    own: Peer | None = None
    incarnation: str = ""
    weights: Weights | None = None
    weight_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    distrusted: RecentSet[tuple[str, int, str]] = field(default_factory=RecentSet)

    def __post_init__(self) -> None:
        route = self.settings.transfer_mode.value, self.memory_path.value
        self.outcomes = OutcomeQueue(self.clock, self.local.rank, route)
        self.peers = Peers(
            self.transport, self.local, self.compatibility, self.clock, self.channel, self.host, self.wake.set
        )
        self.dropped = self.peers.dropped
        self.gate_connections = GateConnections(self.transport, self.peers)
        self.transfer_queue = TransferQueue(
            self.transport, self.clock, self.gate_connections.lost, moved=self.outcomes.moved_bytes
        )
        self.token_table = TokenTable(self.tokens[:BUCKETS])
        self.token_buffers = TokenBuffers(self.tokens[BUCKETS:])

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

    def misfit_of(self, known: ConnectedPeer) -> HandOverFailed | None:
        """Returns why KV of a peer cannot be used: it computes with other weights; None if it can."""
        if self.weights is None:
            return HandOverFailed(FailureCause.REFUSED, "the weights of this rank are not known yet")
        misfit = self.weights.misfit(known.rank.weights, self.weight_names)
        if not misfit:
            return None
        reason = f"prefill (engine {known.rank.engine_id}) computes with other weights: {misfit}"
        return HandOverFailed(FailureCause.REFUSED, f"{reason}. Load the same on both sides, or update the older side.")
