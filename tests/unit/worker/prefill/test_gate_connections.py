# SPDX-License-Identifier: Apache-2.0
"""prefill/gate_connections.py: prefill connects to a decode's write gate once, and forgets it when it is not needed."""

from __future__ import annotations

import pytest
from support.internals import gates_of
from support.memory_transport import MemoryGate
from support.worker_fakes import Local, Remote

from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.worker.transfer.context import GateConnections
from kvcached_nixl.worker.transfer.topology import ConnectedPeer


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
