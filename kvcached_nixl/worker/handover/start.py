# SPDX-License-Identifier: Apache-2.0
"""Put a worker's hand-over together, over the memory that was registered. Once per process, on the engine's thread."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from kvcached_nixl.clock import Clock
from kvcached_nixl.current_device import select
from kvcached_nixl.ids import EngineId
from kvcached_nixl.settings import Settings, TransferMode
from kvcached_nixl.transport.agent import NixlTransport, open_gate, register_host_memory
from kvcached_nixl.transport.base import Gate, Transport
from kvcached_nixl.wire.handshake import MemoryType, RankHandshake, Tag, Weights
from kvcached_nixl.worker.background import Background
from kvcached_nixl.worker.content import Content
from kvcached_nixl.worker.handover.attempt import Side
from kvcached_nixl.worker.handover.commands import IsReached, Known
from kvcached_nixl.worker.handover.digests import Digests
from kvcached_nixl.worker.handover.engine_side import EngineSide
from kvcached_nixl.worker.handover.entrances import Entrances
from kvcached_nixl.worker.handover.gates import Gates
from kvcached_nixl.worker.handover.host import Host
from kvcached_nixl.worker.handover.local import Place, Routes, fits
from kvcached_nixl.worker.handover.meeting import Meeting
from kvcached_nixl.worker.handover.peers import Ask, Peers
from kvcached_nixl.worker.handover.posting import Posting
from kvcached_nixl.worker.handover.receiving import Receiving
from kvcached_nixl.worker.handover.reported import Reported
from kvcached_nixl.worker.handover.serving import Serving
from kvcached_nixl.worker.handover.thread import TransferThread
from kvcached_nixl.worker.handover.verification import BUCKETS, LANDINGS, WORDS_PER_BUCKET, Landings, Words, WordTable
from kvcached_nixl.worker.planes import planes_of
from kvcached_nixl.worker.registration import Registered
from kvcached_nixl.worker.staging.copier import Copier
from kvcached_nixl.worker.staging.sizing import num_kept
from kvcached_nixl.worker.staging.slots import Slots
from kvcached_nixl.worker.staging.staging import Staging

__all__ = ["Channel", "StockWorker", "assemble", "record_event", "start"]


class Channel(Protocol):
    """The side channel, as a worker uses it."""

    def ask(self, host: str, port: int, tp_rank: int) -> Any: ...
    def wake(self, host: str, port: int, key: str) -> None: ...
    def close(self) -> None: ...


class StockWorker(Protocol):
    """What is asked of vLLM's NIXL worker; ``compat.connector.WorkerView`` answers."""

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
    def total_kv_heads(self) -> int: ...
    @property
    def kernel_blocks_per_block(self) -> int: ...
    @property
    def use_mla(self) -> bool: ...
    @property
    def answers_before_drafts(self) -> bool: ...
    @property
    def facts(self) -> tuple[tuple[str, str], ...]: ...
    def keep_registered(self, descriptors: Any) -> None: ...
    def offer_handshake(self, compatibility: str, metadata: bytes) -> None: ...


def nothing() -> None:
    """What is done where there is nothing to do."""


def start(
    worker: StockWorker, registered: Registered, settings: Settings, channel: Channel, clock: Clock
) -> EngineSide:
    """Describe the memory that was registered, offer it to peers, and start what moves KV.

    Raises:
        LayoutRefused: the memory cannot be described token by token and head by head.
    """
    first_head = 0 if worker.use_mla else worker.tp_rank * worker.total_kv_heads // worker.tp_size
    layout, slab = registered.layout, registered.slab
    own_memory = memory = planes_of(layout.device_views, layout.axes, first_head=first_head)
    if slab is not None:
        memory = slab.planes(memory)
    place = Place(
        engine_id=EngineId(worker.engine_id),
        tp_size=worker.tp_size,
        tp_rank=worker.tp_rank,
        memory=memory,
        kernel_blocks_per_block=worker.kernel_blocks_per_block,
        is_latent=worker.use_mla,
    )
    words: Words = np.zeros((BUCKETS + LANDINGS, WORDS_PER_BUCKET), dtype=np.uint64)
    worker.keep_registered(register_host_memory(worker.agent, words, worker.backends))
    memory_type = registered.memory_type or worker.memory_type
    transport = NixlTransport(worker.agent, memory_type, worker.device_id)
    tag = Tag(
        direction=settings.transfer_mode.value,
        facts=worker.facts,
        arrangement=layout.arrangement.value,
        planes=tuple((len(kind.bases), kind.cell_bytes) for kind in memory),
    )
    host = Host.here(memory_type, os.environ)
    handshake = RankHandshake(
        engine_id=place.engine_id,
        tp_size=place.tp_size,
        tp_rank=place.tp_rank,
        agent_metadata=transport.metadata(),
        device_id=worker.device_id,
        memory_type=memory_type,
        is_staged=slab is not None,
        process=host.own,
        memory=memory,
        kernel_blocks_per_block=place.kernel_blocks_per_block,
        words_address=int(words.ctypes.data),
        weights=Weights("", "", ""),
    )

    def offer_handshake(weights: Weights) -> None:
        told = msgspec.structs.replace(handshake, weights=weights)
        worker.offer_handshake(str(tag), msgspec.msgpack.encode(told))

    device = layout.device
    # Weakly: an engine that nobody holds is gone at once, and its NIXL agent with it.
    thread: list[weakref.ref[TransferThread]] = []

    def wake() -> None:
        if thread and (one := thread[0]()) is not None:
            one.wake()

    staging = None
    if slab is not None:
        copier = Copier(slab, device, wake)
        staging = Staging(Slots(slab.num_slots, num_kept(slab.num_slots)), copier, place.kernel_block_size)
    blocks = Content(own_memory, layout.areas())
    background = Background("kvcached-nixl-digests", device, wake)
    digests = Digests(
        blocks if slab is None else Content(memory, slab.areas), blocks, background, settings.verify_fraction
    )
    backends = tuple(worker.backends)

    def make() -> Gate:
        return open_gate(backends, registered.extents, memory_type, registered.device_id)

    gates = Gates(make, background, clock)
    if settings.transfer_mode is TransferMode.PUSH or slab is not None:
        # In a pull it is written by a prefill that stages, if it ever meets one.
        gates.begin()
    # What is written waits for the device by itself.
    is_early = worker.answers_before_drafts and settings.transfer_mode is TransferMode.PULL
    side = assemble(
        transport,
        clock,
        place,
        words,
        settings,
        str(tag),
        channel,
        lambda: record_event(device),
        digests,
        host,
        offer_handshake,
        staging,
        gates,
        (lambda: wait_for(device)) if is_early else nothing,
        lambda: select(device.type, device.index or 0),
    )
    thread.append(weakref.ref(side.thread))
    side.thread.start()
    return side


def assemble(
    transport: Transport,
    clock: Clock,
    place: Place,
    words: Words,
    settings: Settings,
    compatibility: str,
    channel: Channel,
    record: Callable[[], IsReached],
    digests: Digests,
    host: Host,
    offer_handshake: Callable[[Weights], None],
    staging: Staging | None = None,
    gates: Gates | None = None,
    before_answer: Callable[[], None] = nothing,
    select_device: Callable[[], None] = nothing,
) -> EngineSide:
    """All parts of one worker, its thread not started.

    Args:
        offer_handshake, before_answer: see `EngineSide`.
        select_device: see `TransferThread`.
        place: its memory is the slab's where KV is staged.
        gates: to its memory; without any, what it is written through cannot be closed.
        words: registered host memory, (BUCKETS + LANDINGS, WORDS_PER_BUCKET), all 0.
    """
    thread: list[TransferThread] = []
    reported = Reported(clock)
    ask: Ask = channel.ask
    peers = Peers(
        Meeting(transport, compatibility, lambda rank: fits(place, rank)),
        clock,
        ask,
        lambda: thread[0].wake() if thread else None,
    )
    entrances = Entrances(transport, peers)
    peers.forgotten = entrances.forget
    posting = Posting(transport, clock, entrances.lost, reported.moved, connection=entrances.connection)
    landings = Landings(words[BUCKETS:])
    side = Side(place, transport, peers, posting, Routes(place), landings, digests, host, entrances, staging, gates)
    receiving = Receiving(side, clock, settings.transfer_mode, reported.failed, reported.over)
    table = WordTable(words[:BUCKETS])
    serving = Serving(
        side,
        clock,
        table,
        is_writing=settings.transfer_mode is TransferMode.PUSH,
        lease_seconds=settings.kv_lease_duration_seconds,
        unmatched_seconds=settings.handover_timeout_seconds,
        done=reported.done,
        quiet=reported.quiet,
        expired=reported.expired,
    )

    def gone(agent: str) -> None:
        side.routes.forget(agent)
        receiving.gone(agent)
        serving.gone(agent)

    def wake_engine(known: Known) -> None:
        channel.wake(known.own.host, known.own.port, known.wake_key)

    def unreachable(agent: str) -> None:
        receiving.unreachable(agent)
        serving.gone(agent)

    peers.gone, peers.unreachable = gone, unreachable
    peers.may_write = receiving.may_be_written_by
    peers.is_used = lambda agent: serving.is_writing_to(agent) or receiving.is_waiting_for(agent)

    def closed() -> None:
        if staging is not None:
            staging.copier.close()
        digests.close()
        if gates is not None:
            gates.close()
        channel.close()

    thread.append(TransferThread(side, clock, receiving, serving, reported, wake_engine, closed, select_device))
    # What is staged is not there to be read: its blocks are given back as soon as they are copied.
    is_read = settings.transfer_mode is TransferMode.PULL and staging is None
    return EngineSide(thread[0], place, table, record, offer_handshake, before_answer, is_read=is_read)


def wait_for(device: torch.device) -> None:
    """Return when a device has done what it was given until now."""
    if device.type != "cpu":
        event = torch.Event(device)
        event.record()
        event.synchronize()


def record_event(device: torch.device) -> IsReached:
    """Whether a device has done what it was given until now."""
    if device.type == "cpu":
        # vLLM's CPU worker computes before it returns.
        return lambda: True
    event = torch.Event(device)
    event.record()
    query: IsReached = event.query
    return query
