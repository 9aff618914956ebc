# SPDX-License-Identifier: Apache-2.0
"""What a step and an idle turn of the transfer thread cost while hand-overs wait: this package alone, without vLLM.

One engine with any number of waiting hand-overs, and a peer that sends nothing, on a clock that does not advance.
"""

from __future__ import annotations

import itertools
import pickle
import time
import uuid
from collections.abc import Callable, Iterator

import numpy as np

from experiments.bench.samples import Samples, percentile
from experiments.common.engines import Channel, Ended, Engine, Pool, Request, asks_decode, asks_prefill, host_words
from experiments.common.memory_transport import Network
from kvcached_nixl.deadlines import ManualClock
from kvcached_nixl.ids import DecodeRequestId, EngineId
from kvcached_nixl.scheduler.engine import Progress
from kvcached_nixl.settings import Settings
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.lease import INTERVAL, is_heartbeat
from kvcached_nixl.wire.manifest import PROTOCOL, BlockRange, Manifest, digest_of
from kvcached_nixl.wire.messages import KernelBlockRange, Peer, Registration, draw_attempt, encode
from kvcached_nixl.wire.params import RemotePrefill, prefill_params
from kvcached_nixl.wire.planes import Planes
from kvcached_nixl.wire.step import Report, Reports
from kvcached_nixl.worker.decode.receiver import MOST_DUE

BLOCK_SIZE = 16
LEASE_SECONDS, TIMEOUT_SECONDS = 30.0, 480.0
AT_ONCE = 500
"""Requests added per step while a side is set up."""
RUNNING = 32
"""Requests that each step computes; none of them is handed over."""
OURS = "this package"


def measure(samples: Samples, waiting: int, repetitions: int, say: Callable[[str], None]) -> None:
    """Measure both transfer modes and both sides: a step on the engine's thread, with the Step pickled as vLLM's
    multiprocess executor does it; a turn of the transfer thread in which nothing has arrived, ended or is due; and the
    largest heartbeat of decode."""
    for mode in TransferMode:
        for kind in SIDES:
            say(f"{mode.value}, {kind.name}, {waiting:,} waiting")
            side = kind(mode, waiting)
            found = percentiles("step", [_step(side) for _ in range(repetitions)])
            found |= percentiles("idle_turn", [_seconds(side.turn) for _ in range(repetitions)])
            if isinstance(side, DecodeSide):
                found["largest_beat_bytes"] = max(map(len, side.heartbeats()), default=0)
            samples.add((mode.value, kind.name, waiting), OURS, **found)


def percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in milliseconds, without interpolation; nothing of no times."""
    return {f"{name}_p{share}": percentile(share)(seconds) * 1e3 for share in (50, 99)} if seconds else {}


def _step(side: Side) -> float:
    handover, worker = side.engine.handover, side.engine.side
    progress = [Progress(f"running-{number}", (), False, 100) for number in range(RUNNING)]
    begun = time.perf_counter()
    _ = handover.pending
    step = handover.take_step(progress)
    step = pickle.loads(pickle.dumps(step, protocol=pickle.HIGHEST_PROTOCOL))
    worker.begin_step(step)
    worker.end_step()
    reports = Reports(worker.take_sent(), timelines=worker.take_counted().timelines)
    reports.report.add(worker.take_report() or Report())
    handover.collect(reports)
    found = Ended(reports.sent, reports.received, handover.take_failed())
    over = time.perf_counter()
    if any(found):
        raise RuntimeError(f"found {found} in a step; expected nothing to end while hand-overs wait")
    return over - begun


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


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
        channels = Channel(), Channel()
        self.far, self.engine = self._make("far", 1, channels[0]), self._make("near", waiting, channels[1])
        channels[0].answers, channels[1].answers = self.engine.answers, self.far.answers
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

    def _wait(self, names: list[str]) -> None:
        """Add a waiting hand-over per name."""
        raise NotImplementedError

    def _blocks(self, name: str) -> list[int]:
        blocks = self.engine.pool.allocate(name, 1)
        assert blocks is not None
        return blocks

    def _names(self) -> Iterator[str]:
        for number in self._numbers:
            yield f"cmpl-{uuid.UUID(int=number)}-0-{number:08x}"

    def _make(self, name: str, num_blocks: int, channel: Channel) -> Engine:
        transport = self.network.agent(name)
        transport.keeps_posted = False
        cells = np.zeros((num_blocks + 1, BLOCK_SIZE), dtype=np.uint64)
        self._memory.append(cells)
        planes = Planes((int(cells.ctypes.data),), BLOCK_SIZE * 8, 8, 8, 8, num_blocks + 1, BLOCK_SIZE, num_heads=1)
        settings = Settings(self.mode, LEASE_SECONDS, TIMEOUT_SECONDS)
        own = RemotePrefill(name, "127.0.0.1", 5600, 1)
        pool = Pool(range(1, num_blocks + 1))
        return Engine(own, settings, self.clock, transport, channel, planes, pool, host_words())


class DecodeSide(Side):
    """Requests wait for KV: with pull for a READ that does not end, with push for a WRITE that is never posted."""

    name = "decode"

    def heartbeats(self) -> list[bytes]:
        """Advance the clock by one interval, and return all heartbeats that are sent then."""
        self.clock.advance(INTERVAL * LEASE_SECONDS)
        found: list[bytes] = []
        while True:
            self.turn()
            sent = list(filter(is_heartbeat, self.sent()))
            if not sent:
                return found
            found += sent

    def _wait(self, names: list[str]) -> None:
        handover = self.engine.handover
        for name in names:
            request = self._request(name)
            handover.arrived(request)
            missing, _ = handover.matched(request, 0)
            handover.allocated(request, (self._blocks(request.request_id),), missing)

    def _request(self, name: str) -> Request:
        tokens = [next(self._numbers), *range(1, BLOCK_SIZE)]
        far = self.far
        params = asks_decode(far.own, name)
        if self.mode is TransferMode.PULL:
            # Blocks of the engine "far"; their content is never used.
            made = some_manifest(far.handover.incarnation, name, tokens, BLOCK_SIZE)
            params = prefill_params(far.own, made, transfer_id=None, transfer_mode=TransferMode.PULL, cached_tokens=0)
        return Request(f"decode-{name}", tokens, params)


class PrefillSide(Side):
    """Requests are kept for decode; with push, as many registrations wait for prefill requests that never arrive."""

    name = "prefill"

    def _wait(self, names: list[str]) -> None:
        handover = self.engine.handover
        requests, progress = [], []
        for name in names:
            request = Request(name, [next(self._numbers), *range(1, BLOCK_SIZE)], asks_prefill())
            blocks = self._blocks(name)
            handover.arrived(request)
            handover.matched(request, 0)
            handover.allocated(request, (blocks,), 0)
            requests.append(request)
            progress.append(Progress(name, (blocks,), True, BLOCK_SIZE))
        self.engine.step(progress)
        for request in requests:
            is_kept, _ = handover.finished(request, True, (self.engine.pool.tables[request.request_id],))
            assert is_kept
        if self.mode is TransferMode.PUSH:
            for name in names:
                self.network.agents["near"].inbox.append(("far", self._registration(name)))

    def _registration(self, name: str) -> bytes:
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
        return encode(registration)


SIDES = (DecodeSide, PrefillSide)


def some_manifest(incarnation: str, request_id: str, tokens: list[int], block_size: int) -> Manifest:
    """Return what prefill says of a request of one block."""
    return Manifest(
        protocol=PROTOCOL,
        incarnation=incarnation,
        request_id=request_id,
        digest=digest_of(tokens, len(tokens)),
        num_tokens=len(tokens),
        block_sizes=(block_size,),
        context_parallel=(1, 1),
        groups=(BlockRange(0, (1,)),),
        lease_seconds=LEASE_SECONDS,
        num_media=0,
    )
