# SPDX-License-Identifier: Apache-2.0
"""One engine with any number of hand-overs that wait, opposite one that says nothing, on a clock that stands still."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np

from experiments.common.engines import Engine, Pool, Request, asks_decode, asks_prefill, host_words
from kvcached_nixl.clock import ManualClock
from kvcached_nixl.ids import DecodeRequestId, EngineId
from kvcached_nixl.scheduler.engine import Progress
from kvcached_nixl.settings import Settings
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.transport.memory import Network, Posted
from kvcached_nixl.wire.digest import digest_of
from kvcached_nixl.wire.lease import INTERVAL, beats, is_beat
from kvcached_nixl.wire.manifest import PROTOCOL, BlockRange, Manifest
from kvcached_nixl.wire.messages import KernelBlockRange, Peer, Registration, draw_attempt, encode
from kvcached_nixl.wire.params import RemotePrefill, prefill_params
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.worker.transfer.lease import MOST_DUE

BLOCK_SIZE = 16
LEASE_SECONDS, TIMEOUT_SECONDS = 30.0, 480.0
ARRIVING_BLOCKS = 64
AT_ONCE = 500
"""Requests that are put in one step while a side is made."""


class _Channel:
    """Any question is answered by the engine opposite, at once."""

    def __init__(self, engines: dict[str, Engine], opposite: str) -> None:
        self._engines = engines
        self._opposite = opposite

    def ask(self, host: str, port: int, tp_rank: int) -> Future[tuple[str, bytes]]:
        future: Future[tuple[str, bytes]] = Future()
        future.set_result(self._engines[self._opposite].answers[tp_rank])
        return future

    def wake(self, host: str, port: int, key: str) -> None:
        """Nobody sleeps."""

    def close(self) -> None:
        """There is nothing to close."""


class Side:
    """See the module. Nothing that is sent or posted arrives, unless `sent` delivers it."""

    name = ""

    def __init__(self, mode: TransferMode, waiting: int) -> None:
        self.mode = mode
        self.clock = ManualClock()
        self.network = Network()
        self._numbers = itertools.count()
        # What engines may move, for as long as they are there.
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
        """Notifications that go with no transfer, since the last call; they are gone."""
        found = [one for one in self.network.pending if not one.is_transfer]
        for one in found:
            self.network.drop(one)
        return [one.notification for one in found]

    def beats(self) -> list[bytes]:
        """Those that were sent and are under way."""
        return [one.notification for one in self.network.pending if is_beat(one.notification)]

    def arriving(self) -> Request:
        """A request of a thousand tokens."""
        raise NotImplementedError

    def take_in(self, request: Request, blocks: list[int]) -> None:
        """What vLLM asks of a connector until the request waits for KV, or is computed."""
        raise NotImplementedError

    def go(self, request: Request) -> None:
        """Its client has gone; until nothing of it is left."""
        table = self.engine.pool.tables.get(request.request_id, [])
        self.engine.handover.finished(request, False, (list(table),))
        for _ in range(2):
            self.step_and_turn()
        self.engine.pool.free(request.request_id)

    def beat_turns(self) -> Iterator[list[bytes]]:
        """An interval later, beats for all that wait: before each turn that sends some here, or that reads these."""
        raise NotImplementedError

    def _wait(self, names: list[str]) -> None:
        """So many more hand-overs."""
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
    """Requests wait for KV: with pull for a READ that does not end, with push for a WRITE that nobody posts."""

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
            named = sum(one.count(b",") + 1 for one in self.sent() if is_beat(one))

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
                block_size=BLOCK_SIZE,
                context_parallel=(1, 1),
                # Far's blocks, which nobody will ever read.
                groups=(BlockRange(0, tuple(range(num_blocks))),),
                lease_seconds=LEASE_SECONDS,
                num_media=0,
            )
            params = prefill_params(far.own, made, transfer_id=None, transfer_mode=TransferMode.PULL)
        return Request(f"decode-{name}", tokens, params)


class PrefillSide(Side):
    """Requests are kept for decode; and with push as many registrations wait for requests that have not come."""

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
            # As decode sends them: as many as are due in one turn of its own.
            found = list(beats(kept[first : first + MOST_DUE]))
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
            block_size=BLOCK_SIZE,
            groups=(KernelBlockRange(0, (1,)),),
        )
        posted = Posted("far", "near", encode(registration))
        self.network.post(posted)
        return posted


SIDES = (DecodeSide, PrefillSide)
