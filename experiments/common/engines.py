# SPDX-License-Identifier: Apache-2.0
"""An engine without vLLM: this package's real scheduler and worker halves on a pool of numbered blocks, no compute.

The caller decides what is scheduled, and either runs the turns of its transfer thread or starts the thread.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.ids import EngineId
from kvcached_nixl.processes import Host
from kvcached_nixl.scheduler.engine import Progress
from kvcached_nixl.scheduler.facade import SchedulerFacade
from kvcached_nixl.scheduler.side_channel import answers_of
from kvcached_nixl.scheduler.terms import Terms
from kvcached_nixl.settings import Settings
from kvcached_nixl.transport.agent import Transport, WriteGate
from kvcached_nixl.wire.handshake import Process, RankHandshake, Tensors, Weights
from kvcached_nixl.wire.headroom import BlockUsage
from kvcached_nixl.wire.kv_groups import KVGroup, KVGroups
from kvcached_nixl.wire.manifest import digest_of
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.planes import GroupMemory, Planes
from kvcached_nixl.wire.step import Report, Reports, WakeAddress
from kvcached_nixl.worker.background import Work
from kvcached_nixl.worker.decode.fencing import WriteGates
from kvcached_nixl.worker.facade import Device, assemble
from kvcached_nixl.worker.transfer.checksums import Checksums, Content
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.ownership_tokens import BUCKETS, BUFFERS, TOKENS_PER_BUCKET, TokenArray
from kvcached_nixl.worker.transfer.topology import LocalRank

COMPATIBILITY = "kvcached_nixl/experiments"
WEIGHTS = Weights(Tensors("1" * 32, "2" * 32), files="3" * 32)


class _Reads:
    """Reads requests. `Request` already has the attributes that the scheduler half needs, so it is returned as is."""

    def __call__(self, request: Any) -> Any:
        return request

    def take_renamed(self) -> bool:
        return False

    def forget(self, adapter: int | None) -> None:
        """Nothing to do: no adapter is known."""


@dataclass(eq=False)
class Request:
    """The attributes that this package's scheduler half reads from a request of vLLM."""

    request_id: str
    token_ids: Sequence[int]
    params: Mapping[str, Any] | None
    computes_prompt: bool = False
    adapter: int = 0
    num_media: int = 0
    lacks_media: bool = False
    is_session: bool = False
    is_stand_in: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids)

    def tell_cached(self, num_tokens: int) -> None:
        """No client of it reads ``usage``."""

    def digest(self, num_tokens: int) -> str:
        return digest_of(self.token_ids, num_tokens)


class Pool:
    """Numbered blocks, and which request has which. Number 0 is vLLM's null block, which no request has."""

    are_shared = is_producer = False
    stalled: Sequence[str] = ()
    starved = None
    blocks_over_limit = num_cached = 0
    has_reserve = is_paused = False

    def __init__(self, order: Sequence[int]) -> None:
        self.free_blocks = list(reversed(order))
        self.num_blocks = len(order)
        self.tables: dict[str, list[int]] = {}

    def allocate(self, request_id: str, count: int) -> list[int] | None:
        """Return ``count`` blocks for the request, or None if there are too few."""
        if len(self.free_blocks) < count:
            return None
        found = self.tables[request_id] = [self.free_blocks.pop() for _ in range(count)]
        return found

    def free(self, request_id: str) -> None:
        """Free the blocks that the request still has."""
        self.free_blocks += self.tables.pop(request_id, ())

    def let_go(self, request_id: str, *, recomputes: bool) -> int | None:
        return None

    def usage(self) -> BlockUsage:
        return BlockUsage(len(self.free_blocks), self.num_blocks - len(self.free_blocks), 0, 0)

    def mapped_bytes(self) -> int:
        return 0

    def tell_neighbours(self, needs_others: Callable[[str], bool]) -> bool:
        return False

    def apply_limit(self) -> None:
        """It has none."""

    def wanted_by_neighbours(self) -> tuple[int, bool]:
        return (0, False)

    def neighbours_served(self) -> None:
        """They say again what they still want."""

    def trim(self) -> int:
        return 0

    def drop_cached(self, num_blocks: int) -> int:
        return 0

    def take(self, request_id: str) -> list[Any]:
        return self.tables.pop(request_id, [])

    def give_back(self, blocks: list[Any]) -> None:
        self.free_blocks += blocks

    def first_tokens(self, num_tokens: int) -> tuple[int, ...]:
        return (0,)


class _AtOnce:
    """Opens and closes gates at once, in ``submit``. Checksums are never requested: no hand-over is verified."""

    def __init__(self) -> None:
        self._ended: deque[Callable[[], None]] = deque()

    def submit(self, work: Work[Any]) -> None:
        found = work.do()
        self._ended.append(lambda: work.ended(found, ""))

    def turn(self) -> None:
        while self._ended:
            self._ended.popleft()()

    def close(self, *, is_dropping: bool) -> None:
        """Nothing to stop."""


class Channel:
    """Side channel of an engine in this process, answered at once with the ``answers`` of the engine opposite."""

    def __init__(self) -> None:
        self.answers: Mapping[int, tuple[str, bytes]] = {}

    def ask(self, host: str, port: int, tp_rank: int) -> Future[tuple[str, bytes]]:
        future: Future[tuple[str, bytes]] = Future()
        future.set_result(self.answers[tp_rank])
        return future

    def wake(self, host: str, port: int, key: str) -> None:
        """Nothing to wake: no engine sleeps."""

    def close(self) -> None:
        """Nothing to close."""


class Ended(NamedTuple):
    """Requests whose blocks may be freed, requests that no longer wait, and those of the latter that got no KV."""

    sent: set[str]
    received: set[str]
    failed: set[str]


@dataclass
class _Envelope:
    compatibility_hash: str
    agent_metadata_bytes: bytes


class Engine:
    """See the module.

    Args:
        own: its address for peers.
        words: registered host memory for ownership tokens, as `host_words` makes it.
        make_gate: opens a write gate, that is, an agent that prefill writes through; with it, the engine counts as
            being on a host of its own. Without it, prefill writes through the engine's own agent.

    Attributes:
        answers: the answers of its side channel, by rank.
    """

    def __init__(
        self,
        own: RemotePrefill,
        settings: Settings,
        clock: Clock,
        transport: Transport,
        channel: Any,
        planes: Planes,
        pool: Pool,
        words: TokenArray,
        make_gate: Callable[[], WriteGate] | None = None,
    ) -> None:
        terms = Terms(
            groups=KVGroups((KVGroup(planes.block_size),)),
            zeroes_blocks=False,
            mode=settings.transfer_mode,
            recomputes=False,
            lease_seconds=settings.kv_lease_duration_seconds,
            timeout_seconds=settings.handover_timeout_seconds,
            allocation_seconds=settings.handover_timeout_seconds,
            patience_seconds=settings.give_way_after_seconds,
            # Prefill begins every prompt at once.
            most_unclaimed_tokens=1 << 30,
        )
        self.own = own
        self.pool = pool
        self.token_table = words
        wake_address = WakeAddress(own.host, own.port, secrets.token_hex(16))
        self.handover = SchedulerFacade(own, secrets.token_hex(8), wake_address, terms, clock, _Reads())
        self.handover.bind(pool)
        groups = (GroupMemory((planes,)),)
        place = LocalRank(EngineId(own.engine_id), 1, 0, groups, kv_shares=1)
        no_content, runs = Content((), ()), _AtOnce()
        process = Process() if make_gate is None else Process(f"{own.engine_id} {own.host}:{own.port}")
        context = WorkerContext(
            settings,
            clock,
            channel,
            threading.Event(),
            transport,
            place,
            words,
            COMPATIBILITY,
            Checksums(no_content, no_content, runs, fraction=0.0),
            Host(process, "DRAM"),
        )
        gates = None if make_gate is None else WriteGates(make_gate, runs, clock)
        self.side = assemble(context, Device(torch.device("cpu")), lambda weights: None, gates)
        self.side.identify(WEIGHTS)
        rank = RankHandshake(
            engine_id=place.engine_id,
            tp_size=1,
            tp_rank=0,
            agent_metadata=transport.metadata(),
            device_id=0,
            groups=groups,
            token_table_address=int(words.ctypes.data),
            memory_type="DRAM",
            is_staged=False,
            weights=WEIGHTS,
            process=process,
        )
        envelope = _Envelope(COMPATIBILITY, msgspec.msgpack.encode(rank))
        self.answers = answers_of({(0, 0): envelope}, self.handover.incarnation)

    def step(self, progress: Iterable[Progress] = (), compute: Callable[[], None] = lambda: None) -> Ended:
        """One step of the engine's loop; the calls are in vLLM's order."""
        step = self.handover.take_step(progress)
        self.side.begin_step(step)
        compute()
        self.side.end_step()
        reports = Reports(self.side.take_sent(), timelines=self.side.take_counted().timelines)
        reports.report.add(self.side.take_report() or Report())
        self.handover.collect(reports)
        self.handover.take_told()
        return Ended(reports.sent, reports.received, self.handover.take_failed())


def host_words() -> TokenArray:
    """Return memory for the ownership-token table, and for the rows that decode reads a peer's tokens into."""
    return np.zeros((BUCKETS + BUFFERS, TOKENS_PER_BUCKET), dtype=np.uint64)


def asks_prefill(name: str | None = None) -> dict[str, Any]:
    """Return ``kv_transfer_params`` of a prefill request. ``name`` is the transfer id that matches decode's request."""
    return {"do_remote_decode": True, "do_remote_prefill": False, **({} if name is None else {"transfer_id": name})}


def asks_decode(prefill: RemotePrefill, name: str) -> dict[str, Any]:
    """Return ``kv_transfer_params`` of a decode request whose transfer id is ``name``."""
    fields: dict[str, Any] = msgspec.to_builtins(prefill)
    return {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name, **fields}
