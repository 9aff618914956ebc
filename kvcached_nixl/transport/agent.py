# SPDX-License-Identifier: Apache-2.0
"""Makes NIXL agents, and moves bytes and notifications between them. The same tests check it over NIXL's agents and
over those in memory that other tests use (tests/contract/test_transport).

NIXL's bindings raise a different exception class for each status, without a common base, so ``Exception`` is caught.

Guarantees that the rest of the package relies on:

* A notification given to :meth:`Transport.post` with a WRITE arrives after every byte of that WRITE is in place, or not
  at all. It is sent only when the writer polls the state of the finished WRITE: a writer that stops polling never sends
  it.
* A posted transfer cannot be cancelled (nixl#2067), not by removing its peer either: NIXL then calls it failed, while
  UCX goes on moving its bytes (tests/contract/test_fencing.py). So a peer that is removed stays connected until every
  transfer to it has ended. Until its state is no longer IN_FLIGHT, a transfer may use the memory on both sides.
* A FAILED transfer may have moved any part of its bytes, and NIXL has not waited for the rest (nixl#2044): it is idle
  only once the connection to its peer is closed (`is_idle`). This holds on the side that posted it; on the other side
  removing a peer changes nothing (`WriteGate`).
* Notifications may arrive late, more than once, out of order, or never.

Threads: used by one thread.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import uuid
import weakref
from collections.abc import Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcached_nixl.settings import SERVER_LOGGER

logger = logging.getLogger(SERVER_LOGGER)

Ranges: TypeAlias = npt.NDArray[np.int64]
"""(n, 2): address and length in bytes."""

Handle: TypeAlias = Any
"""A posted transfer. Keep a reference until it is released: NIXL ends a transfer whose handle is garbage-collected."""

Operation: TypeAlias = Literal["READ", "WRITE"]


class TransferState(Enum):
    IN_FLIGHT = "in flight"
    DONE = "done"
    FAILED = "failed"


class TransportError(Exception):
    """Nothing was posted or sent."""


_STATES = MappingProxyType({"DONE": TransferState.DONE, "PROC": TransferState.IN_FLIGHT})


def descriptors(agent: Any, ranges: Ranges, memory_type: str, device_id: int = 0) -> Any:
    """NIXL's descriptors of ``ranges``, in their order."""
    rows = np.empty((len(ranges), 3), dtype=np.uint64)
    rows[:, :2] = ranges
    rows[:, 2] = device_id
    return agent.get_xfer_descs(rows, memory_type)


class _Agent:
    def __init__(self, agent: Any) -> None:
        self._agent: Any = agent

    def metadata(self) -> bytes:
        """What a peer needs to add this agent, or to write through it."""
        return bytes(self._agent.get_agent_metadata())

    def received(self) -> list[tuple[str, bytes]]:
        """(peer, notification) since the last call, oldest first for each peer. Raises `TransportError`: the agent did
        not return them."""
        try:
            heard = self._agent.get_new_notifs()
        except Exception as error:
            raise TransportError(f"NIXL did not return its notifications: {error}") from error
        return [(peer, notification) for peer, some in heard.items() for notification in some]


class WriteGate(_Agent):
    """An agent that is used only for peers to write through into this side's memory.

    NIXL cannot revoke a peer's access. Removing the peer and deregistering the memory do not keep it from writing: over
    TCP, UCX stores what arrives at the address that the message names, and accepts data from any connected peer,
    whether it still has an endpoint to it or not. Closing the agent ends its sockets, its queue pairs and its keys, but
    not writes that the kernel or a device of the same host makes (tests/contract/test_fencing.py).

    Threads: one at a time; opened and closed in the background, because that may take long. An agent ends with its last
    reference, so nothing else may hold one.
    """

    def __init__(self, agent: Any) -> None:
        super().__init__(agent)
        self._left = [weakref.ref(agent), weakref.ref(agent.agent)]
        # Under which peers know it after they have added it.
        self.name = str(agent.name)

    def close(self) -> bool:
        """Nothing can be written through it any more; False if it is still open: call it again. Never raises."""
        if self._agent is None:
            # The last call left a reference somewhere, e.g. in an exception's frames, which may be part of a cycle.
            gc.collect()
        self._agent = None
        return all(one() is None for one in self._left)


class Transport(_Agent):
    """One agent (``nixl_agent``; vLLM's ``NixlWrapper`` is that class), and the peers it knows.

    Args:
        memory_type: NIXL's name for the memory that KV is moved from and to on this side, ``DRAM`` or ``VRAM``.
        device_id: device of that memory.
    """

    def __init__(self, agent: Any, memory_type: str, device_id: int = 0) -> None:
        super().__init__(agent)
        self._memory_type = memory_type
        self._device_id = device_id
        self._peers: dict[str, tuple[str, int]] = {}
        # Kept from a peer's first addition until it is removed.
        self._connections: dict[str, object] = {}
        # Transfers in flight, and those that have failed; with the peer while their connection is open.
        self._in_flight: dict[Handle, str] = {}
        self._failed: dict[Handle, str | None] = {}
        # Removed, and still connected.
        self._leaving: dict[str, object] = {}

    def add_peer(self, metadata: bytes, device_id: int = 0, memory_type: str = "") -> str:
        """Adds a peer's agent, and the memory that its handshake describes ("": this side's memory type); returns its
        name. Idempotent. Raises `TransportError`: the metadata cannot be used."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransportError(f"the peer's NIXL metadata was not accepted: {error}") from error
        # As NIXL reports senders, whatever it returns here.
        peer = name.decode() if isinstance(name, bytes) else str(name)
        if peer in self._leaving and peer in self._failed.values():
            raise TransportError(f"a transfer with {peer} has failed, and its connection could not be closed yet")
        left = self._leaving.pop(peer, None)
        self._peers[peer] = memory_type or self._memory_type, device_id
        # The same one, if it was not closed: what is in flight belongs to it.
        self._connections.setdefault(peer, left or object())
        return peer

    def connection(self, peer: str) -> object:
        """Returns an object that stands for the current connection to a peer; once it is removed, another or None."""
        return self._connections.get(peer)

    def remove_peer(self, peer: str) -> None:
        """Removes a peer's agent. Nothing more is posted or sent to it, and the connection is closed once no transfer
        is in flight to it. Never raises."""
        connection = self._connections.pop(peer, None)
        if self._peers.pop(peer, None) is not None:
            self._leaving[peer] = connection
            if peer in self._in_flight.values():
                logger.warning(
                    "The connection to %s is given up with transfers in flight. Their blocks are held until the peer "
                    "goes on, its process ends, or UCX finds its host gone.",
                    peer,
                )
            self._close_idle(peer)

    def _close_idle(self, peer: str) -> None:
        if peer not in self._leaving or peer in self._in_flight.values():
            return
        del self._leaving[peer]
        try:
            self._agent.remove_remote_agent(peer)
        except Exception as error:  # noqa: BLE001 - NIXL's; it has already removed the peer by itself
            logger.info("NIXL had already removed the peer %s: %s", peer, error)
        self._failed = {handle: None if other == peer else other for handle, other in self._failed.items()}

    def send(self, peer: str, notification: bytes) -> None:
        """Sends a notification without a transfer. Raises `TransportError`: the peer was not added or cannot be
        reached."""
        self._memory_of(peer)
        try:
            self._agent.send_notif(peer, notif_msg=notification)
        except Exception as error:
            raise TransportError(f"a notification to {peer} was not sent: {error}") from error

    def post(
        self,
        operation: Operation,
        peer: str,
        local: Ranges,
        remote: Ranges,
        notification: bytes = b"",
        *,
        is_host: bool = False,
    ) -> Handle:
        """Posts one transfer between ``local`` and ``remote`` ranges, which correspond row by row. Raises
        `TransportError`: nothing was posted.

        Args:
            notification: sent with a WRITE.
            is_host: the ranges are in registered host memory, not in KV memory.
        """
        here, there = (self._memory_type, self._device_id), self._memory_of(peer)
        if is_host:
            here = there = ("DRAM", 0)
        try:
            handle = self._agent.initialize_xfer(
                operation,
                descriptors(self._agent, local, *here),
                descriptors(self._agent, remote, *there),
                peer,
                notification,
            )
        except Exception as error:
            raise TransportError(f"a {operation} with {peer} was not posted: {error}") from error
        self._in_flight[handle] = peer
        # If this raises, part of the transfer may have been posted all the same. Its state decides.
        with contextlib.suppress(Exception):
            self._agent.transfer(handle)
        return handle

    def state(self, handle: Handle) -> TransferState:
        """The state of a transfer. Poll until it is not in flight: the call that returns DONE notifies the peer."""
        if handle in self._failed:
            return TransferState.FAILED
        try:
            found = _STATES.get(self._agent.check_xfer_state(handle), TransferState.FAILED)
        except Exception:  # noqa: BLE001 - NIXL raises for a transfer that ended with an error
            found = TransferState.FAILED
        if found is not TransferState.IN_FLIGHT and (peer := self._in_flight.pop(handle, None)) is not None:
            if found is TransferState.FAILED:
                self._failed[handle] = peer
                # NIXL keeps a peer's connection open until its last transfer is released.
                self._release(handle)
            self._close_idle(peer)
        return found

    def is_idle(self, handle: Handle) -> bool:
        """Whether nothing of a FAILED transfer is moved any more. Remove its peer first."""
        return self._failed.get(handle) is None

    def move(
        self,
        operation: Operation,
        peer: str,
        local: Ranges,
        remote: Ranges,
        within_seconds: float,
        *,
        is_host: bool = False,
    ) -> float:
        """Makes one transfer, and waits for its end. Returns its duration in seconds. Raises `TransportError`: it was
        not posted, or has failed; `TimeoutError`: it did not end within ``within_seconds``."""
        what = f"a {operation} of {int(remote[:, 1].sum())} bytes in {len(remote)} descriptors"
        begun = time.perf_counter()
        handle = self.post(operation, peer, local, remote, is_host=is_host)
        while (state := self.state(handle)) is TransferState.IN_FLIGHT:
            if time.perf_counter() - begun > within_seconds:
                raise TimeoutError(f"{what} did not end")
        if state is TransferState.FAILED:
            raise TransportError(f"{what} failed")
        self.release(handle)
        return time.perf_counter() - begun

    def release(self, handle: Handle) -> None:
        """Releases a transfer that is no longer in flight. Never raises."""
        self._failed.pop(handle, None)
        self._release(handle)

    def _release(self, handle: Handle) -> None:
        """A second time, NIXL does nothing."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:  # noqa: BLE001 - NIXL's; the handle is freed with its last reference
            logger.warning("NIXL did not release a transfer: %s", error)

    def _memory_of(self, peer: str) -> tuple[str, int]:
        try:
            return self._peers[peer]
        except KeyError:
            raise TransportError(f"found no peer {peer!r}; expected one that was added") from None


def make_agent(backends: Sequence[str]) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(uuid.uuid4().hex, nixl_agent_config(backends=list(backends)))


def register(
    agent: Any,
    extents: Sequence[tuple[int, int]],
    backends: Sequence[str],
    memory_type: str = "DRAM",
    device_id: int = 0,
) -> Any:
    """Registers memory, (address, bytes) each, so that peers can use it. Returns what NIXL needs to deregister it."""
    found = agent.get_reg_descs([(*extent, device_id, "") for extent in extents], memory_type)
    agent.register_memory(found, backends=list(backends))
    return found


PROGRESS_MICROSECONDS = 10_000
"""How long the progress thread of a gate's agent waits for socket events before it polls by itself."""


def open_gate(
    backends: Sequence[str], extents: Sequence[tuple[int, int]], memory_type: str, device_id: int = 0
) -> WriteGate:
    """Opens a gate to the memory in ``extents``, (address, bytes) each. Raises `TransportError`: NIXL could not make
    the agent, or not register the memory with it."""
    try:
        from nixl import _bindings
        from nixl._api import nixl_agent, nixl_agent_config

        name = uuid.uuid4().hex
        agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        config = _bindings.nixlAgentConfig()
        # NIXL's Python API gives its C++ agent a delay of 0, with which each gate's thread would keep a core busy.
        config.useProgThread, config.pthrDelay = True, PROGRESS_MICROSECONDS
        agent.agent = _bindings.nixlAgent(name, config)
        for backend in backends:
            agent.create_backend(backend, {})
        register(agent, extents, backends, memory_type, device_id)
    except Exception as error:
        raise TransportError(f"NIXL could not make an agent for peers to write through: {error}") from error
    return WriteGate(agent)


def select_device(kind: str, index: int) -> None:
    """Makes a device current in the calling thread, with its context: ``kind`` is torch's name of the accelerator, or
    ``cpu``, for which this does nothing. Raises RuntimeError, from torch: the device cannot be used.

    A thread starts with device 0 and without a context. Each one that calls NIXL or uses a device selects it first, for
    two reasons. UCX takes the context that is current in the thread that connects a peer, and does not use cuda_ipc if
    there is none. And code that restores the previous device, as leaving a stream or an event does, would make a
    context on device 0: some hundred MiB for every rank. vLLM's handshake thread does the same (``_nixl_handshake`` in
    ``v1/nixl/base_worker.py``, ``set_device`` in ``platforms/cuda.py``, pytorch#155668).
    """
    if kind == "cpu":
        return
    import torch

    torch.accelerator.set_device_index(index)
    # Selecting the device that is already current makes no context; the first use of the device does.
    torch.zeros(1, device=f"{kind}:{index}")
