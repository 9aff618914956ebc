# SPDX-License-Identifier: Apache-2.0
"""Prefill: connections to the write gates of decode's ranks (`transport.base.WriteGate`). On the transfer thread.

A registration names the gate to write through. The connection is kept until a newer gate of the same rank is used and
no WRITE to the old one is in flight; or until its rank is forgotten; or until a WRITE fails, because decode has closed
the gate or is dead.
"""

from __future__ import annotations

from collections import Counter

from kvcached_nixl.transport.base import Transport, TransportError
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.worker.transfer.peer_link import ConnectedPeer
from kvcached_nixl.worker.transfer.peers import Peers

__all__ = ["GateConnections"]


class GateConnections:
    """See the module. A name that is not a gate's is that of a rank's own agent, and is passed on to ``agents``."""

    def __init__(self, transport: Transport, agents: Peers) -> None:
        self._transport = transport
        self._agents = agents
        self._name_of: dict[tuple[str, bytes], str] = {}
        self._of_agent: dict[str, dict[str, bytes]] = {}
        self._agent_of: dict[str, str] = {}
        # Kept from a gate's first use until it is removed.
        self._connections: dict[str, object] = {}
        self._used: Counter[str] = Counter()

    def __contains__(self, gate: object) -> bool:
        return gate in self._agent_of

    def __len__(self) -> int:
        return len(self._agent_of)

    def use(self, known: ConnectedPeer, metadata: bytes) -> str:
        """Returns the agent name to post a WRITE to; call `used` when the WRITE has ended.

        Args:
            metadata: of the gate, from the registration.

        Raises:
            HandOverFailed: the gate cannot be reached, or belongs to another rank.
        """
        name = self._name_of.get((known.agent, metadata))
        if name is None:
            try:
                name = self._transport.add_peer(metadata, known.rank.device_id, known.rank.memory_type)
            except TransportError as error:
                raise HandOverFailed(FailureCause.LOST, f"decode's write gate was not reached: {error}") from error
            if self._agent_of.get(name, known.agent) != known.agent:
                raise HandOverFailed(FailureCause.PROTOCOL, "decode named a write gate of another rank")
            before = list(self._of_agent.get(known.agent, ()))
            self._name_of[known.agent, metadata] = name
            self._of_agent.setdefault(known.agent, {})[name] = metadata
            self._agent_of[name] = known.agent
            self._connections.setdefault(name, object())
            for other in before:
                self._remove_unused(other)
        self._used[name] += 1
        return name

    def used(self, gate: str) -> None:
        """A WRITE through this gate has ended."""
        self._used -= Counter({gate: 1})
        self._remove_unused(gate)

    def connection(self, gate: str) -> object:
        """Returns an object that stands for the current connection to a gate or agent; once lost, another or None."""
        return self._connections.get(gate) or self._agents.connection(gate)

    def lost(self, gate: str) -> None:
        """A transfer has failed: take the connection down, because only that ends what is left of the transfer."""
        agent = self._agent_of.get(gate)
        if agent is None:
            self._agents.lost(gate)
            return
        self._remove(gate)
        # Decode may have closed its gate, or be dead: a handshake with its own agent tells.
        self._agents.doubt(agent)

    def forget(self, agent: str) -> None:
        """The connection to a rank of decode is taken down: remove its gates, which ends what is in flight to them."""
        for gate in list(self._of_agent.get(agent, ())):
            self._remove(gate)

    def _remove_unused(self, gate: str) -> None:
        agent = self._agent_of.get(gate)
        if agent is not None and not self._used[gate] and gate != next(reversed(self._of_agent[agent])):
            self._remove(gate)

    def _remove(self, gate: str) -> None:
        agent = self._agent_of.pop(gate)
        metadata = self._of_agent[agent].pop(gate)
        if not self._of_agent[agent]:
            del self._of_agent[agent]
        del self._name_of[agent, metadata]
        self._connections.pop(gate, None)
        self._transport.remove_peer(gate)
