# SPDX-License-Identifier: Apache-2.0
"""A small model of a vLLM engine around this package's real scheduler and worker halves, with devices that lag behind.

Modelled on ``v1/core/sched/scheduler.py`` and ``async_scheduler.py`` (0.28): chunked prefill, prefix hits,
preemption, steps that are scheduled before the output of earlier ones is known, and the calls of a KV connector.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import pickle
import random
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.ids import EngineId
from kvcached_nixl.processes import Host
from kvcached_nixl.scheduler.asking.settings import AskSettings
from kvcached_nixl.scheduler.context import EngineContext, Progress
from kvcached_nixl.scheduler.facade import SchedulerFacade
from kvcached_nixl.wire.handshake import Answers, Process, RankHandshake, Tag, Tensors, Weights
from kvcached_nixl.wire.manifest import digest_of
from kvcached_nixl.wire.params import RemotePrefill, asks
from kvcached_nixl.wire.planes import GroupMemory
from kvcached_nixl.wire.question import Question
from kvcached_nixl.wire.step import FAILING, FetchSpec, Report, Reports, Step, WakeAddress
from kvcached_nixl.wire.timeline import Lasted, Reported
from kvcached_nixl.worker.decode.fencing import WriteGates
from kvcached_nixl.worker.decode.receiver import Receiver
from kvcached_nixl.worker.facade import WorkerFacade, assemble
from kvcached_nixl.worker.prefill.registry import OfferRegistry
from kvcached_nixl.worker.transfer.checksums import Checksums
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.ownership_tokens import BUCKETS, TOKENS_PER_BUCKET, TokenArray
from kvcached_nixl.worker.transfer.topology import LocalRank
from kvcached_nixl.worker.transfer.transfer_queue import Budget
from kvcached_nixl.worker.transfer_thread import IsReached
from support.digest_fakes import InTurn, as_bytes, content_of
from support.engine_fakes import kv_groups, stock
from support.flow_asker import FlowAsker, url_of
from support.flow_memory import Cells, Pool, RankMemory, Sequence64, Shape
from support.flow_staging import slab_of
from support.internals import context_of, receiver_of, registry_of

if TYPE_CHECKING:
    from support.flow_cluster import Cluster


class Status(enum.Enum):
    WAITING = "waiting"
    REMOTE = "waiting for remote KVs"
    RUNNING = "running"
    PREEMPTED = "preempted"
    STOPPED = "stopped"
    ABORTED = "aborted"
    ERROR = "error"

    @property
    def is_finished(self) -> bool:
        return self in (Status.STOPPED, Status.ABORTED, Status.ERROR)


WEIGHTS = Weights(Tensors("1" * 32, "2" * 32), files="3" * 32)


@dataclass(eq=False, repr=False)
class Request:
    """One request. ``status`` and ``answer`` are what its client gets.

    Attributes:
        max_tokens: limit of generated tokens.
        stops_at: number of the generated token that ends the request. The scheduler does not know it in advance.
        num_external: tokens whose KV came from prefill.
        epoch: how often the request was preempted.
        salt: its blocks are shared with requests of the same salt only.
        is_mixed: it has gone on with other weights, or another adapter, than those that it had begun with. What it
            computes from then on is its own, also after a preemption.
        lora: returns the content of its adapter.
        priority: a smaller one is first, where an engine goes by priority.
        order: of its arrival.
        block_hashes: of its full blocks.
        told_cached: of its prompt, by prefill; None if it was not told.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: Mapping[str, Any] | None = None
    max_tokens: int = 1
    stops_at: int | None = None
    status: Status = Status.WAITING
    answer: dict[str, Any] | None = None
    num_tokens: int = 0
    num_computed: int = 0
    num_external: int = 0
    placeholders: int = 0
    epoch: int = 0
    priority: float = 0
    computes_prompt: bool = False
    is_session: bool = False
    awaits_grammar: bool = False
    is_stand_in: bool = False
    adapter: int = 0
    num_media: int = 0
    lacks_media: bool = False
    trace_headers: Mapping[str, str] | None = None
    salt: int = 0
    is_mixed: bool = False
    lora: Callable[[], str] = lambda: ""
    order: int = 0
    block_hashes: Sequence[bytes] = ()
    told_cached: int | None = None
    sequence: Sequence64 = field(init=False)

    def __post_init__(self) -> None:
        self.sequence = Sequence64(self.prompt)
        self.num_tokens = len(self.prompt)

    def __repr__(self) -> str:
        return f"{self.request_id} ({self.status.value}, {self.num_tokens} tokens)"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_outputs(self) -> int:
        return self.num_tokens - len(self.prompt)

    @property
    def is_over(self) -> bool:
        return self.num_outputs >= min(self.max_tokens, self.stops_at or self.max_tokens)

    def sums(self, end: int) -> Cells:
        return self.sequence.sums(end)

    @property
    def family(self) -> tuple[int, int]:
        """Only with requests of the same family it shares blocks."""
        return self.adapter, self.salt

    @property
    def question(self) -> Question | None:
        """As `adapter.requests.RequestView`."""
        is_named = asks(self.params, "do_remote_prefill") or asks(self.params, "do_remote_decode")
        if self.computes_prompt or self.is_session or is_named:
            return None
        more = str(self.adapter or ""), "", int(self.priority), self.trace_headers
        return Question(self.request_id, self.prompt, *more)

    def tell_cached(self, num_tokens: int) -> None:
        self.told_cached = num_tokens

    def refuse_prefill(self) -> None:
        if asks(self.params, "do_remote_prefill"):
            self.params = None

    def digest(self, num_tokens: int) -> str:
        return digest_of(self.prompt, num_tokens, lora=self.lora())


class Names(set[str]):
    """A set that iterates in sorted order, so that a seed gives the same schedule in every process."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


class Device:
    """A device stream: does the queued work in order, and only when the test calls `run`."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self.given = self.done = 0

    def give(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self.given += 1

    def run(self, until: int | None = None) -> None:
        while self.done < (self.given if until is None else until):
            self._queue.popleft()()
            self.done += 1

    def select(self) -> None:
        """The test calls the transfer thread's turns."""

    def record(self) -> IsReached:
        meant = self.given
        return lambda: self.done >= meant


@dataclass(frozen=True)
class Envelope:
    compatibility_hash: str
    agent_metadata_bytes: bytes


@dataclass(frozen=True)
class Kind:
    """How an engine is configured.

    Attributes:
        budget: tokens in a step.
        transfer_queue: limits of what may be in flight.
        drops_blocks: as a model with sliding windows: decode computes the last token again.
        slots: slots of the slab, and how many are reserved for sending and as many for receiving; (0, 0): no staging.
        depth: steps that are scheduled before the output of the first of them is handled.
        allocation_seconds: how long decode waits for blocks; None for as long as for a whole hand-over.
        most_unclaimed_tokens: ``max_num_batched_tokens``, as far as it limits what is kept unclaimed.
        goes_by_priority: as with ``--scheduling-policy priority``.
        keeps_stale_output: a preempted request takes the token of a step that was in flight (vLLM's
            ``num_stale_output_tokens``).
        asks: names of the engines that it asks for KV.
        is_required: it computes nothing because they do not answer.
        accepts_params: its clients may name engines, too.
        is_asked: it is asked for KV by others, too.
        queue_seconds: how long its requests may wait to be asked for.
        local_tokens: ``max_local_prefill_tokens``. By default what is missing is always asked for.
        model: what its tag says.
        clock_seconds: its clocks are ahead by so much.
    """

    shape: Shape = Shape()
    weights: Weights = WEIGHTS
    recomputes: bool = True
    caches_prefixes: bool = True
    budget: int = 16
    depth: int = 2
    goes_by_priority: bool = False
    keeps_stale_output: bool = False
    token_buffers: int = 4
    are_shared: bool = False
    newest_first: bool = False
    transfer_queue: Budget = Budget()
    slots: tuple[int, int] = (0, 0)
    drops_blocks: bool = False
    allocation_seconds: float | None = None
    most_unclaimed_tokens: int = 1 << 30
    asks: tuple[str, ...] = ()
    is_required: bool = False
    accepts_params: bool = False
    is_asked: bool = False
    queue_seconds: float = math.inf
    local_tokens: int | None = 0
    model: str = "m"
    clock_seconds: float = 0.0


class Ahead(NamedTuple):
    """A clock that differs from another one."""

    clock: Clock
    by_seconds: float

    def now_seconds(self) -> float:
        return self.clock.now_seconds() + self.by_seconds


class Channel:
    """The side channel of one worker. The test answers what the worker asks."""

    def __init__(self, cluster: Cluster, engine: Engine) -> None:
        self._cluster, self._engine = cluster, engine
        self.is_closed = False

    def ask(self, host: str, port: int, tp_rank: int, pp_rank: int) -> Any:
        return self._cluster.ask(self._engine, host, port, (pp_rank, tp_rank))

    def wake(self, host: str, port: int, key: str) -> None:
        own = self._engine
        assert WakeAddress(host, port, key) == own.handover.engine.wake_address
        own.handover.engine.woken()

    def close(self) -> None:
        self.is_closed = True


class FlowHost(Host):
    """Each engine has a separate host, except that processes of the hosts in ``cluster.sharing`` see each other."""

    def __init__(self, cluster: Cluster, engine: Engine, rank: int) -> None:
        own = Process(engine.own.host, "", 1 + engine.incarnation, rank)
        super().__init__(own, "DRAM")
        self.__dict__["cluster"] = cluster

    def is_here(self, process: Process) -> bool:
        sharing: set[str] = self.__dict__["cluster"].sharing
        return {process.boot_id, self.own.boot_id} <= sharing

    def sees(self, process: Process) -> bool:
        return self.is_here(process) and not self.is_dead(process)

    def is_dead(self, process: Process) -> bool:
        return process not in self.__dict__["cluster"].processes

    def is_behind_network(self, process: Process) -> bool:
        return not self.is_here(process)


class Worker:
    """One rank: a real `WorkerFacade` and transfer thread, with a separate device."""

    def __init__(self, engine: Engine, rank: int) -> None:
        shape, cluster = engine.kind.shape, engine.cluster
        self.pp_rank, self.tp_rank = divmod(rank, shape.tp_size)
        self.engine, tp_rank = engine, self.tp_rank
        self.memory, self.device = RankMemory(shape, tp_rank, self.pp_rank), Device()
        self.agent_name = f"{engine.own.engine_id}.{engine.incarnation}/{rank}"
        self.agent = cluster.wire.agent(self.agent_name)
        self.token_table: TokenArray = np.zeros(
            (BUCKETS + engine.kind.token_buffers, TOKENS_PER_BUCKET), dtype=np.uint64
        )
        self.staging, self.copier = slab_of(self, *engine.kind.slots) if engine.kind.slots[0] else (None, None)
        self.host = FlowHost(cluster, engine, rank)
        self.moved = self.memory if self.copier is None else self.copier.slab
        self.awaiting_checksum = InTurn(held=True)
        groups = (GroupMemory((self.moved.planes,), shape.ratio),)
        place = LocalRank(
            *(EngineId(engine.own.engine_id), shape.tp_size, tp_rank, groups, shape.kv_shares),
            pp_size=shape.pp_size,
            pp_rank=self.pp_rank,
        )
        handshake = RankHandshake(
            engine_id=place.engine_id,
            tp_size=shape.tp_size,
            tp_rank=tp_rank,
            agent_metadata=self.agent.metadata(),
            device_id=0,
            groups=groups,
            token_table_address=int(self.token_table.ctypes.data),
            memory_type="DRAM",
            is_staged=self.staging is not None,
            weights=engine.kind.weights,
            process=self.host.own,
            pp_size=shape.pp_size,
            pp_rank=self.pp_rank,
        )
        tag = str(Tag(engine.settings.transfer_mode.value, (("model", engine.kind.model),), ((8,),)))

        def offer(weights: Weights) -> None:
            told = msgspec.structs.replace(handshake, weights=weights)
            self.envelope = Envelope(tag, msgspec.msgpack.encode(told))

        self.channel = Channel(cluster, engine)
        self.gates = WriteGates(lambda: cluster.wire.open_gate(self.agent_name), self.awaiting_checksum, engine.clock)
        context = WorkerContext(
            engine.settings,
            engine.clock,
            self.channel,  # type: ignore[arg-type]
            threading.Event(),
            self.agent,
            place,
            self.token_table,
            tag,
            Checksums(
                content_of(self.moved.planes, as_bytes(self.moved.array)),
                content_of(self.memory.planes, as_bytes(self.memory.array)),
                self.awaiting_checksum,
                engine.settings.verify_fraction,
            ),
            self.host,
            self.staging,
        )
        self.side: WorkerFacade = assemble(context, self.device, offer, self.gates)  # type: ignore[arg-type]
        self.side.identify(engine.kind.weights)
        self.context.transfer_queue.budget = engine.kind.transfer_queue

    @property
    def context(self) -> WorkerContext:
        return context_of(self.side.thread)

    @property
    def receiver(self) -> Receiver:
        """Decode's half of the transfer thread."""
        return receiver_of(self.side.thread)

    @property
    def registry(self) -> OfferRegistry:
        """Prefill's half of the transfer thread."""
        return registry_of(self.side.thread)

    def turn(self) -> float:
        return self.side.thread.turn()

    @property
    def is_busy(self) -> bool:
        """Whether there are messages or finished copies and checksums that it has not handled, or any still to do."""
        return bool(
            self.agent.inbox
            or any(gate.agent.inbox for gate in self.gates)  # type: ignore[attr-defined]
            or self.side.thread._inbox
            or (self.copier is not None and (self.copier.asked or self.copier.ended))
            or self.awaiting_checksum.asked
            or self.awaiting_checksum.ended
        )

    def copy(self) -> None:
        """Does all submitted copies and checksums."""
        while self.copier is not None and self.copier.asked:
            self.copier.run()
        while self.awaiting_checksum.asked:
            self.awaiting_checksum.run()


@dataclass(frozen=True)
class Scheduled:
    """One request's part of a step: the tokens from ``begin`` to ``end``, in these blocks."""

    request: Request
    epoch: int
    blocks: tuple[int, ...]
    begin: int
    end: int
    samples: bool


@dataclass
class Output:
    """A step that was given to the workers, with what they have reported."""

    scheduled: list[Scheduled]
    marks: list[int]
    sent: list[set[str]] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    timelines: list[Reported] = field(default_factory=list)

    @property
    def tells(self) -> bool:
        """Whether handling this output changes any state."""
        return bool(self.scheduled or any(self.sent) or self.report != Report() or self.timelines)


class Listening:
    """The side-channel listener of an engine: its answers are stored in the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def answer(self, answers: Answers) -> None:
        self.engine.answers = answers

    def close(self) -> None:
        """There is no socket in one process."""


class Engine:
    """One engine. ``requests`` are those that vLLM has not freed.

    Attributes:
        admits: whether waiting requests are scheduled; the test may stop that, as in an engine that is full.
        is_paused: as by ``/pause?mode=keep``: nothing is scheduled, and only hand-overs count as work.
        held: as those of `adapter.queues`.
        chunk_tokens: of one prompt that a step computes; 0 for no limit.
    """

    def __init__(self, cluster: Cluster, own: RemotePrefill, kind: Kind, incarnation: int) -> None:
        self.cluster, self.own, self.kind, self.incarnation = cluster, own, kind, incarnation
        self.clock = Ahead(cluster.clock, kind.clock_seconds)
        self.admits, self.is_paused = True, False
        self.weights = kind.weights
        self.reloaded: Counter[int] = Counter()
        self.settings = cluster.settings
        shape = kind.shape
        taken = stock(
            groups=kv_groups(shape.block_size, drops_blocks=kind.drops_blocks),
            recomputes=kind.recomputes,
            max_num_batched_tokens=kind.most_unclaimed_tokens,
            is_producer=kind.is_asked or not kind.asks,
            spans=cluster.spans,
        )
        allocation_seconds = kind.allocation_seconds or self.settings.handover_timeout_seconds
        settings = dataclasses.replace(self.settings, allocation_timeout_seconds=allocation_seconds)
        number = cluster.next_number()
        wake_address = WakeAddress("127.0.0.1", 1, f"{number:032x}")
        self.handover = SchedulerFacade(
            EngineContext(taken, settings, own, f"{number:016x}", wake_address, self.clock),
            AskSettings(
                tuple(map(url_of, kind.asks)),
                kind.is_required,
                kind.accepts_params or not kind.asks,
                is_asked=kind.is_asked,
                queue_seconds=kind.queue_seconds,
                max_local_prefill_tokens=kind.local_tokens,
            ),
            functools.partial(FlowAsker, self),
        )
        self.handover.asking.servers.random = random.Random(number)
        self.workers = [Worker(self, rank) for rank in range(shape.tp_size * shape.pp_size)]
        memories = [worker.memory for worker in self.workers]
        self.pool = Pool(self, shape, memories, kind.caches_prefixes, kind.are_shared, kind.newest_first)
        self.handover.engine.bind(self.pool)
        self.answers: Answers = {}
        self.introduce()
        self.requests: dict[str, Request] = {}
        self.attempts: dict[int, Request] = {}
        self.waiting: deque[Request] = deque()
        self.held: dict[str, Request] = {}
        self.chunk_tokens = 0
        self.skipped: deque[Request] = deque()
        self.running: list[Request] = []
        self.outputs: deque[Output] = deque()
        self.failures: Counter[int] = Counter()
        self.revoked: Counter[int] = Counter()
        self.lasted: list[Lasted] = []
        self.quarantined = 0
        self._finished_ids = self._has_scheduled = False
        self.finished_receiving: set[str] = set()
        self._failed_receiving: set[str] = set()
        self.reported: Counter[str] = Counter()
        self.looking: list[Callable[[Mapping[str, Any] | None], None]] = []

    # ------------------------------------------------------------------------------- called by the API server

    def look_up(self, question: Question, least_tokens: int, told: Callable[[Mapping[str, Any] | None], None]) -> None:
        """Tells a peer how much of a prompt is cached, and offers that if it is enough; None when the engine dies."""
        request = Request(f"looked-up-{next(self.cluster.arrivals):08x}", tuple(question.token_ids or ()))
        request.adapter = int(question.adapter or 0)
        request.lora = lambda: self._adapter(request.adapter)
        hits = self.pool.hits(request)
        num_tokens = request.num_computed = len(hits) * self.kind.shape.block_size
        if 0 < least_tokens <= num_tokens and self.handover.offers_cached and not self.is_paused:
            request.status = Status.STOPPED
            if self.pool.allocate(request, hits, num_tokens) is None:
                told(self.handover.look_up(num_tokens))
                return
            self.requests[request.request_id] = request
            self.looking.append(told)
            blocks = (list(self.pool.tables[request.request_id]),)
            if self.handover.offer_cached(request, num_tokens, blocks, functools.partial(self._tell, told)):
                return
            self._free_blocks(request)
            self.looking.remove(told)
        told(self.handover.look_up(num_tokens))

    def _tell(self, told: Callable[[Mapping[str, Any] | None], None], params: Mapping[str, Any]) -> None:
        if told in self.looking:
            self.looking.remove(told)
            told(params)

    def lose_look_ups(self) -> None:
        """Those who wait for an offer hear nothing in time."""
        while self.looking:
            self.looking.pop()(None)

    def add(self, request: Request) -> Request:
        assert request.request_id not in self.requests
        request.lora = lambda: self._adapter(request.adapter)
        request.order, size = next(self.cluster.arrivals), self.kind.shape.block_size
        sums = request.sums(request.num_prompt_tokens)[size - 1 :: size]
        request.block_hashes = [repr((request.family, one)).encode() for one in sums]
        is_held = self.handover.arrived(request)
        self.requests[request.request_id] = request
        self.waiting.append(request)
        if is_held:
            self.hold(request.request_id)
        return request

    def take(self, body: Mapping[str, Any], trace_headers: Mapping[str, str] | None) -> Request:
        """A request comes over HTTP."""
        name = f"cmpl-{body['request_id']}-0-{next(self.cluster.arrivals):08x}"
        request = Request(name, tuple(body["prompt"]), body["kv_transfer_params"], body["max_tokens"])
        request.trace_headers = trace_headers
        request.adapter, request.priority = int(body.get("model", 0)), body.get("priority", 0)
        return self.add(request)

    def hold(self, request_id: str) -> None:
        request = self.requests[request_id]
        assert request.status is Status.WAITING and request_id not in self.pool.tables
        self._unqueue(request)
        # It has nothing, and begins anew.
        request.is_mixed = False
        self.held[request_id] = request

    def release(self, request_id: str, params: Mapping[str, Any] | None) -> None:
        """As `adapter.queues.HoldingQueue.release`."""
        request = self.held.pop(request_id)
        request.params = request.params if params is None else dict(params)
        later = (place for place, one in enumerate(self.waiting) if one.order > request.order)
        self.waiting.insert(next(later, len(self.waiting)), request)

    def abort(self, request: Request) -> None:
        self._finish([request], Status.ABORTED)

    # --------------------------------------------------------------------------------------- the engine's loop

    @property
    def has_requests(self) -> bool:
        unfinished = any(not request.status.is_finished for request in self.requests.values())
        return (unfinished and not self.is_paused) or self._finished_ids or self.handover.pending

    @property
    def is_moving(self) -> bool:
        """Whether a step now could change any state."""
        is_told = any(output.tells for output in self.outputs) or (self.outputs and not self.has_requests)
        return bool(is_told) or self.handover.pending or self._has_scheduled or self._finished_ids

    def step(self) -> bool:
        """Dispatches a step if one is possible, and handles the oldest output. Returns whether it did either."""
        did = self.dispatch()
        return self.complete() or did

    def dispatch(self) -> bool:
        # As the engine's loop does while it waits.
        if self.handover.watches_memory or self.has_requests:
            self.handover.relieve()
        self.handover.ask()
        if len(self.outputs) >= self.kind.depth or not self.has_requests:
            return False
        self.pool.is_scheduling = True
        scheduled, progress = self._schedule()
        step = self.handover.take_step(progress)
        self.pool.is_scheduling = False
        self._finished_ids, self._has_scheduled = False, bool(scheduled)
        for wanted in step.of(FetchSpec):
            self.attempts[wanted.attempt] = self.requests[wanted.request_id]
        for one in scheduled:
            one.request.num_computed = one.end
            one.request.placeholders += one.samples
        self.outputs.append(self._execute(step, scheduled))
        return True

    def complete(self) -> bool:
        """Waits until the devices have done the oldest step, and handles its output."""
        if not self.outputs:
            return False
        output = self.outputs.popleft()
        for worker, mark in zip(self.workers, output.marks, strict=True):
            worker.device.run(mark)
        self._update(output)
        self.pool.end_step()
        return True

    # --------------------------------------------------------------------------------------------- a scheduler

    def _schedule(self) -> tuple[list[Scheduled], list[Progress]]:
        scheduled: list[Scheduled] = []
        progress: list[Progress] = []
        left = 0 if self.is_paused else self.kind.budget
        preempted = False

        def schedule(request: Request, count: int, blocks: Sequence[int], replaces: bool) -> None:
            begin, end = request.num_computed, request.num_computed + count
            samples = end >= request.num_tokens + request.placeholders
            table = tuple(self.pool.tables[request.request_id])
            scheduled.append(Scheduled(request, request.epoch, table, begin, end, samples))
            ids = (list(blocks),) if blocks or replaces else ()
            progress.append(Progress(request.request_id, ids, replaces, end, begin))
            self.pool.cache(request, min(end, request.num_tokens))

        index = 0
        while index < len(self.running) and left:
            request = self.running[index]
            index += 1
            if request.placeholders and (
                request.num_computed + 2 - request.placeholders >= request.num_prompt_tokens + request.max_tokens
            ):
                continue
            count = self._chunk(request.num_tokens + request.placeholders - request.num_computed, left)
            if not count:
                continue
            while (new := self.pool.allocate(request, (), request.num_computed + count)) is None:
                preempted, victim = True, self.running.pop()
                self.preempt(victim)
                if victim is request:
                    break
            if new is None:
                break
            schedule(request, count, new, False)
            left -= count
        if self.admits and not preempted:
            self._admit(left, schedule)
        return scheduled, progress

    def _admit(self, left: int, schedule: Callable[[Request, int, Sequence[int], bool], None]) -> None:
        skipped: deque[Request] = deque()
        while (queue := self._next_queue()) and left:
            request = queue[0]
            if request.status is Status.REMOTE and not self._promote(request):
                skipped.appendleft(queue.popleft())
                continue
            hits: list[int] = []
            num_external, is_async = 0, False
            num_computed = request.num_computed
            if not num_computed:
                hits = self.pool.hits(request)
                num_local = len(hits) * self.kind.shape.block_size
                found, is_async = self.handover.matched(request, num_local)
                if found is None:
                    skipped.appendleft(queue.popleft())
                    continue
                num_external = found
                num_computed = num_local + num_external
                assert num_computed <= request.num_tokens
            count = 0 if is_async else self._chunk(request.num_tokens - num_computed, left)
            # As vLLM's scheduler_reserve_full_isl: a request that cannot finish would be preempted for ever.
            if not self.pool.fits(request, hits, request.num_tokens):
                break
            if self.pool.allocate(request, hits, num_computed + count) is None:
                break
            self.handover.allocated(request, (self.pool.tables[request.request_id],), num_external)
            queue.popleft()
            request.num_computed = num_computed
            if is_async:
                assert num_external > 0
                request.status, request.num_external = Status.REMOTE, num_external
                skipped.appendleft(request)
                continue
            assert count > 0
            request.status = Status.RUNNING
            self.running.append(request)
            schedule(request, count, self.pool.tables[request.request_id], True)
            left -= count
        self.skipped.extendleft(reversed(skipped))

    def _chunk(self, num_tokens: int, left: int) -> int:
        return min(num_tokens, left, self.chunk_tokens or left)

    def _next_queue(self) -> deque[Request]:
        if not self.kind.goes_by_priority:
            return self.skipped or self.waiting
        for queue in (self.skipped, self.waiting):
            ordered = sorted(queue, key=lambda one: one.priority)
            queue.clear()
            queue.extend(ordered)
        heads = [queue for queue in (self.skipped, self.waiting) if queue]
        return min(heads, key=lambda queue: queue[0].priority, default=self.waiting)

    def _promote(self, request: Request) -> bool:
        name = request.request_id
        if name not in self.finished_receiving:
            return False
        self.finished_receiving.remove(name)
        if name in self._failed_receiving:
            self._failed_receiving.remove(name)
            assert not request.num_computed
            self.pool.empty(request)
            request.num_external = 0
        else:
            expected = self._sums(request, request.num_computed)
            for worker in self.workers:
                wrong = worker.memory.wrong(self.pool.tables[name], expected, request.num_computed)
                assert not wrong, f"{name} goes on with wrong bytes of the tokens {wrong}"
            self.pool.cache(request, request.num_computed)
            request.num_computed = min(request.num_computed, request.num_tokens - 1)
        request.status = Status.WAITING
        return True

    def preempt(self, request: Request) -> None:
        """Preempts a request that the caller has removed from ``running``."""
        self.handover.offering.preempted(request.request_id)
        self.pool.empty(request)
        request.status, request.num_computed, request.placeholders = Status.PREEMPTED, 0, 0
        request.epoch += 1
        self.waiting.appendleft(request)

    # ------------------------------------------------------------------------------------------------- workers

    def _execute(self, step: Step, scheduled: list[Scheduled]) -> Output:
        output = Output(scheduled, [])
        for worker in self.workers:
            side = worker.side
            side.begin_step(step)
            if scheduled:
                worker.device.give(self._work(worker, scheduled))
                side.end_step()
            output.sent.append(side.take_sent())
            output.report.add(pickle.loads(pickle.dumps(side.take_report())) or Report())
            counted = side.take_counted()
            output.timelines += counted.timelines
            self.lasted += counted.lasted
            self.failures += counted.failures
            self.revoked += counted.revoked
            if counted.quarantined_blocks is not None:
                self.quarantined = counted.quarantined_blocks
            output.marks.append(worker.device.given)
        return output

    def _work(self, worker: Worker, scheduled: list[Scheduled]) -> Callable[[], None]:
        # With the weights of now, whenever the device does it.
        computed = [(one, self._sums(one.request, one.end), one.request.is_mixed) for one in scheduled]

        def work() -> None:
            for one, sums, is_mixed in computed:
                request = one.request
                is_checked = one.begin and not is_mixed
                if request.epoch == one.epoch and not request.status.is_finished and is_checked:
                    wrong = worker.memory.wrong(one.blocks, sums, one.begin)
                    assert not wrong, f"{request.request_id} computes on wrong bytes of the tokens {wrong}"
                worker.memory.fill(one.blocks, sums, one.begin, one.end)

        return work

    def _sums(self, request: Request, end: int) -> Cells:
        """Returns what the cells of a request's first tokens follow from: the tokens, and what computes them."""
        content = f"{self.weights.memory.content} {self._adapter(request.adapter)}"
        content = request.request_id if request.is_mixed else content
        return request.sums(end) ^ np.uint64(zlib.crc32(content.encode()))

    def _adapter(self, number: int) -> str:
        return f"{number} {self.reloaded[number]}" if number else ""

    def _sum_up(self, counts: Counter[str], said: list[set[str]]) -> set[str]:
        """Returns the names that every rank has reported by now, and counts the others."""
        for names in said:
            counts.update(names)
        found = Names(name for name, count in counts.items() if count == len(self.workers))
        for name in found:
            del counts[name]
        return found

    def introduce(self) -> None:
        """Tells peers what the workers have said."""
        self.handover.side_channel.introduce(self._envelopes(), self._listen)

    def update(self, weights: Weights, *, is_known: bool = True) -> None:
        """Changes the engine's weights between two steps.

        Args:
            is_known: the call that changes them is one the package knows. Otherwise only the workers' new identities
                show the change.
        """
        is_other, self.weights = weights != self.weights, weights
        if is_known:
            self.handover.revocations.weights_changed()
        for worker in self.workers:
            worker.side.identify(weights)
        self.introduce()
        self._mix(self.requests.values() if is_known or is_other else ())

    def load_again(self, adapter: int) -> None:
        """Loads another adapter under this one's number and name, between two steps."""
        self.reloaded[adapter] += 1
        self.handover.revocations.adapters_changed(adapter)
        self._mix(one for one in self.requests.values() if one.adapter == adapter)

    def _mix(self, requests: Iterable[Request]) -> None:
        for one in requests:
            one.is_mixed |= bool(self.pool.tables.get(one.request_id))

    def _envelopes(self) -> dict[tuple[int, int], Any]:
        """As vLLM collects them: by pipeline stage and rank."""
        return {(worker.pp_rank, worker.tp_rank): worker.envelope for worker in self.workers}

    def _listen(self, answers: Answers) -> Listening:
        listening = Listening(self)
        listening.answer(answers)
        return listening

    # -------------------------------------------------------------------------------------------------- outputs

    def _update(self, output: Output) -> None:
        sent = self._sum_up(self.reported, output.sent)
        reports = Reports(sent, report=output.report, timelines=output.timelines)
        self.handover.collect(reports)
        self.lasted += reports.lasted
        ended = {name for name, _ in reports.refused}
        assert reports.invalid <= {FAILING}
        sent = {name for name in reports.sent if name in self.requests}
        received = {name for name in reports.received if name in self.requests}
        failed: set[str] = set()
        if reports.invalid:
            failed = self._let_load_fail(self.handover.take_failed())
        for one in output.scheduled:
            self._take_token(one)
        self._finish([self.requests[name] for name in sorted(failed)], Status.ERROR)
        told = self.handover.engine.failures.take_ended()
        assert failed | ended <= told.keys(), "a client hears of a failure and not which"
        for name in sorted(received):
            request = self.requests[name]
            if request.status is Status.REMOTE:
                self.finished_receiving.add(name)
            else:
                assert request.status.is_finished, f"{name} is {request.status} and was received"
                self._free_blocks(request)
        for name in sorted(sent):
            assert self.requests[name].status.is_finished, f"{name} is still computed and was sent"
            self._free_blocks(self.requests[name])
        self._finish([self.requests[name] for name in reports.ending if name in self.requests], Status.ERROR)
        # As `adapter.queues.bring_forward`.
        forward = [one for one in self.skipped if one.request_id in received]
        self.skipped = deque([*forward, *(one for one in self.skipped if one not in forward)])
        for request in forward if self.kind.goes_by_priority else ():
            request.priority = float("-inf")

    def lose(self, request_id: str, recomputes: bool) -> int | None:
        request = self.requests[request_id]
        request.num_computed = 0
        if recomputes:
            self._failed_receiving.add(request_id)
            return None
        self._finish([request], Status.ERROR)
        return 0

    def head(self) -> Request | None:
        waiting = (one for one in self._startable if one.status in (Status.WAITING, Status.PREEMPTED))
        return next(waiting, None) if self.admits else None

    @property
    def _startable(self) -> list[Request]:
        found = [] if self.is_paused else [*self.skipped, *self.waiting]
        if self.kind.goes_by_priority:
            found.sort(key=lambda one: one.priority)
        return [one for one in found if not self.handover.holds_back(one.request_id)]

    def next_up(self) -> list[str]:
        waiting = [one.request_id for one in self._startable if one.status in (Status.WAITING, Status.PREEMPTED)]
        return waiting if self.admits and not self.running else []

    def _let_load_fail(self, names: set[str]) -> set[str]:
        ours = {name for name in names if name in self.requests}
        for name in ours:
            assert self.requests[name].status is Status.REMOTE or self.requests[name].status.is_finished
            self.requests[name].num_computed = 0
        again = {name for name in sorted(ours) if self.handover.asking.may_ask_again(name) or self.kind.recomputes}
        self._failed_receiving |= again
        return {name for name in ours - again if not self.requests[name].status.is_finished}

    def _take_token(self, one: Scheduled) -> None:
        request = one.request
        if request.status.is_finished or self.requests.get(request.request_id) is not request or not one.samples:
            return
        is_stale = request.epoch != one.epoch
        if is_stale and not (
            self.kind.keeps_stale_output and request.status is Status.PREEMPTED and one.end == request.num_tokens
        ):
            return
        request.placeholders -= not is_stale
        request.num_tokens += 1
        self.handover.answered([request.request_id])
        if request.is_over:
            self._unqueue(request)
            request.status = Status.STOPPED
            self._free_request(request, False)

    def _unqueue(self, request: Request) -> None:
        if self.held.pop(request.request_id, None) is None:
            next(queue for queue in (self.running, self.waiting, self.skipped) if request in queue).remove(request)

    def _finish(self, requests: list[Request], status: Status) -> None:
        for request in requests:
            if request.status.is_finished:
                continue
            self._unqueue(request)
            is_delayed = False
            if request.status is Status.REMOTE:
                is_delayed = request.request_id not in self.finished_receiving
                self.finished_receiving.discard(request.request_id)
                self._failed_receiving.discard(request.request_id)
            request.status = status
            self._free_request(request, is_delayed)

    def _free_request(self, request: Request, is_delayed: bool) -> None:
        blocks = (list(self.pool.tables.get(request.request_id, [])),)
        is_kept, answer = self.handover.finished(request, request.status is Status.STOPPED, blocks)
        request.answer = answer
        self._finished_ids = True
        if not (is_kept or is_delayed):
            self._free_blocks(request)

    def _free_blocks(self, request: Request) -> None:
        assert request.status.is_finished
        self.pool.empty(request)
        del self.requests[request.request_id]
