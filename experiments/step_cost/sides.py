# SPDX-License-Identifier: Apache-2.0
"""One engine with any number of waiting hand-overs, and a peer that sends nothing, on a clock that does not advance."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np

from experiments.common.engines import Engine, Pool, Request, asks_decode, asks_prefill, host_words
from experiments.common.memory_transport import Network, Posted
from kvcached_nixl.deadlines import ManualClock
from kvcached_nixl.ids import DecodeRequestId, EngineId
from kvcached_nixl.scheduler.engine import Progress
from kvcached_nixl.settings import Settings
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.lease import INTERVAL, heartbeats, is_heartbeat
from kvcached_nixl.wire.manifest import PROTOCOL, BlockRange, Manifest, digest_of
from kvcached_nixl.wire.messages import KernelBlockRange, Peer, Registration, draw_attempt, encode
from kvcached_nixl.wire.params import RemotePrefill, prefill_params
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.worker.decode.receiver import MOST_DUE

BLOCK_SIZE = 16
LEASE_SECONDS, TIMEOUT_SECONDS = 30.0, 480.0
ARRIVING_BLOCKS = 64
AT_ONCE = 500
"""Requests added per step while a side is set up."""


class _Channel:
    """Side channel: the engine opposite answers every request at once."""

    def __init__(self, engines: dict[str, Engine], opposite: str) -> None:
        self._engines = engines
        self._opposite = opposite

    def ask(self, host: str, port: int, tp_rank: int) -> Future[tuple[str, bytes]]:
        future: Future[tuple[str, bytes]] = Future()
        future.set_result(self._engines[self._opposite].answers[tp_rank])
        return future

    def wake(self, host: str, port: int, key: str) -> None:
        """Nothing to wake: no engine sleeps."""

    def close(self) -> None:
        """Nothing to close."""


class Side:
    """See the module. Transfers and notifications do not arrive by themselves; `sent` takes notifications out."""

    name = ""

    def __init__(self, mode: TransferMode, waiting: int) -> None:
        self.mode = mode
        self.clock = ManualClock()
        self.network = Network()
        self._numbers = itertools.count()
        # Keeps the memory of engines alive: they refer to it by address only.
        self._memory: list[object] = []
        self._engines: dict[str, Engine] = {}
        self._engines["far"] = self._make("far", "near", 1)
        self.engine = self._engines["near"] = self._make("near", "far", waiting + 2 * ARRIVING_BLOCKS)
        self.turn = self.engine.side.thread.turn
        for first in range(0, waiting, AT_ONCE):
            self._wait(list(itertools.islice(self._names(), min(AT_ONCE, waiting - first))))
            self.step_and_turn()
        for _ in range(2 + waiting // MOST_DUE):
            self.step_and_turn()
        self.sent()

    def step_and_turn(self) -> None:
        self.engine.step()
        self.turn()

    def sent(self) -> list[bytes]:
        """Return and drop the notifications sent since the last call, except those that belong to a transfer."""
        found = [one for one in self.network.pending if not one.is_transfer]
        for one in found:
            self.network.drop(one)
        return [one.notification for one in found]

    def heartbeats(self) -> list[bytes]:
        """Return the heartbeats that were sent and have not been taken out."""
        return [one.notification for one in self.network.pending if is_heartbeat(one.notification)]

    def arriving(self) -> Request:
        """Return a request of a thousand tokens."""
        raise NotImplementedError

    def take_in(self, request: Request, blocks: list[int]) -> None:
        """Make vLLM's calls to a connector up to the point where the request waits for KV, or is computed."""
        raise NotImplementedError

    def go(self, request: Request) -> None:
        """Abort the request and step until nothing of it is left."""
        table = self.engine.pool.tables.get(request.request_id, [])
        self.engine.handover.finished(request, False, (list(table),))
        for _ in range(2):
            self.step_and_turn()
        self.engine.pool.free(request.request_id)

    def beat_turns(self) -> Iterator[list[bytes]]:
        """Advance the clock by one heartbeat interval and yield before each turn that sends or reads heartbeats.

        Yields the heartbeats to be read in that turn; an empty list where this side sends them.
        """
        raise NotImplementedError

    def _wait(self, names: list[str]) -> None:
        """Add a waiting hand-over per name."""
        raise NotImplementedError

    def _names(self) -> Iterator[str]:
        for number in self._numbers:
            yield f"cmpl-{uuid.UUID(int=number)}-0-{number:08x}"

    def _make(self, name: str, opposite: str, num_blocks: int) -> Engine:
        transport = self.network.agent(name)
        transport.keeps_posted = False
        cells = np.zeros((num_blocks + 1, BLOCK_SIZE), dtype=np.uint64)
        self._memory.append(cells)
        planes = Planes((int(cells.ctypes.data),), BLOCK_SIZE * 8, 8, 8, 8, num_blocks + 1, BLOCK_SIZE, num_heads=1)
        settings = Settings(self.mode, LEASE_SECONDS, TIMEOUT_SECONDS)
        own = RemotePrefill(name, "127.0.0.1", 5600, 1)
        channel, pool = _Channel(self._engines, opposite), Pool(range(1, num_blocks + 1))
        return Engine(own, settings, self.clock, transport, channel, planes, pool, host_words())


class DecodeSide(Side):
    """Requests wait for KV: with pull for a READ that does not end, with push for a WRITE that is never posted."""

    name = "decode"

    def arriving(self) -> Request:
        return self._request(next(self._names()), ARRIVING_BLOCKS)

    def take_in(self, request: Request, blocks: list[int]) -> None:
        handover = self.engine.handover
        handover.arrived(request)
        missing, _ = handover.matched(request, 0)
        handover.allocated(request, (blocks,), missing)

    def beat_turns(self) -> Iterator[list[bytes]]:
        self.clock.advance(INTERVAL * LEASE_SECONDS)
        named = 1
        while named:
            yield []
            named = sum(one.count(b",") + 1 for one in self.sent() if is_heartbeat(one))

    def _wait(self, names: list[str]) -> None:
        for name in names:
            request = self._request(name, 1)
            blocks = self.engine.pool.allocate(request.request_id, 1)
            assert blocks is not None
            self.take_in(request, blocks)

    def _request(self, name: str, num_blocks: int) -> Request:
        tokens = [next(self._numbers), *range(1, num_blocks * BLOCK_SIZE)]
        far = self._engines["far"]
        params = asks_decode(far.own, name)
        if self.mode is TransferMode.PULL:
            made = Manifest(
                protocol=PROTOCOL,
                incarnation=far.handover.incarnation,
                request_id=name,
                digest=digest_of(tokens, len(tokens)),
                num_tokens=len(tokens),
                block_sizes=(BLOCK_SIZE,),
                context_parallel=(1, 1),
                # Blocks of the engine "far"; their content is never used.
                groups=(BlockRange(0, tuple(range(num_blocks))),),
                lease_seconds=LEASE_SECONDS,
                num_media=0,
            )
            params = prefill_params(far.own, made, transfer_id=None, transfer_mode=TransferMode.PULL, cached_tokens=0)
        return Request(f"decode-{name}", tokens, params)


class PrefillSide(Side):
    """Requests are kept for decode; with push, as many registrations wait for prefill requests that never arrive."""

    name = "prefill"

    def arriving(self) -> Request:
        return Request(next(self._names()), list(range(ARRIVING_BLOCKS * BLOCK_SIZE)), asks_prefill())

    def take_in(self, request: Request, blocks: list[int]) -> None:
        handover = self.engine.handover
        handover.arrived(request)
        handover.matched(request, 0)
        handover.allocated(request, (blocks,), 0)

    def beat_turns(self) -> Iterator[list[bytes]]:
        self.clock.advance(INTERVAL * LEASE_SECONDS)
        kept = list(self.engine.pool.tables)
        for first in range(0, len(kept), MOST_DUE):
            # As decode sends them: as many as are due in one of its turns.
            found = list(heartbeats(kept[first : first + MOST_DUE]))
            self.network.agents["near"].inbox += (("far", one) for one in found)
            yield found

    def _wait(self, names: list[str]) -> None:
        requests, progress = [], []
        for name in names:
            request = Request(name, [next(self._numbers), *range(1, BLOCK_SIZE)], asks_prefill())
            blocks = self.engine.pool.allocate(name, 1)
            assert blocks is not None
            self.take_in(request, blocks)
            requests.append(request)
            progress.append(Progress(name, (blocks,), True, BLOCK_SIZE))
        self.engine.step(progress)
        for request in requests:
            is_kept, _ = self.engine.handover.finished(request, True, (self.engine.pool.tables[request.request_id],))
            assert is_kept
        if self.mode is TransferMode.PUSH:
            for name in names:
                self.network.deliver(self._register(name))

    def _register(self, name: str) -> Posted:
        registration = Registration(
            attempt=draw_attempt(),
            decode_request_id=DecodeRequestId(f"decode-{name}"),
            decode=Peer(EngineId("far"), "127.0.0.1", 5600, 1, 0),
            incarnation=self.engine.handover.incarnation,
            name=f"transfer:to come, {name}",
            request_id="",
            digest=digest_of([0], 1),
            num_tokens=BLOCK_SIZE,
            first_token=0,
            end_token=BLOCK_SIZE,
            block_sizes=(BLOCK_SIZE,),
            groups=(KernelBlockRange(0, (1,)),),
        )
        posted = Posted("far", "near", encode(registration))
        self.network.post(posted)
        return posted


SIDES = (DecodeSide, PrefillSide)
