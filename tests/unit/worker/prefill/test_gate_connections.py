# SPDX-License-Identifier: Apache-2.0
"""prefill/gate_connections.py: prefill connects to a decode's write gate once, and forgets it when it is not needed."""

from __future__ import annotations

import pytest
from support.internals import gates_of
from support.memory_transport import MemoryGate
from support.worker_fakes import Local, Remote

from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.worker.transfer.context import GateConnections
from kvcached_nixl.worker.transfer.peer_link import ConnectedPeer


@pytest.fixture
def local() -> Local:
    return Local()


@pytest.fixture
def remote(local: Local) -> Remote:
    return local.remote()


@pytest.fixture
def gate_connections(local: Local) -> GateConnections:
    return local.gate_connections


def known(remote: Remote) -> ConnectedPeer:
    return ConnectedPeer("remote-0", remote.incarnation, remote.handshake())


def gate_of(local: Local, name: str = "remote-0") -> MemoryGate:
    return local.network.open_gate(name)


def test_a_gate_is_met_once(local: Local, remote: Remote, gate_connections: GateConnections) -> None:
    gate = gate_of(local)
    assert [gate_connections.use(known(remote), gate.metadata()) for _ in range(2)] == [gate.name] * 2
    assert len(gates_of(gate_connections)) == 1 and gate.name in gates_of(gate_connections)
    connection = gate_connections.connection(gate.name)
    assert connection is not None
    gate_connections.used(gate.name)
    gate_connections.used(gate.name)
    assert gate_connections.connection(gate.name) is connection, "the next registration names it, too"


def test_an_earlier_gate_is_let_go_of_when_nothing_is_under_way_to_it(
    local: Local, remote: Remote, gate_connections: GateConnections
) -> None:
    first, second, third = (gate_of(local) for _ in range(3))
    gate_connections.use(known(remote), first.metadata())
    gate_connections.use(known(remote), second.metadata())
    assert first.name in gates_of(gate_connections)
    gate_connections.used(first.name)
    assert first.name not in gates_of(gate_connections) and first.name not in local.transport.peers
    gate_connections.used(second.name)
    gate_connections.use(known(remote), third.metadata())
    assert second.name not in gates_of(gate_connections) and len(gates_of(gate_connections)) == 1


def test_a_gate_that_fails_is_removed_and_its_engine_asked_whether_it_answers(
    local: Local, remote: Remote, gate_connections: GateConnections
) -> None:
    """Decode has closed the gate, or is dead; a handshake with its own agent tells which."""
    local.peers.probe(remote.address)
    local.turn()
    gate = gate_of(local)
    gate_connections.use(known(remote), gate.metadata())
    asked = len(local.asking.asked)
    gate_connections.lost(gate.name)
    assert gate.name not in gates_of(gate_connections) and len(local.asking.asked) == asked + 1
    assert gate_connections.connection(gate.name) is None
    assert local.peers.connection("remote-0")
    gate_connections.lost(gate.name)
    gate_connections.used(gate.name)


def test_whatever_is_no_gate_is_a_rank_s_own_agent(
    local: Local, remote: Remote, gate_connections: GateConnections
) -> None:
    local.peers.probe(remote.address)
    local.turn()
    assert gate_connections.connection("remote-0") is local.peers.connection("remote-0") is not None
    gate_connections.lost("remote-0")
    assert not local.peers.connection("remote-0")


def test_what_is_in_flight_to_a_gate_ends_with_the_connection_to_its_rank(
    local: Local, remote: Remote, gate_connections: GateConnections
) -> None:
    local.peers.probe(remote.address)
    local.turn()
    gates = [gate_of(local) for _ in range(2)]
    for gate in gates:
        gate_connections.use(known(remote), gate.metadata())
    local.peers.lost("remote-0")
    assert len(gates_of(gate_connections)) == 0 and not {gate.name for gate in gates} & local.transport.peers


def test_a_gate_that_cannot_be_reached_is_told_so(
    local: Local, remote: Remote, gate_connections: GateConnections
) -> None:
    with pytest.raises(HandOverFailed) as caught:
        gate_connections.use(known(remote), b"nobody")
    assert caught.value.cause is FailureCause.LOST and len(gates_of(gate_connections)) == 0


def test_a_rank_cannot_name_a_gate_of_another_one(
    local: Local, remote: Remote, gate_connections: GateConnections
) -> None:
    gate = gate_of(local)
    gate_connections.use(known(remote), gate.metadata())
    with pytest.raises(HandOverFailed) as caught:
        gate_connections.use(ConnectedPeer("other-0", remote.incarnation, remote.handshake()), gate.metadata())
    assert caught.value.cause is FailureCause.PROTOCOL and len(gates_of(gate_connections)) == 1
