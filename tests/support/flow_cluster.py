# SPDX-License-Identifier: Apache-2.0
"""Engines on one network and one clock, with a check of every byte that crosses the network.

Nothing runs by itself: the test steps engines and transfer threads, answers handshakes and delivers messages.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvcached_nixl.settings import Settings, TransferMode
from kvcached_nixl.transport.agent import Ranges, TransferState
from kvcached_nixl.vllm.adapter.tracing import traceparent_of
from kvcached_nixl.wire.handshake import Process
from kvcached_nixl.wire.messages import Written, decode
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.timeline import Timeline
from kvcached_nixl.worker.transfer.slab import Use
from support.clocks import ManualClock
from support.flow_asker import Asked
from support.flow_engine import Engine, Kind, Request, Status, Worker
from support.flow_memory import Shape
from support.internals import (
    asking_of,
    bytes_in_flight,
    free_buffers_of,
    holds_of,
    leftovers,
    renewals_of,
    report_of,
    stray_connections,
    tokens_of,
    unfinished_handshakes,
)
from support.memory_transport import GATE, MemoryTransport, Network, Posted

LEASE_SECONDS, TIMEOUT_SECONDS = 30.0, 60.0
FORGOTTEN_SECONDS = 700.0
"""Longer than any state about a vanished peer is kept."""


class Meant(NamedTuple):
    targets: set[Request] = set()
    sources: set[Request] = set()
    takings: tuple[dict[int, int], dict[int, int]] = ({}, {})


@dataclass
class Wire(Network):
    """A `Network` that asks the cluster whether each transfer may write to its target.

    Attributes:
        rests: the bytes that failed transfers have not moved yet.
        said: notifications delivered recently, so that a test can deliver them again.
        meant: per transfer, the requests that owned the blocks it writes and those that owned the blocks it reads when
            it was posted; for staging slots, the number of the taking of each.
    """

    cluster: Cluster | None = None
    rests: list[Posted] = field(default_factory=list)
    said: collections.deque[Posted] = field(default_factory=lambda: collections.deque(maxlen=64))
    meant: dict[Posted, Meant] = field(default_factory=dict)

    def agent(self, name: str) -> MemoryTransport:
        assert name not in self.agents
        return super().agent(name)

    def closed(self, sender: str, receiver: str) -> None:
        self.rests = [one for one in self.rests if (one.sender, one.receiver) != (sender, receiver)]

    def kill(self, name: str) -> None:
        super().kill(name)
        self.rests = [one for one in self.rests if one.receiver in self.agents and one.sender in self.agents]

    def post(self, posted: Posted) -> None:
        if posted.is_transfer:
            assert self.cluster is not None
            self.meant[posted] = self.cluster.meant_by(posted)
        super().post(posted)

    def fail(self, posted: Posted, moved: float = 0.0, rest: bool = False) -> None:
        """Fails a transfer. ``rest``: the bytes that it has not moved are still in flight."""
        if rest and posted.local is not None and posted.remote is not None:
            count = int(len(posted.local) * moved)
            late = Posted(
                posted.sender, posted.receiver, b"", posted.operation, posted.local[count:], posted.remote[count:]
            )
            self.meant[late] = self.meant[posted]
            self.rests.append(late)
        super().fail(posted, moved)

    def land(self, rest: Posted) -> None:
        """Delivers the remaining bytes of a failed transfer."""
        self.rests.remove(rest)
        self.pending[rest] = None
        self._end(rest, TransferState.DONE, 1.0)

    def notify(self, posted: Posted) -> None:
        super().notify(posted)
        if posted.notification:
            self.said.append(posted)

    def _end(self, posted: Posted, state: TransferState, share: float) -> None:
        assert self.cluster is not None
        if posted.local is not None and posted.receiver in self.agents:
            self.cluster.watch(posted, int(len(posted.local) * share))
        super()._end(posted, state, share)


@dataclass(eq=False)
class Question:
    """A handshake that nobody has answered yet."""

    asker: Engine
    host: str
    port: int
    place: tuple[int, int]
    future: Future[tuple[str, bytes]] = field(default_factory=Future)


class KeptSpans:
    """In place of `adapter.tracing.EngineSpans`: keeps the timelines."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, Timeline, dict[str, str]]] = []

    def trace_of(self, request: Any) -> str:
        return traceparent_of(request.trace_headers)

    def add(self, trace: str, timeline: Timeline, attributes: dict[str, str]) -> None:
        self.kept.append((trace, timeline, attributes))


class Cluster:
    """Engines, their network and their clock. See the module docstring.

    Attributes:
        listening: (host, port) -> the engine whose side channel answers there.
        alive: engines that run. Those in ``frozen`` are stopped and send nothing.
        sharing: host names that stand for one host.
        questions: handshakes in flight.
        asked: questions of decode to prefill that have no answer yet.
        answers_at_once: `settle` delivers the answers.
        spans: of all engines; None where nothing is traced.
    """

    def __init__(self, mode: TransferMode, verify_fraction: float = 0.0, *, is_traced: bool = False) -> None:
        self.settings = Settings(mode, LEASE_SECONDS, TIMEOUT_SECONDS, verify_fraction=verify_fraction)
        self.clock, self.wire = ManualClock(1000.0), Wire()
        self.spans = KeptSpans() if is_traced else None
        self.wire.cluster = self
        self.listening: dict[tuple[str, int], Engine] = {}
        self.alive: list[Engine] = []
        self.frozen: set[Engine] = set()
        self.engines: list[Engine] = []
        self.questions: list[Question] = []
        self.asked: list[Asked] = []
        self.answers_at_once = True
        self.arrivals = itertools.count(1)
        self._numbers = itertools.count(1)
        self._owners: dict[str, Worker] = {}
        self.sharing: set[str] = set()

    @property
    def pushes(self) -> bool:
        return self.settings.transfer_mode is TransferMode.PUSH

    def next_number(self) -> int:
        return next(self._numbers)

    # ------------------------------------------------------------------------------------------------------- engines

    def engine(self, name: str, kind: Kind | None = None, **shape: Any) -> Engine:
        """Starts an engine. It has the address of an earlier engine with the same name."""
        kind = Kind(shape=Shape(**shape)) if kind is None else kind
        number = sum(engine.own.engine_id == name for engine in self.engines)
        own = RemotePrefill(name, f"host-{name}", 5600, kind.shape.tp_size, kind.shape.pp_size)
        engine = Engine(self, own, kind, number)
        self.engines.append(engine)
        self.alive.append(engine)
        self.listening[own.host, own.port] = engine
        for worker in engine.workers:
            self._owners[worker.agent_name] = worker
        return engine

    def restart(self, engine: Engine) -> Engine:
        """Kills an engine and starts another one with the same id and address."""
        self.kill(engine)
        return self.engine(engine.own.engine_id, engine.kind)

    def stop_listening(self, engine: Engine) -> None:
        """Ends the engine core's process. Its workers have not noticed yet."""
        if self.listening.get((engine.own.host, engine.own.port)) is engine:
            del self.listening[engine.own.host, engine.own.port]
        if engine in self.alive:
            self.alive.remove(engine)
        self.frozen.discard(engine)
        for asked in [one for one in self.asked if one.asker.engine is engine]:
            asked.hang_up()
        engine.lose_look_ups()

    def kill(self, engine: Engine) -> None:
        self.stop_listening(engine)
        for worker in engine.workers:
            self.wire.vanished.discard(worker.agent_name)
            if worker.agent_name in self.wire.agents:
                self.wire.kill(worker.agent_name)

    def vanish(self, engine: Engine) -> None:
        """The host disappears without closing a connection."""
        self.frozen.add(engine)
        engine.lose_look_ups()
        for worker in engine.workers:
            self.wire.vanish(worker.agent_name)

    def come_back(self, engine: Engine) -> None:
        self.frozen.discard(engine)
        for worker in engine.workers:
            self.wire.vanished.discard(worker.agent_name)

    @property
    def processes(self) -> set[Process]:
        """Worker processes that have not ended."""
        return {worker.host.own for worker in self._owners.values() if worker.agent_name in self.wire.agents}

    @property
    def running(self) -> list[Engine]:
        return [engine for engine in self.alive if engine not in self.frozen]

    # ---------------------------------------------------------------------------------------------------- handshakes

    def ask(self, asker: Engine, host: str, port: int, place: tuple[int, int]) -> Future[tuple[str, bytes]]:
        self.questions.append(Question(asker, host, port, place))
        return self.questions[-1].future

    def answer(self, question: Question, *, late: bool = False) -> None:
        self.questions.remove(question)
        engine = self.listening.get((question.host, question.port))
        if late or (engine is not None and engine in self.frozen):
            question.future.set_exception(TimeoutError("no answer"))
        elif engine is None:
            question.future.set_exception(ConnectionRefusedError("nobody listens"))
        elif question.place not in engine.answers:
            question.future.set_exception(TimeoutError("no such rank"))
        else:
            question.future.set_result(engine.answers[question.place])

    # ---------------------------------------------------------------------------------------- checks of every byte

    def meant_by(self, posted: Posted) -> Meant:
        """Returns whose blocks a transfer that is posted now writes and reads, and the takings of its slots."""
        sides = self._sides(posted)
        if sides is None:
            return Meant()
        (target, into), (source, out_of) = sides
        if posted.operation == "WRITE":
            said = decode(posted.notification)
            assert isinstance(said, Written)
            targets = {target.engine.attempts[said.attempt]}
            sources = self._holders(source, out_of) if source.copier is None else set()
            assert sources or source.copier is not None, "a WRITE reads blocks that are not one request's"
        else:
            assert target.copier is source.copier is None, "a READ of what is staged"
            # A READ may read any bytes of prefill: decode uses them only if the ownership token matches afterwards.
            targets, sources = self._holders(target, into), set()
        if target.copier is None:
            self.allow(target, target.memory.blocks_at(into), targets)
        return Meant(targets, sources, (_takings(target, into), _takings(source, out_of)))

    def watch(self, posted: Posted, count: int) -> None:
        """Called just before the first ``count`` descriptors of a transfer are moved; checks that they may be."""
        sides = self._sides(posted)
        if not count or sides is None:
            return
        (target, into), (source, out_of) = sides
        targets, sources, takings = self.wire.meant[posted]
        for worker, ranges, had in ((target, into, takings[0]), (source, out_of, takings[1])):
            now = _takings(worker, ranges[:count])
            assert now.items() <= had.items(), "bytes go into a slot of somebody else, or come from one"
        if target.copier is None:
            self.allow(target, target.memory.blocks_at(into[:count]), targets)
        if sources:
            assert sources & self._holders(source, out_of[:count]), "a WRITE reads blocks that were given away"

    def allow(self, worker: Worker, blocks: set[int], requests: set[Request]) -> None:
        """Checks that bytes may be written: the blocks belong to a request that waits for KV, or are held for it."""
        pool = worker.engine.pool
        for block in blocks:
            assert pool.holders[block], "bytes go into a block that is free"
            assert set(pool.holders[block]) <= requests, "bytes go into a block of somebody else"
            assert block not in pool.sum_of, "bytes go into a block that others may hit"
            for request in pool.holders[block]:
                is_held = block not in pool.tables.get(request.request_id, [])
                assert is_held or request.status is Status.REMOTE, "bytes go into a block that is computed on"

    def _sides(self, posted: Posted) -> tuple[tuple[Worker, Ranges], tuple[Worker, Ranges]] | None:
        """Returns the target and the source of a transfer, or None if it does not move KV."""
        assert posted.local is not None and posted.remote is not None
        here, there = (self._owners[one.partition(GATE)[0]] for one in (posted.sender, posted.receiver))
        first = int(posted.local[0, 0])
        if here.copier is not None:
            assert not here.memory.begin <= first < here.memory.end, "NIXL touches the cache of an engine that stages"
        if not here.moved.begin <= first < here.moved.end:
            return None
        local, remote = (here, posted.local), (there, posted.remote)
        return (remote, local) if posted.operation == "WRITE" else (local, remote)

    def _holders(self, worker: Worker, ranges: Ranges) -> set[Request]:
        """Returns the requests that have all blocks of these ranges."""
        holders = worker.engine.pool.holders
        return set.intersection(*(set(holders[block]) for block in worker.memory.blocks_at(ranges)))

    # ------------------------------------------------------------------------------------------------------- progress

    def turn(self) -> float:
        """Runs one turn of every transfer thread. Returns the seconds until one of them has work again."""
        return min((worker.turn() for engine in self.running for worker in engine.workers), default=1.0)

    def settle(self, rounds: int = 300) -> None:
        """Delivers, answers, turns and steps until nothing changes. No time passes."""
        quiet = 0
        for _ in range(rounds):
            self.wire.deliver_all()
            for question in list(self.questions):
                self.answer(question)
            for asked in self._answers():
                asked.deliver()
            for engine in self.running:
                for worker in engine.workers:
                    worker.copy()
            self.turn()
            for engine in self.running:
                engine.step()
            quiet = 0 if self._is_busy() else quiet + 1
            if quiet == 2:
                return

    def _is_busy(self) -> bool:
        on_wire = any(not self.wire.is_stuck(one) for one in self.wire.pending)
        engines = any(engine.is_moving or any(worker.is_busy for worker in engine.workers) for engine in self.running)
        return on_wire or engines or bool(self.questions or self._answers())

    def _answers(self) -> list[Asked]:
        return [one for one in self.asked if self.answers_at_once and one.is_ready]

    def pass_time(self, seconds: float, slice_seconds: float = 2.5) -> None:
        """Advances the clock in slices, and settles after each."""
        until = self.clock.now_seconds() + seconds
        self.settle()
        while (left := until - self.clock.now_seconds()) > 0:
            self.clock.advance(min(left, slice_seconds))
            self.settle()

    def left(self) -> Iterator[str]:
        """Yields leftover state of running engines: none may exist once all requests have ended and time has passed."""
        for engine in self.running:
            yield from (f"{engine.own.engine_id}: {found}" for found in left_on(engine))


def _takings(worker: Worker, ranges: Ranges) -> dict[int, int]:
    """Returns the taking of each staging slot in these ranges; empty for a worker that does not stage."""
    return {} if worker.copier is None else worker.copier.slots.takings(worker.moved.blocks_at(ranges))


def left_on(engine: Engine) -> Iterator[str]:
    """Yields everything that an engine still holds."""
    pool, handover = engine.pool, engine.handover
    yield from leftovers(engine, but=("reloaded", "answers", "attempts", "workers", "failures", "revoked", "lasted"))
    yield from (f"engine: {counts}" for counts in engine.reported if counts)
    if len(pool.free) != pool.shape.num_blocks - 1 or any(pool.holders) or pool.tables:
        yield f"blocks: {[(block, held) for block, held in enumerate(pool.holders) if held]}"
    yield from leftovers(handover)
    yield from leftovers(handover.revocations, but=("_weights",))
    # What was measured last is told to the workers with the next step, which may never come.
    yield from leftovers(handover.engine.timelines, but=("lasted",))
    yield from (f"hold {number}: {blocks}" for number, blocks in holds_of(handover).items())
    yield from leftovers(*asking_of(handover), but=("all", "_known"))
    fetching, offering = handover.fetching, handover.offering
    yield from leftovers(fetching, fetching.attempts, offering, offering.kept)
    if (
        handover.pending
        or handover.engine.holds.num_blocks
        or fetching.attempts.num_quarantined_blocks
        or engine.quarantined
    ):
        yield f"pending {handover.pending}, quarantine {fetching.attempts.num_quarantined_blocks} {engine.quarantined}"
    for worker in engine.workers:
        yield from _left_on_worker(worker)


def _left_on_worker(worker: Worker) -> Iterator[str]:
    thread, context, writer = worker.side.thread, worker.context, worker.registry.writer
    yield from leftovers(thread, worker.receiver, worker.registry, writer, renewals_of(thread))
    yield from leftovers(context, context.transfer_queue, context.checksums, worker.awaiting_checksum)
    # What is counted is reported with the next step, which may never come.
    yield from leftovers(report_of(thread))
    if writer.num_final or bytes_in_flight(context.transfer_queue):
        yield f"posting counts {writer.num_final} {bytes_in_flight(context.transfer_queue)}"
    if len(free_buffers_of(context.token_buffers)) != worker.engine.kind.token_buffers:
        yield "a token buffer in use"
    if tokens_of(worker.side.tokens) or worker.token_table.any():
        yield "an ownership token"
    if worker.agent.unreleased():
        yield f"{len(worker.agent.unreleased())} transfers that were not released"
    if worker.copier is not None:
        yield from leftovers(worker.staging, worker.copier)
        if any(worker.copier.slots.taken) or any(map(worker.copier.slots.used, Use)):
            yield f"slots: {[slot for slot, taken in enumerate(worker.copier.slots.taken) if taken]}"
    yield from (f"a connection to {one}" for one in stray_connections(context, worker.agent.peers))
    yield from (f"a handshake with {one}" for one in unfinished_handshakes(context.peers))
    if worker.agent.inbox:
        yield "a message that was not handled"
