# SPDX-License-Identifier: Apache-2.0
"""NIXL keeps a connection for as long as a transfer that was not released refers to it.

``ucx_backend.cpp``: ``nixlUcxBackendReqH::conn_`` is a shared pointer, which only ``release()`` (or an empty list of
requests) resets; ``disconnect()`` erases the engine's own reference and no more."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.transport.agent import Transport
from kvcached_nixl.worker.transfer.transfer_queue import TransferJob, TransferQueue


class Connection:
    """Closed with its last reference, as an endpoint of UCX."""

    def __init__(self, closed: list[str]) -> None:
        self._closed = closed

    def __del__(self) -> None:
        self._closed.append("closed")


class Handle:
    def __init__(self, connection: Connection) -> None:
        self.connection: Connection | None = connection
        self.status = "PROC"


class Nixl:
    """What NIXL 1.5.1 does with connections, as far as that matters here."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.connections: dict[str, Connection] = {}

    def ends(self, name: str, failed: str | None) -> None:
        self.said.append(f"{name} ended")

    def add_remote_agent(self, metadata: bytes) -> str:
        self.connections.setdefault(metadata.decode(), Connection(self.said))
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        del self.connections[name]

    def get_xfer_descs(self, rows: Any, kind: str) -> Any:
        return rows

    def initialize_xfer(self, operation: str, here: Any, there: Any, peer: str, notification: bytes) -> Handle:
        return Handle(self.connections[peer])

    def transfer(self, handle: Handle) -> None: ...

    def check_xfer_state(self, handle: Handle) -> str:
        return handle.status

    def release_xfer_handle(self, handle: Handle) -> None:
        handle.connection = None


def test_no_job_ends_before_the_connection_of_its_failed_transfer_is_closed() -> None:
    """Two READs of two requests from one peer fail, with one look between them and their ends."""
    nixl = Nixl()
    transport = Transport(nixl, "DRAM")
    peer = transport.add_peer(b"prefill")
    queue = TransferQueue(transport, Clock(), transport.remove_peer)
    rows = np.array([[4096, 16]], np.int64)
    for name in ("first", "second"):
        queue.submit(TransferJob("READ", peer, rows, rows, partial(nixl.ends, name)))
    # Some other request was withdrawn, and its READ is still in flight: dropped ones were just looked at.
    other = TransferJob("READ", transport.add_peer(b"another"), rows, rows, lambda _: None)
    queue.submit(other)
    queue.turn()
    queue.drop(other)
    queue.turn()
    handles = [handle for handle, its in transport._in_flight.items() if its == peer]
    for handle in handles:
        handle.status = "ERR"
    del handle, handles
    for _ in range(3):
        queue.turn()
    assert nixl.said[0] == "closed", nixl.said
