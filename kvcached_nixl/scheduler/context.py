# SPDX-License-Identifier: Apache-2.0
"""What the parts of this folder share of their engine: its settings, its blocks, the step that is being built for its
workers, how to wake it, and what becomes of its hand-overs, for the metrics, traces, the log and clients. One per
engine, used on its thread only, except `EngineContext.woken`.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.settings import SERVER_LOGGER, Settings
from kvcached_nixl.wire.causes import FAILED, STARVED, FailureCause, HandOverFailed
from kvcached_nixl.wire.manifest import KVGroups
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.step import BlockIds, Step, WakeAddress, report_numbers
from kvcached_nixl.wire.timeline import Lasted, State, Timeline

if TYPE_CHECKING:
    from kvcached_nixl.vllm.adapter.requests import RequestReader, RequestView
    from kvcached_nixl.vllm.adapter.tracing import EngineSpans
    from kvcached_nixl.vllm.patches.engine_blocks import EngineBlocks

logger = logging.getLogger(SERVER_LOGGER)

ANY_ADAPTER = -1
"""In place of a LoRA adapter's number: any adapter."""


def is_meant(adapter: int | None, used: int) -> bool:
    """Whether a selection covers what was computed with the adapter ``used`` (0 for none). ``adapter`` selects one
    adapter by its number, any adapter (``ANY_ADAPTER``), or everything (None)."""
    return adapter is None or (bool(used) and adapter in (used, ANY_ADAPTER))


class Progress(NamedTuple):
    """A request in a step: its blocks in addition to (``replaces``: instead of) the earlier ones, and its number of
    computed tokens when the step has ended (``num_computed_tokens``) and when it begins (``begin_token``)."""

    request_id: str
    block_ids: BlockIds
    replaces: bool
    num_computed_tokens: int
    begin_token: int = 0


@dataclass(frozen=True, kw_only=True)
class StockScheduler:
    """What this package takes from vLLM for the scheduler half of a NIXL connector.

    Attributes:
        window_kinds: KV-cache groups whose blocks leave a window while a request is computed, by the class names of
            their specs.
        output_checks: settings with which vLLM may refuse a step's output when the workers have saved its KV.
        zeroes_blocks: vLLM zeroes new blocks on the device at the beginning of a step, because what is behind a
            request's last token is read, too.
        recomputes: a request that received no KV is recomputed instead of failing (``kv_load_failure_policy``).
        max_num_batched_tokens: also how much prefill keeps of what decode leaves waiting, before it begins prompts that
            decode has not registered for (push), or offers what is cached.
        is_consumer, is_producer: whether the engine may fetch KV, and others from it (``kv_role``).
        spans: makes spans of hand-overs; None where nothing is traced.
        extra_config: ``kv_connector_extra_config``.
    """

    engine_id: str
    tp_size: int
    pp_size: int
    groups: KVGroups
    window_kinds: list[str]
    output_checks: list[str]
    zeroes_blocks: bool
    recomputes: bool
    max_num_batched_tokens: int
    is_consumer: bool
    is_producer: bool
    reader: RequestReader
    spans: EngineSpans | None
    extra_config: Mapping[str, Any]


class Holds:
    """Blocks taken from their requests, unknown to vLLM, held while transfers may use them (rules R2 and R9)."""

    def __init__(self, engine: EngineContext) -> None:
        self._engine = engine
        self._held: dict[int, list[Any]] = {}
        self._numbers = report_numbers()
        self.num_blocks = 0

    def take(self, request_id: str, number: int | None = None) -> int:
        """Takes all blocks from a request and holds them. Returns the number of the hold."""
        number = next(self._numbers) if number is None else number
        self._held[number] = self._engine.blocks.take(request_id)
        self.num_blocks += len(self._held[number])
        return number

    def give_back(self, number: int) -> None:
        """Frees the blocks of a hold, if there is such a hold: no transfer uses them any more."""
        held = self._held.pop(number, None)
        if held is not None:
            self.num_blocks -= len(held)
            self._engine.blocks.give_back(held)


class AllRanks:
    """Numbers that not every rank has reported yet. What frees blocks counts when every one has."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks: dict[int, set[int]] = {}

    def take(self, reported: Iterable[tuple[int, int]]) -> list[int]:
        """Takes (number, rank) pairs, and returns the numbers that every rank has reported now."""
        found = []
        for number, rank in reported:
            ranks = self._ranks.setdefault(number, set())
            ranks.add(rank)
            if len(ranks) == self._num_ranks:
                del self._ranks[number]
                found.append(number)
        return found


@dataclass
class _Followed:
    """A request's hand-over: its ``trace``, "" for none; the timeline of the rank of decode that ended last; and the
    ``cause`` of its failure, "" for none."""

    timeline: Timeline
    trace: str
    slowest: Timeline | None = None
    cause: str = ""


class Timelines:
    """A timeline begins here with a request's arrival, and ends here. What a rank does in between is in its own
    timeline; of decode's ranks the slowest one counts, because the request waits for it.

    Attributes:
        unanswered: hand-overs of decode that vLLM has not answered with a token yet.
        lasted: for the metrics, since `take_lasted` was last called.
    """

    def __init__(self, clock: Clock, spans: EngineSpans | None, *, is_push: bool) -> None:
        self._clock = clock
        self._spans = spans
        self._is_push = is_push
        self._followed: dict[str, _Followed] = {}
        self.unanswered: set[str] = set()
        self.lasted: list[Lasted] = []

    def begin(self, request: RequestView, state: State) -> None:
        """A request has arrived that hands over, or is handed over to; or decode has asked for it."""
        request_id = request.request_id
        if request_id not in self._followed:
            trace = "" if self._spans is None else self._spans.trace_of(request)
            self._followed[request_id] = _Followed(Timeline(), trace)
        self.enter(request_id, state)
        if state is State.DECODE_QUEUED:
            self.unanswered.add(request_id)

    def enter(self, request_id: str, state: State) -> None:
        """A hand-over is in another state; ignored if it is not followed (any more)."""
        followed = self._followed.get(request_id)
        if followed is not None:
            self._take_in(followed)
            followed.timeline.enter(state, self._clock.now_seconds())

    def trace_of(self, request_id: str) -> str:
        """The trace that a hand-over belongs to; "" if it is not traced."""
        followed = self._followed.get(request_id)
        return "" if followed is None else followed.trace

    def failed(self, request_id: str, cause: FailureCause) -> None:
        """A hand-over of decode brings no KV."""
        followed = self._followed.get(request_id)
        if followed is not None:
            followed.cause = followed.cause or cause.label
            self.enter(request_id, State.DECODE_FAILED)

    def computed(self, request_ids: Iterable[str]) -> None:
        for request_id in self.unanswered.intersection(request_ids) if self.unanswered else ():
            followed = self._followed[request_id]
            if followed.timeline.state is not State.DECODE_FAILED:
                followed.timeline.enter(State.DECODE_FIRST_TOKEN, self._clock.now_seconds())

    def answered(self, request_ids: Iterable[str]) -> None:
        """Requests have got a token: hand-overs of decode end with the first one."""
        for request_id in self.unanswered.intersection(request_ids):
            self.end(request_id)

    def end(self, request_id: str) -> None:
        """A hand-over has ended here, or its request has; ignored if it is not followed (any more)."""
        followed = self._followed.pop(request_id, None)
        self.unanswered.discard(request_id)
        if followed is None:
            return
        self._take_in(followed)
        followed.timeline.end(self._clock.now_seconds())
        attributes = {"kvcached_nixl.request_id": request_id}
        if followed.cause:
            attributes["kvcached_nixl.cause"] = followed.cause
        self.add(followed.trace, followed.timeline, attributes)

    def rank_ended(self, request_id: str, timeline: Timeline) -> None:
        """A rank of decode has ended its part of a hand-over."""
        followed = self._followed.get(request_id)
        if followed is not None and _end_of(followed.slowest) <= _end_of(timeline):
            followed.slowest = timeline

    def take_lasted(self) -> list[Lasted]:
        lasted, self.lasted = self.lasted, []
        return lasted

    def _take_in(self, followed: _Followed) -> None:
        slowest, followed.slowest = followed.slowest, None
        if slowest is not None and followed.timeline.state is State.DECODE_REPORTING:
            followed.timeline.take_in(slowest.marks, _end_of(slowest))

    def add(self, trace: str, timeline: Timeline, attributes: dict[str, str]) -> None:
        """A timeline has ended, here or on a worker."""
        self.lasted += [(int(state), self._is_push, seconds) for state, seconds in timeline.lasted().items()]
        if trace and self._spans is not None:
            attributes["kvcached_nixl.direction"] = "push" if self._is_push else "pull"
            self._spans.add(trace, timeline, attributes)


def _end_of(timeline: Timeline | None) -> float:
    return float("-inf") if timeline is None or timeline.end_seconds is None else timeline.end_seconds


MOST_FAILED_SESSIONS = 1024


class Failures:
    """Why hand-overs brought no KV: counted, logged once, and told to the client under the same label, the latter two
    with `HandOverFailed.tags`. A worker's reason is in the log line only: it may name hosts and ports.

    Attributes:
        counts: failures by `FailureCause` since the last step; `SchedulerFacade.take_step` copies and clears them.
        sessions: ids of streaming sessions that were ended before their last input, the latest of them. Their clients
            may have sent more input, and nothing tells that from the first input of another session.
    """

    def __init__(self, timelines: Timelines) -> None:
        self._timelines = timelines
        self.counts: Counter[int] = Counter()
        self.sessions: deque[str] = deque(maxlen=MOST_FAILED_SESSIONS)
        self._told: dict[str, str] = {}
        self._ended: dict[str, str] = {}

    def not_received(
        self, request_id: str, failure: HandOverFailed, *, attempt: int | None = None, prefill_request_id: str = ""
    ) -> None:
        """Decode: a request does not get its KV. It fails, or is recomputed here."""
        self._timelines.failed(request_id, failure.cause)
        tags = failure.tags(request_id, attempt=attempt, prefill_request_id=prefill_request_id)
        self.counts[failure.cause] += 1
        self._told[request_id] = f"{FAILED}{tags}"
        logger.warning("%s%s: %s", FAILED, tags, failure)

    def starved(self, request_id: str, failure: HandOverFailed) -> None:
        """A request ends because it never gets blocks, whether it is a hand-over or not."""
        self._timelines.failed(request_id, failure.cause)
        self.counts[failure.cause] += 1
        told = self._told[request_id] = f"{STARVED}{failure.tags(request_id)}: {failure}"
        logger.warning("%s", told)

    def not_offered(self, request_id: str, failure: HandOverFailed) -> None:
        """Prefill: a request's KV is not offered to decode. The request is computed all the same."""
        self.counts[failure.cause] += 1
        logger.warning("KV is not offered: %s: %s", failure.tags(prefill_request_id=request_id), failure)

    def computed(self, request_id: str) -> None:
        self._told.pop(request_id, None)

    def request_ended(self, request_id: str) -> None:
        """A request has ended. If its hand-over had failed, or it has starved, its client is to be told."""
        told = self._told.pop(request_id, None)
        if told is not None:
            self._ended[request_id] = told

    def take_ended(self) -> dict[str, str]:
        """Requests that ended without KV since the last call -> the message for their clients."""
        ended, self._ended = self._ended, {}
        return ended


class EngineContext:
    """See the module.

    Args:
        own: what a peer needs to find this engine's ranks.
        incarnation: 16 hexadecimal digits, drawn when this engine starts, and again when its weights change.
        wake_address: where the side channel listens for this engine's own workers, and the key that they send.

    Attributes:
        awaits_outputs: in push, KV of a step is offered only when vLLM has taken its output: vLLM may still refuse it.
        allocation_seconds: how long a request waits for blocks while nothing is under way that frees some.
        step: being built. It is told to the workers with the next step of the engine.
        has_news: the engine has to step soon, whatever ``step`` holds.
        refused: as in `Reports`: their clients are told with the next step.
        blocks: the engine's KV-cache blocks, once it ``is_bound``: a request has entered the engine.
        knows_weights: what its workers compute with now has been read.
    """

    blocks: EngineBlocks

    def __init__(
        self,
        stock: StockScheduler,
        settings: Settings,
        own: RemotePrefill,
        incarnation: str,
        wake_address: WakeAddress,
        clock: Clock,
    ) -> None:
        self.stock, self.settings, self.clock = stock, settings, clock
        self.own, self.incarnation, self.wake_address = own, incarnation, wake_address
        self.groups, self.is_push = stock.groups, settings.transfer_mode.is_push
        self.awaits_outputs = self.is_push and bool(stock.output_checks)
        self.allocation_seconds = settings.allocation_timeout_seconds or settings.handover_timeout_seconds / 2
        self.holds = Holds(self)
        self.timelines = Timelines(clock, stock.spans, is_push=self.is_push)
        self.failures = Failures(self.timelines)
        self.has_news, self.is_bound, self.knows_weights = False, False, True
        self.refused: list[tuple[str, int]] = []
        self.step = self._new_step()
        self._wake: Callable[[], None] | None = None

    def bind(self, blocks: EngineBlocks) -> None:
        """Sets ``blocks``; called before the first request. Idempotent: the first call counts."""
        if not self.is_bound:
            self.blocks, self.is_bound = blocks, True

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """Sets the function that wakes the engine; it may be called from any thread."""
        self._wake = wake

    def woken(self) -> None:
        """A worker has something to report: makes the engine step. May be called from any thread."""
        self.has_news = True
        if self._wake is not None:
            self._wake()

    def take_step(self) -> Step:
        self.has_news = False
        step, self.step = self.step, self._new_step()
        return step

    def _new_step(self) -> Step:
        return Step(self.own.host, self.own.port, self.wake_address, self.incarnation)
