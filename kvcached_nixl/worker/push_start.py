# SPDX-License-Identifier: Apache-2.0
"""Start the push of a worker, over what the stock worker has registered. Once per process, on the engine's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch

from kvcached_nixl.clock import Clock
from kvcached_nixl.ids import EngineId
from kvcached_nixl.settings import Settings
from kvcached_nixl.transport.agent import NixlTransport
from kvcached_nixl.wire.handshake import PushHandshake, PushTag
from kvcached_nixl.worker.layout import RegisteredLayout
from kvcached_nixl.worker.planes import planes_of
from kvcached_nixl.worker.push import Place, PushWorker
from kvcached_nixl.worker.push_handshake import Query, connector
from kvcached_nixl.worker.push_receive import PushReceiver
from kvcached_nixl.worker.push_send import PushSender
from kvcached_nixl.worker.push_writer import Push

__all__ = ["start"]

REPEAT_SECONDS = 5.0
"""Between two askings of a contributor to stop."""


class StockWorker(Protocol):
    """What is asked of vLLM's NIXL worker; ``compat.connector.WorkerView`` answers."""

    @property
    def agent(self) -> Any: ...
    @property
    def memory_type(self) -> str: ...
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
    def kv_cache_dtype(self) -> str: ...
    def sign_compatibility(self, sign: Callable[[str], str]) -> str: ...
    def offer_handshake(self, metadata: bytes) -> None: ...


def start(worker: StockWorker, layout: RegisteredLayout, settings: Settings, query: Query, clock: Clock) -> PushWorker:
    """Describe the memory that was registered, offer it to peers, and start the writer thread.

    Args:
        query: vLLM's side channel.

    Raises:
        LayoutRefused: the memory cannot be described token by token and head by head.
    """
    first_head = 0 if worker.use_mla else worker.tp_rank * worker.total_kv_heads // worker.tp_size
    planes = planes_of(layout.device_views, layout.axes, first_head=first_head)
    tag = PushTag(len(planes.bases), planes.cell_bytes, worker.kv_cache_dtype)
    compatibility = worker.sign_compatibility(tag.sign)
    transport = NixlTransport(worker.agent, worker.memory_type, worker.device_id)
    engine_id = EngineId(worker.engine_id)
    worker.offer_handshake(
        msgspec.msgpack.encode(
            PushHandshake(engine_id, worker.tp_size, worker.tp_rank, transport.metadata(), worker.device_id, planes)
        )
    )
    sender = PushSender(
        transport,
        clock,
        planes,
        tp_rank=worker.tp_rank,
        tp_size=worker.tp_size,
        lease_seconds=settings.kv_lease_duration_seconds,
        unmatched_seconds=settings.push_registration_timeout_seconds,
    )
    receiver = PushReceiver(
        transport,
        clock,
        registration_timeout_seconds=settings.push_registration_timeout_seconds,
        repeat_seconds=REPEAT_SECONDS,
    )
    push = Push(transport, clock, sender, receiver, connector(query, compatibility))
    push.start()
    place = Place(
        engine_id=engine_id,
        tp_size=worker.tp_size,
        tp_rank=worker.tp_rank,
        block_size=planes.block_size,
        kernel_blocks_per_block=worker.kernel_blocks_per_block,
        is_latent=worker.use_mla,
    )
    device = next(iter(layout.device_views.values())).device
    return PushWorker(push, place, lambda: _record_event(device))


def _record_event(device: torch.device) -> Callable[[], bool]:
    if device.type == "cpu":
        # vLLM's CPU worker computes before it returns.
        return lambda: True
    event = torch.Event(device)
    event.record()
    query: Callable[[], bool] = event.query
    return query
