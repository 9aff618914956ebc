# SPDX-License-Identifier: Apache-2.0
"""Build the parts of a worker over the memory that was registered. Once per process, on the engine's thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.ids import EngineId
from kvcached_nixl.settings import Settings
from kvcached_nixl.transport.agent import Transport, WriteGate, open_gate, register_host_memory
from kvcached_nixl.transport.side_channel import SideChannel
from kvcached_nixl.wire.handshake import RankHandshake, Tag, Weights
from kvcached_nixl.worker.background import Background
from kvcached_nixl.worker.decode.fencing import WriteGates
from kvcached_nixl.worker.decode.receiver import Receiver
from kvcached_nixl.worker.facade import Device, WorkerFacade
from kvcached_nixl.worker.geometry.layout import group_memory, layers_digest
from kvcached_nixl.worker.memory_registration import Registered, num_kept
from kvcached_nixl.worker.prefill.registry import OfferRegistry
from kvcached_nixl.worker.transfer.checksums import Checksums, Content
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.ownership_tokens import (
    BUCKETS,
    BUFFERS,
    TOKENS_PER_BUCKET,
    TokenArray,
)
from kvcached_nixl.worker.transfer.peer_link import Host
from kvcached_nixl.worker.transfer.slab import Slots
from kvcached_nixl.worker.transfer.staging import Staging
from kvcached_nixl.worker.transfer.topology import LocalRank
from kvcached_nixl.worker.transfer_thread import TransferThread

if TYPE_CHECKING:
    from kvcached_nixl.vllm.adapter.nixl_worker import WorkerView

__all__ = ["assemble", "build_worker"]


def build_worker(
    worker: WorkerView, registered: Registered, settings: Settings, channel: SideChannel, clock: Clock
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

    # Other threads keep this event, not the transfer thread: so an engine without references is freed at once, with
    # its NIXL agent.
    wake = threading.Event()
    staging = None
    if slab is not None:
        copier = Background("kvcached-nixl-copies", layout.device, wake.set)
        slots = Slots(slab.num_slots, num_kept(slab.num_slots))
        in_slot = tuple(group.planes[0].num_blocks // slab.num_slots for group in groups)
        staging = Staging(slots, slab, copier, local.kernel_block_sizes, in_slot)
    blocks = Content(own_groups, layout.areas())
    background = Background("kvcached-nixl-checksums", layout.device, wake.set)
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
    context = WorkerContext(
        settings,
        clock,
        channel,
        wake,
        transport,
        local,
        tokens,
        str(tag),
        checksums,
        host,
        staging,
        registered.path,
    )
    facade = assemble(
        context,
        Device(layout.device),
        offer_handshake,
        gates,
        zeroes_blocks=worker.zeroes_blocks,
        answers_early=worker.answers_before_drafts,
    )
    facade.thread.start()
    return facade


def assemble(
    context: WorkerContext,
    device: Device,
    offer_handshake: Callable[[Weights], None],
    gates: WriteGates | None = None,
    *,
    zeroes_blocks: bool = False,
    answers_early: bool = False,
) -> WorkerFacade:
    """Build all parts of one worker; its thread is not started.

    Args:
        gates: see `Receiver`; the others: see `WorkerFacade`.
    """
    receiver, registry = Receiver(context, gates), OfferRegistry(context)
    context.peers.listen(
        context.routes, receiver, registry.registrations, context.gate_connections, context.transfer_queue
    )
    thread = TransferThread(context, receiver, registry, device.select)
    return WorkerFacade(
        context, thread, device, offer_handshake, zeroes_blocks=zeroes_blocks, answers_early=answers_early
    )
