# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of hand-overs: decode's half and prefill's half, between vLLM's scheduler and the workers.

One per engine, used on the engine's thread only. Changes go to the workers with the next step, and the workers' reports
come back with a step's output. Between steps the engine sleeps until a worker reports something.

`PrefillOffers` and `KeptOffers` are prefill's half, `DecodeFetches` and `FailedFetches` decode's. What vLLM calls for
each request and step is here; what happens to the whole engine is in `Revocations` and `OwnSideChannel`.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from kvcached_nixl.deadlines import Clock, earliest
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.scheduler.asking.asker import Asker
from kvcached_nixl.scheduler.asking.asking import Asking
from kvcached_nixl.scheduler.asking.local import BreakEven, LocalPrefills
from kvcached_nixl.scheduler.asking.resolver import Resolver
from kvcached_nixl.scheduler.asking.servers import Servers
from kvcached_nixl.scheduler.asking.settings import AskSettings
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.scheduler.engine import BlockPool, Progress, Reader, Request
from kvcached_nixl.scheduler.engine_link import EngineLink
from kvcached_nixl.scheduler.failures import FailedFetches, Failures
from kvcached_nixl.scheduler.fetch_attempts import FetchAttempts
from kvcached_nixl.scheduler.fetch_request import filled_in_part
from kvcached_nixl.scheduler.giving_way import GivingWay
from kvcached_nixl.scheduler.holds import Holds
from kvcached_nixl.scheduler.kept_offers import KeptOffers
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.scheduler.revocations import Revocations
from kvcached_nixl.scheduler.side_channel import OwnSideChannel
from kvcached_nixl.scheduler.start_gate import StartGate
from kvcached_nixl.scheduler.starvation import Starvation
from kvcached_nixl.scheduler.terms import Terms
from kvcached_nixl.scheduler.timelines import Spans, Timelines
from kvcached_nixl.scheduler.worker_reports import WorkerReports
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.params import CACHED_TOKENS_KEY, HAS_CLIENTS_KEY, HEADROOM_KEY, RemotePrefill
from kvcached_nixl.wire.step import BlockIds, FetchSpec, Reports, Step, WakeAddress

__all__ = ["SchedulerFacade"]

logger = logging.getLogger(SERVER_LOGGER)


class SchedulerFacade:
    """What the patches in `vllm.patches` call in the engine core; see the module's docstring.

    Args:
        own: what a peer needs to find this engine's ranks.
        incarnation: 16 hexadecimal digits, drawn when this engine starts, and again whenever its weights change.
        read: wraps vLLM's requests.
        wake_address: where the side channel listens for this engine's own workers, and the key that they send.
        spans: makes spans of hand-overs; None if nothing is traced.
        asks: whom this engine asks for KV; None if a router does that.
        asker: sends the questions.

    Attributes:
        revocations: what takes hand-overs back.
        side_channel: where peers and this engine's workers reach it.
        keeps_states: some layers keep a state, so prefill has to stop one token before the end of a prompt.
        timelines: of the hand-overs.
        asking: asks prefill servers for KV; None if a router does that.
        num_miscounted_tokens: of prompts that must be computed here, and that vLLM counts as missed.
    """

    def __init__(
        self,
        own: RemotePrefill,
        incarnation: str,
        wake_address: WakeAddress,
        terms: Terms,
        clock: Clock,
        read: Reader,
        spans: Spans | None = None,
        asks: AskSettings | None = None,
        asker: Callable[[str, Callable[[], None]], Asker] = Asker,
    ) -> None:
        self.own = own
        self.read = read
        self.wake_address = wake_address
        self._terms = terms
        self.keeps_states = terms.groups.have_states
        self._clock = clock
        self._link = EngineLink(own, incarnation, wake_address)
        self._holds = Holds()
        self._failures = Failures()
        self.timelines = Timelines(clock, spans, is_push=terms.mode.is_push)
        self._attempts = FetchAttempts(self._holds, clock, terms.timeout_seconds)
        self._failed_fetches = FailedFetches(terms, self._failures, self.timelines)
        self._fetching = DecodeFetches(terms, self._attempts, self._failed_fetches, self.timelines)
        self._kept = KeptOffers(terms, clock, self._holds)
        self._offering = PrefillOffers(
            *(own, incarnation, terms, self._kept, self._holds, self._failures), self.timelines
        )
        self._gate = StartGate(clock, terms.allocation_seconds)
        # `KeptOffers.is_left_waiting`, once it was looked up for the step being built.
        self._is_left_waiting: bool | None = None
        self._starvation = Starvation(clock, terms, self._failures, self.timelines)
        self._giving_way = GivingWay(clock, terms, self._offering, self._fetching)
        self.asking = None if asks is None else self._build_asking(asks, asker)
        figures = None if self.asking is None else self.asking.figures
        self._reports = WorkerReports(
            *(own.tp_size, self._fetching, self._offering), self._gate, self._giving_way, self.timelines
        )
        self.revocations = Revocations(self._link, clock, read, self._holds, self._offering, self._fetching)
        self.side_channel = OwnSideChannel(
            *(self._link, clock, terms.groups.tokens_per_block, self._offering, self._fetching),
            *(self.revocations, figures),
        )
        self._accepts_params = asks is None or asks.accepts_params
        self._reported_quarantine = 0
        self._failed: set[str] = set()
        self._refused: list[tuple[str, int]] = []
        self._calls = deque[Callable[[], None]]()
        # Whom to tell when a step has ended, for the next one, and for those that the workers have.
        self._telling: list[Callable[[], None]] = []
        self._told = deque[list[Callable[[], None]]]()
        self.num_miscounted_tokens = 0

    def _build_asking(self, asks: AskSettings, asker: Callable[[str, Callable[[], None]], Asker]) -> Asking:
        # Where layers keep states, a block of theirs may be as long as the longest request.
        block_tokens = min(one.block_size for one in self._terms.groups.all)
        most_tokens = self._terms.most_unclaimed_tokens
        return Asking(
            Servers(asks.servers, self._clock, self._terms.timeout_seconds, block_tokens),
            asker(asks.api_key, self._link.woken),
            Resolver(asks.servers, self._link.woken),
            self._fetching,
            self._clock,
            self.own.engine_id,
            LocalPrefills(most_tokens // 4, BreakEven(self._clock, most_tokens, asks.max_local_prefill_tokens)),
            self.timelines,
            block_tokens,
            # Two that ask each other would wait for the blocks that they keep for each other.
            pushes=self._terms.mode.is_push and not asks.is_asked,
            recomputes=self._terms.recomputes,
            is_required=asks.is_required,
            queue_seconds=asks.queue_seconds,
        )

    @property
    def incarnation(self) -> str:
        """Drawn when this engine started, and again whenever its weights have changed."""
        return self._link.incarnation

    # ------------------------------------------------------------------------------------------------ the engine's loop

    def bind(self, blocks: BlockPool) -> None:
        """Sets the engine's KV-cache blocks; called before the first request. Idempotent: the first call counts."""
        self._link.bind(blocks)

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """Sets the function that wakes the engine; it may be called from any thread."""
        self._link.bind_wake(wake)

    def close(self) -> None:
        """Stops the side channel, and asking; called when the engine shuts down."""
        self.side_channel.close()
        if self.asking is not None:
            self.asking.close()

    def relieve(self) -> bool:
        """Tells neighbours what this engine waits for, and takes back offers that nobody fetches, if memory is short.
        Looks four times a second, however often it is called.

        Returns: whether the engine has to step.
        """
        if self._link.blocks is None:
            return False
        self._link.has_news |= self._giving_way.turn(self._link.blocks, self._link.step)
        return self._link.has_news or self._link.step.has_news

    def call_soon(self, call: Callable[[], None]) -> None:
        """Has something called on the engine's thread, between two steps. May be called from any thread."""
        self._calls.append(call)
        self._link.woken()

    def run_calls(self) -> None:
        """Calls what `call_soon` was given. Called between two steps."""
        while self._calls:
            self._calls.popleft()()

    # -------------------------------------------------------------------------------------------------- pending work

    @property
    def pending(self) -> bool:
        """Whether the engine has to step with nothing to compute: workers have reports, or have to be told of changes.

        vllm#45168: an engine that sleeps takes no reports and frees no blocks.
        """
        return bool(
            self._link.has_news
            or self._link.step.has_news
            or self._calls
            or any(self._told)
            or self._giving_way.owes
            or self._refused
            or (self.asking is not None and self.asking.has_news)
            or self._failed_fetches.has_news
            or self._starvation.has_news
            or (self._link.blocks is not None and self._link.blocks.is_copied)
            or self.num_quarantined_blocks != self._reported_quarantine
            or self.due_in_seconds == 0
        )

    @property
    def num_waiting(self) -> int:
        """Requests that have their blocks and wait only for KV."""
        return self._fetching.num_waiting

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks held for requests that ended without KV, because a peer may still write them."""
        return self._attempts.num_quarantined_blocks

    @property
    def num_held_blocks(self) -> int:
        """Blocks taken from their requests, and held while transfers may use them."""
        return self._holds.num_blocks

    @property
    def watches_memory(self) -> bool:
        """Whether `relieve` has to be called while the engine rests."""
        return self._link.blocks is not None and self._giving_way.watches(self._link.blocks)

    @property
    def num_kept(self) -> int:
        """Requests that have ended, and whose blocks vLLM keeps because decode may fetch them."""
        return self._kept.num_kept

    @property
    def due_in_seconds(self) -> float | None:
        """Seconds until the next hand-over times out, the next offer is revoked, or a request has starved; None if
        there is none."""
        due_at = earliest(
            *(self._fetching.due_at_seconds, self._kept.due_at_seconds),
            *(self._gate.due_at_seconds, self._starvation.due_at_seconds),
            None if self.asking is None else self.asking.due_at_seconds,
        )
        return None if due_at is None else max(0.0, due_at - self._clock.now_seconds())

    # ---------------------------------------------------------------------------------------------- called from vLLM

    def arrived(self, request: Request, *, may_hold: bool = True) -> bool:
        """A request has entered the engine. Returns whether it is to be held: a prefill server is asked for its KV."""
        self.outdate_renamed()
        if not self._accepts_params:
            request.refuse_prefill()
        self._fetching.arrived(request, self._link.step)
        self._offering.arrived(request, self._link.step)
        return may_hold and self.asking is not None and self.asking.arrived(request, self._link.bound())

    def outdate_renamed(self) -> None:
        """Nobody finds KV in the prefix cache any more of an adapter whose name another one has got."""
        if names := self.read.take_renamed():
            self.revocations.renamed(names)

    def ask(self) -> bool:
        """Asks prefill servers, and lets requests begin that they have answered. Called before each step.

        Returns: whether any may begin that could not before.
        """
        blocks = self._link.blocks
        if self.asking is None or blocks is None:
            return False
        may_ask = blocks.admits and not self._giving_way.yields
        return self.asking.turn(blocks, self._link.step, may_ask=may_ask)

    def refuse(self, request_id: str, client_index: int) -> None:
        """A request has arrived under the id of another one, which goes on. Its client is told with the next step."""
        self._refused.append((request_id, client_index))
        logger.error(
            "A request has arrived under the id %s of another request, which still runs here or whose blocks are kept "
            "for decode; expected an unused id. It fails, and the other one goes on. Let vLLM make the engine's ids "
            "(AsyncLLM, LLM), and add no request twice.",
            request_id,
        )

    def take_refused(self) -> list[tuple[str, int]]:
        """(id, client index) of each request that was refused, or ended between two steps, since the last call."""
        refused, self._refused = self._refused + self._failed_fetches.take_ended(), []
        return refused

    def matched(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens prefill has beyond those decode has, and whether they load asynchronously.

        None: the request may not begin yet; ask again (`StartGate`, `GivingWay.yields`).
        """
        if self._yields(request.request_id):
            return None, False
        if self._terms.mode.is_push and not self._offering.has_begun(request.request_id):
            if self._is_left_waiting is None:
                self._is_left_waiting = self._kept.is_left_waiting
            request_id = PrefillRequestId(request.request_id)
            if not self._gate.may_start(request_id, self._link.step, needs_claim=self._is_left_waiting):
                return None, False
        if self.asking is not None and self.asking.holds_again(request, self._link.step):
            return None, False
        is_producer = self._link.bound().is_producer
        return self._fetching.matched(request, num_computed_tokens, self._link.step, is_producer=is_producer)

    def holds_back(self, request_id: str) -> bool:
        """Whether a request would not begin whatever blocks are free: see `matched`."""
        return self._gate.holds(request_id) or self._yields(request_id)

    def _yields(self, request_id: str) -> bool:
        return self._fetching.needs_others(request_id) and self._giving_way.yields

    def allocated(self, request: Request, block_ids: BlockIds, num_external_tokens: int) -> None:
        """A request was given blocks; on decode, for its whole prompt."""
        if self.asking is not None:
            self.asking.allocated(request.request_id)
        self._fetching.allocated(request, block_ids, num_external_tokens, self._link.step)

    @property
    def awaits_tokens(self) -> bool:
        """Whether `answered` has to be called."""
        return self.timelines.awaits_tokens or (self.asking is not None and self.asking.local.break_even.awaits_tokens)

    def answered(self, request_ids: Collection[str]) -> None:
        """Requests have got a token."""
        self.timelines.answered(request_ids)
        if self.asking is not None:
            self.asking.local.break_even.answered(request_ids)

    @property
    def offers_cached(self) -> bool:
        """Whether what is cached may be kept for a peer that asks for it: none have left enough waiting here, and no
        load of another connector, under way into cached blocks, may yet fail."""
        is_short = self._giving_way.yields or self._kept.is_left_waiting
        return not (is_short or self._link.bound().are_shared)

    def offer_cached(
        self, request: Request, num_tokens: int, block_ids: BlockIds, told: Callable[[Mapping[str, Any]], None]
    ) -> bool:
        """Offers a prompt's beginning, which is cached. Returns whether it can, so that vLLM must keep these blocks
        until `collect` reports the request as sent.

        Args:
            told: called with the ``kv_transfer_params`` for the peer when the step has ended that tells the workers. So
                has the one before, which may compute these blocks: vLLM caches them when it schedules that.
        """
        params = self._offering.offer_cached(request, num_tokens, block_ids, self._link.bound(), self._link.step)
        if params is not None:
            self._telling.append(functools.partial(told, self.look_up(num_tokens) | params))
        return params is not None

    def look_up(self, num_cached_tokens: int) -> dict[str, Any]:
        """The ``kv_transfer_params`` for a peer that asks how many tokens of a prompt are cached."""
        return {
            "remote_engine_id": self.own.engine_id,
            CACHED_TOKENS_KEY: num_cached_tokens,
            HAS_CLIENTS_KEY: not self._link.bound().is_producer,
            HEADROOM_KEY: self.side_channel.in_answer(),
        }

    def take_step(self, progress: Iterable[Progress]) -> Step:
        """Returns all changes for the workers since the last call.

        Args:
            progress: the requests that the step being built computes.
        """
        progress = list(progress)
        # Where the engine runs in its client's process, nothing else calls it.
        may_begin = self.ask()
        self._fetching.progressed(one.request_id for one in progress)
        self._gate.turn((one.request_id for one in progress), self._link.step)
        if self.asking is not None:
            self.asking.computed(progress)
        self.timelines.computed(one.request_id for one in progress)
        self._offering.scheduled(progress, self._link.bound(), self._link.step)
        self._kept.turn(self._link.step)
        self._giving_way.stepped()
        self._look_for_starved()
        self._is_left_waiting = None
        step = self._link.take_step()
        self._told.append(self._telling)
        self._telling = []
        # vLLM has looked at its queue already.
        self._link.has_news = may_begin
        step.counts = {**self._failures.counts}
        self._failures.counts.clear()
        step.lasted = self.timelines.take_lasted()
        if self.num_quarantined_blocks != self._reported_quarantine:
            step.quarantined_blocks = self._reported_quarantine = self.num_quarantined_blocks
        return step

    def filled_in_part(self, step: Step) -> list[int]:
        """Blocks that a step's fetches fill up to a request's last token; if vLLM zeroes blocks, it has to zero these
        before anything is written into them."""
        return filled_in_part(step.of(FetchSpec), self._terms.groups) if self._terms.zeroes_blocks else []

    def spares(self, request_id: str) -> bool:
        """Whether a request that ends must keep all its blocks until `finished` is called, even those that have left
        its sliding window."""
        if not self._terms.groups.drop_blocks:
            return False
        return self._fetching.is_waiting(request_id) or self._offering.is_named(request_id)

    def preempted(self, request_id: str) -> None:
        """A request is preempted. Holds its blocks if workers may be reading them."""
        if self._offering.is_read(request_id):
            self._offering.preempted(request_id, self._link.bound(), self._link.step)

    def finished(self, request: Request, is_whole: bool, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; ``is_whole`` if its whole prompt was computed.

        Returns: whether vLLM must keep its blocks until `collect` reports it as sent, and the ``kv_transfer_params``
        for decode's request.
        """
        self._gate.gone([request.request_id])
        if self.asking is not None:
            self.asking.gone(request.request_id)
        self._fetching.finished(request, self._link.bound(), self._link.step)
        self.timelines.end(request.request_id)
        is_kept, params = self._offering.finished(request, is_whole, block_ids, self._link.bound(), self._link.step)
        if params is not None:
            params[HEADROOM_KEY] = self.side_channel.in_answer()
        return is_kept, params

    def keeps(self, request_id: str) -> bool:
        """Whether a request has ended and its blocks are kept for decode; vLLM may have freed the request already."""
        return self._kept.keeps(request_id)

    def kept(self, request_id: str) -> None:
        """A request has ended, and at least one connector (of a ``MultiConnector``) keeps its blocks."""
        if not self._kept.keeps(request_id):
            self._fetching.kept(request_id)

    def collect(self, reports: Reports) -> None:
        """Takes what workers have reported after a step, and adds to it the requests that are meant."""
        for tell in self._told.popleft() if self._told else ():
            tell()
        # Before the reports: of what they name, vLLM frees the blocks afterwards.
        self.relieve()
        self._failed |= self._reports.take(reports, self._link.bound(), self._link.step)

    def take_ending(self) -> set[str]:
        """Requests that must end with an error now, whatever they wait for (rule R4)."""
        failed = {one for one in self._failed_fetches.take_ending() if not self.starts_again(one)}
        return self._starvation.take_ending() | failed

    def _look_for_starved(self) -> None:
        """A step was built: notices an engine that stands still, and whose next request gets no blocks any more."""
        blocks = self._link.bound()
        # KV under way is computed on when it has come, and its blocks are free then (or `Impasse` ends it).
        stalled = [] if self.num_waiting else blocks.stalled
        self._link.step.is_stalled = blocks.is_paused or bool(stalled)
        # So are those of offers, when decode has fetched them or their leases end, and of other connectors. Not those
        # of requests that have their KV and wait for more blocks, too: memory may have gone since they were admitted.
        # Blocks that are parked are in no table.
        if stalled and (blocks.is_copied or blocks.others_have_blocks({*stalled, *self._fetching.received})):
            stalled = []
        self._starvation.turn(stalled, blocks, self.num_held_blocks)

    def take_told(self) -> dict[str, str]:
        """Requests that ended without KV since the last call -> the message for their clients."""
        return self._failures.take_ended()

    def take_failed(self) -> set[str]:
        """Requests whose KV has failed to arrive since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def starts_again(self, request_id: str) -> bool:
        """Whether a request whose KV has failed to arrive may get it from another server, so that it does not end,
        whatever ``kv_load_failure_policy`` says. Idempotent."""
        return self.asking is not None and self.asking.may_ask_again(request_id)
