# SPDX-License-Identifier: Apache-2.0
"""Build the parts of a worker over the memory that was registered. Once per process, on the engine's thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from kvcached_nixl.current_device import select
from kvcached_nixl.deadlines import Clock
from kvcached_nixl.ids import EngineId
from kvcached_nixl.settings import MemoryPath, Settings
from kvcached_nixl.transport.agent import open_gate, register_host_memory
from kvcached_nixl.transport.base import Transport, WriteGate
from kvcached_nixl.wire.handshake import MemoryType, RankHandshake, Tag, Weights
from kvcached_nixl.wire.planes import HeadShare
from kvcached_nixl.worker.background import Background
from kvcached_nixl.worker.decode.receiver import Receiver
from kvcached_nixl.worker.decode.write_gates import WriteGates
from kvcached_nixl.worker.facade import WorkerFacade
from kvcached_nixl.worker.geometry.kv_checksum import Content
from kvcached_nixl.worker.geometry.planes import group_memory, layers_digest
from kvcached_nixl.worker.memory_registration import Registered
from kvcached_nixl.worker.outcome_queue import OutcomeQueue
from kvcached_nixl.worker.prefill.gate_connections import GateConnections
from kvcached_nixl.worker.prefill.registry import OfferRegistry
from kvcached_nixl.worker.staging.sizing import num_kept
from kvcached_nixl.worker.staging.slots import Slots
from kvcached_nixl.worker.staging.staging import Copier, Staging
from kvcached_nixl.worker.thread_messages import IsReached, LocalIdentity
from kvcached_nixl.worker.transfer.checksums import Checksums
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.host import Host
from kvcached_nixl.worker.transfer.ownership_tokens import (
    BUCKETS,
    BUFFERS,
    TOKENS_PER_BUCKET,
    TokenArray,
    TokenBuffers,
    TokenTable,
)
from kvcached_nixl.worker.transfer.peer_link import Handshaker
from kvcached_nixl.worker.transfer.peers import Ask, Peers
from kvcached_nixl.worker.transfer.topology import LocalRank, PeerRoutes, fits
from kvcached_nixl.worker.transfer.transfer_queue import TransferQueue
from kvcached_nixl.worker.transfer_thread import TransferThread

__all__ = ["Channel", "StockWorker", "assemble", "record_event", "build_worker"]


class Channel(Protocol):
    """What a worker uses of the side channel."""

    def ask(self, host: str, port: int, tp_rank: int) -> Any: ...
    def wake(self, host: str, port: int, key: str) -> None: ...
    def close(self) -> None: ...


class StockWorker(Protocol):
    """What this module uses of vLLM's NIXL worker; implemented by ``adapter.nixl_worker.WorkerView``."""

    @property
    def agent(self) -> Any: ...
    @property
    def backends(self) -> list[str]: ...
    @property
    def memory_type(self) -> MemoryType: ...
    @property
    def device_id(self) -> int: ...
    @property
    def engine_id(self) -> str: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def kernel_blocks_per_block(self) -> int: ...
    def share_of(self, num_heads: int) -> HeadShare: ...
    @property
    def kv_shares(self) -> int: ...
    @property
    def answers_before_drafts(self) -> bool: ...
    @property
    def zeroes_blocks(self) -> bool: ...
    @property
    def facts(self) -> tuple[tuple[str, str], ...]: ...
    def keep_registered(self, descriptors: Any) -> None: ...
    def offer_handshake(self, compatibility: str, metadata: bytes) -> None: ...


def nothing() -> None:
    """Default for callbacks that are optional."""


def build_worker(
    worker: StockWorker, registered: Registered, settings: Settings, channel: Channel, clock: Clock
) -> WorkerFacade:
    """Describe the registered memory, publish the handshake answer to peers, and start the threads that move KV.

    Raises:
        LayoutRefused: the memory cannot be described token by token and head by head.
    """
    layout, slab = registered.layout, registered.slab
    own_groups = groups = tuple(
        group_memory(layout, layers, worker.kernel_blocks_per_block, worker.share_of)
        for layers in registered.layers_of_groups
    )
    if slab is not None:
        groups = slab.groups(groups)
    local = LocalRank(
        engine_id=EngineId(worker.engine_id),
        tp_size=worker.tp_size,
        tp_rank=worker.tp_rank,
        groups=groups,
        kv_shares=worker.kv_shares,
        needs_equal_blocks=slab is not None and worker.zeroes_blocks,
    )
    tokens: TokenArray = np.zeros((BUCKETS + BUFFERS, TOKENS_PER_BUCKET), dtype=np.uint64)
    worker.keep_registered(register_host_memory(worker.agent, tokens, worker.backends))
    memory_type = registered.memory_type or worker.memory_type
    transport = Transport(worker.agent, memory_type, worker.device_id)
    tag = Tag(
        mode=settings.transfer_mode.value,
        facts=(*worker.facts, ("layers of groups", layers_digest(layout, registered.layers_of_groups))),
        planes=tuple(
            tuple((len(kind.bases), kind.cell_bytes) for kind in group.parts or group.planes) for group in groups
        ),
    )
    host = Host.here(memory_type, os.environ)
    handshake = RankHandshake(
        engine_id=local.engine_id,
        tp_size=local.tp_size,
        tp_rank=local.tp_rank,
        agent_metadata=transport.metadata(),
        device_id=worker.device_id,
        memory_type=memory_type,
        is_staged=slab is not None,
        process=host.own,
        groups=groups,
        token_table_address=int(tokens.ctypes.data),
        weights=Weights(),
    )

    def offer_handshake(weights: Weights) -> None:
        told = msgspec.structs.replace(handshake, weights=weights)
        worker.offer_handshake(str(tag), msgspec.msgpack.encode(told))

    device = layout.device
    # Other threads keep this event, not the transfer thread: so an engine without references is freed at once, with
    # its NIXL agent.
    wake = threading.Event()
    staging = None
    if slab is not None:
        copier = Copier(slab, device, wake.set)
        slots = Slots(slab.num_slots, num_kept(slab.num_slots))
        in_slot = tuple(group.planes[0].num_blocks // slab.num_slots for group in groups)
        staging = Staging(slots, copier, local.kernel_block_sizes, in_slot, slab.extent[1])
    blocks = Content(own_groups, layout.areas())
    background = Background("kvcached-nixl-checksums", device, wake.set)
    checksums = Checksums(
        blocks if slab is None else Content(groups, slab.areas), blocks, background, settings.verify_fraction
    )
    backends = tuple(worker.backends)

    def make() -> WriteGate:
        return open_gate(backends, registered.extents, memory_type, registered.device_id)

    gates = WriteGates(make, background, clock)
    if settings.transfer_mode.is_push or slab is not None:
        # Otherwise the first gate is opened when this rank first meets a prefill that stages, and so writes in a pull.
        gates.begin()
    # Only READs need this: before a WRITE, prefill waits for the device by itself.
    is_early = worker.answers_before_drafts and not settings.transfer_mode.is_push
    facade = assemble(
        transport,
        clock,
        local,
        tokens,
        settings,
        str(tag),
        channel,
        lambda: record_event(device),
        checksums,
        host,
        offer_handshake,
        wake,
        staging,
        gates,
        (lambda: wait_for(device)) if is_early else nothing,
        lambda: select(device.type, device.index or 0),
        zeroes_blocks=worker.zeroes_blocks,
        memory_path=registered.path,
    )
    facade.thread.start()
    return facade


@dataclass(frozen=True)
class _Roles:
    """Passes what happens to peers on to both roles (`transfer.peers.PeerListener`)."""

    routes: PeerRoutes
    receiver: Receiver
    registry: OfferRegistry
    gate_connections: GateConnections
    transfer_queue: TransferQueue

    def is_used(self, agent: str) -> bool:
        users = self.registry.is_writing_to, self.receiver.is_waiting_for, self.transfer_queue.is_used
        return any(uses(agent) for uses in users)

    def may_write(self, agent: str) -> bool:
        return self.receiver.may_be_written_by(agent)

    def dead(self, agent: str) -> None:
        self.routes.forget(agent)
        self.receiver.dead(agent)
        self.registry.dead(agent)

    def unreachable(self, agent: str) -> None:
        self.receiver.unreachable(agent)
        self.registry.dead(agent)

    def disconnected(self, agent: str) -> None:
        self.gate_connections.forget(agent)


def assemble(
    transport: Transport,
    clock: Clock,
    local: LocalRank,
    tokens: TokenArray,
    settings: Settings,
    compatibility: str,
    channel: Channel,
    record: Callable[[], IsReached],
    checksums: Checksums,
    host: Host,
    offer_handshake: Callable[[Weights], None],
    wake: threading.Event,
    staging: Staging | None = None,
    gates: WriteGates | None = None,
    before_answer: Callable[[], None] = nothing,
    select_device: Callable[[], None] = nothing,
    *,
    zeroes_blocks: bool = False,
    memory_path: MemoryPath = MemoryPath.DIRECT,
) -> WorkerFacade:
    """Build all parts of one worker; its thread is not started.

    Args:
        offer_handshake, before_answer, zeroes_blocks: see `WorkerFacade`.
        memory_path: where the memory is that KV is moved from and to.
        select_device, wake: see `TransferThread`.
        local: describes the slab's memory where KV is staged, else the KV cache's.
        gates: see `Receiver`.
        tokens: registered host memory for ownership tokens, (BUCKETS + BUFFERS, TOKENS_PER_BUCKET), all 0.
    """
    mode = settings.transfer_mode
    outcomes = OutcomeQueue(clock)
    ask: Ask = channel.ask
    peers = Peers(Handshaker(transport, compatibility, lambda rank: fits(local, rank)), clock, ask, host, wake.set)
    gate_connections = GateConnections(transport, peers)
    transfer_queue = TransferQueue(
        transport, clock, gate_connections.lost, connection=gate_connections.connection, moved=outcomes.moved_bytes
    )
    routes = PeerRoutes(local)
    buffers = TokenBuffers(tokens[BUCKETS:])
    context = WorkerContext(clock, local, transport, peers, transfer_queue, routes, buffers, checksums, host, staging)
    receiver = Receiver(context, clock, mode, gates, outcomes)
    table = TokenTable(tokens[:BUCKETS])
    registry = OfferRegistry(
        context,
        gate_connections,
        clock,
        table,
        outcomes,
        mode=mode,
        lease_seconds=settings.kv_lease_duration_seconds,
        unmatched_seconds=settings.handover_timeout_seconds,
    )
    peers.listen(_Roles(routes, receiver, registry, gate_connections, transfer_queue))

    def wake_engine(identity: LocalIdentity) -> None:
        address = identity.wake_address
        channel.wake(address.host, address.port, address.key)

    def closed() -> None:
        if staging is not None:
            staging.copier.close()
        checksums.close()
        if gates is not None:
            gates.close()
        channel.close()

    thread = TransferThread(context, clock, receiver, registry, outcomes, wake, wake_engine, closed, select_device)
    # Where KV is staged decode cannot read blocks: prefill frees them as soon as they are copied.
    is_read = not mode.is_push and staging is None
    return WorkerFacade(
        thread,
        local,
        table,
        record,
        offer_handshake,
        before_answer,
        is_read=is_read,
        zeroes_blocks=zeroes_blocks,
        route=(mode.value, memory_path.value),
    )


def wait_for(device: torch.device) -> None:
    """Block until the device has finished all work submitted so far."""
    if device.type != "cpu":
        event = torch.Event(device)
        event.record()
        event.synchronize()


def record_event(device: torch.device) -> IsReached:
    """Returns a function that says whether the device has finished all work submitted before this call."""
    if device.type == "cpu":
        # vLLM's CPU worker computes before it returns.
        return lambda: True
    event = torch.Event(device)
    event.record()
    query: IsReached = event.query
    return query
