# SPDX-License-Identifier: Apache-2.0
"""Prefill: the gates of decode's ranks, which its WRITEs go through (`transport.base.Gate`). On the transfer thread.

A registration names one. It is known until a later one of the same rank is, and nothing is under way to it any more; or
until its rank is forgotten; or until it fails: then decode has closed it, or is not there.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from kvcached_nixl.transport.base import Transport, TransportError
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.worker.transfer.handshake import ConnectedPeer

__all__ = ["GateConnections"]


class Agents(Protocol):
    """`peers.Peers`."""

    def lost(self, agent: str) -> None: ...
    def connection(self, agent: str) -> object: ...
    def doubt(self, agent: str) -> None: ...


class GateConnections:
    """See the module. What is no gate is a rank's own agent, which ``agents`` knows."""

    def __init__(self, transport: Transport, agents: Agents) -> None:
        self._transport = transport
        self._agents = agents
        self._name_of: dict[tuple[str, bytes], str] = {}
        self._of_agent: dict[str, dict[str, bytes]] = {}
        self._agent_of: dict[str, str] = {}
        # One from a gate's first naming until it is removed.
        self._connections: dict[str, object] = {}
        self._used: Counter[str] = Counter()

    def __contains__(self, gate: object) -> bool:
        return gate in self._agent_of

    def __len__(self) -> int:
        return len(self._agent_of)

    def use(self, known: ConnectedPeer, metadata: bytes) -> str:
        """What a WRITE to a rank of decode goes to; say `used` when it has ended.

        Raises:
            HandOverFailed: its gate cannot be reached.
        """
        name = self._name_of.get((known.agent, metadata))
        if name is None:
            try:
                name = self._transport.add_peer(metadata, known.rank.device_id, known.rank.memory_type)
            except TransportError as error:
                raise HandOverFailed(FailureCause.LOST, f"decode's gate was not reached: {error}") from error
            if self._agent_of.get(name, known.agent) != known.agent:
                raise HandOverFailed(FailureCause.PROTOCOL, "decode names a gate of somebody else's")
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
        """A WRITE to it has ended."""
        self._used -= Counter({gate: 1})
        self._remove_unused(gate)

    def connection(self, gate: str) -> object:
        """What stands for the present connection to whom is posted; another one, or None, once that is lost."""
        return self._connections.get(gate) or self._agents.connection(gate)

    def lost(self, gate: str) -> None:
        """A transfer has failed. What is left of it is quiet when the connection is taken down."""
        agent = self._agent_of.get(gate)
        if agent is None:
            self._agents.lost(gate)
            return
        self._remove(gate)
        # Decode may have closed its gate, or be gone.
        self._agents.doubt(agent)

    def forget(self, agent: str) -> None:
        """The connection to a rank of decode is given up: what is in flight to it ends."""
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
