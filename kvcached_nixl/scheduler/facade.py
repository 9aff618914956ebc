# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of hand-overs: decode's half and prefill's half, between vLLM's scheduler and the workers.

One per engine, used on the engine's thread only. Changes go to the workers with the next step, and the workers' reports
come back with a step's output. Between steps the engine sleeps until a worker reports something.

`PrefillOffers` is prefill's half, `DecodeFetches` decode's. What vLLM calls for each request and step is here; what
concerns the whole engine is in `whole_engine`.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvcached_nixl.deadlines import Clock, earliest
from kvcached_nixl.scheduler.asking.asker import Asker
from kvcached_nixl.scheduler.asking.asking import Asking
from kvcached_nixl.scheduler.asking.settings import AskSettings
from kvcached_nixl.scheduler.context import AllRanks, EngineContext, Progress, StockScheduler
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.scheduler.giving_way import GivingWay, Starvation
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.scheduler.whole_engine import OwnSideChannel, Revocations
from kvcached_nixl.settings import SERVER_LOGGER, Settings
from kvcached_nixl.side_channel_address import SideChannelAddress
from kvcached_nixl.wire.causes import HandOverFailed
from kvcached_nixl.wire.manifest import Keeps
from kvcached_nixl.wire.params import CACHED_TOKENS_KEY, HAS_CLIENTS_KEY, HEADROOM_KEY, RemotePrefill
from kvcached_nixl.wire.step import FAILING, BlockIds, FetchSpec, Reports, Step, WakeAddress
from kvcached_nixl.wire.timeline import Timeline

if TYPE_CHECKING:
    from kvcached_nixl.vllm.adapter.requests import RequestView

logger = logging.getLogger(SERVER_LOGGER)

STOCK_TIMEOUT = "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"
"""How long vLLM's own connector keeps a request's blocks."""


class SchedulerFacade:
    """What the patches in `vllm.patches` call in the engine core; see the module's docstring.

    Args:
        asks: whom this engine asks for KV; nobody if a router does that.
        asker: sends the questions.

    Attributes:
        engine: what the parts share.
        read: wraps vLLM's requests.
        fetching, offering: decode's half and prefill's.
        revocations: what takes hand-overs back.
        side_channel: where peers and this engine's workers reach it.
        asking: asks prefill servers for KV.
        num_miscounted_tokens: of prompts that must be computed here, and that vLLM counts as missed.
    """

    def __init__(
        self, engine: EngineContext, asks: AskSettings, asker: Callable[[str, Callable[[], None]], Asker] = Asker
    ) -> None:
        self.engine = engine
        self.read = engine.stock.reader
        self.fetching = DecodeFetches(engine)
        self.offering = PrefillOffers(engine)
        self._starvation = Starvation(engine, self.fetching)
        self._giving_way = GivingWay(engine, self.offering, self.fetching)
        self.asking = Asking(engine, asks, asker(asks.api_key, engine.woken), self.fetching)
        self._accepts_params = asks.accepts_params
        self._ended, self._idle = AllRanks(engine.own.num_ranks), AllRanks(engine.own.num_ranks)
        self.revocations = Revocations(engine, self.offering, self.fetching)
        figures = self.asking.figures if asks.servers else None
        self.side_channel = OwnSideChannel(engine, self.offering, self.fetching, self.revocations, figures)
        self._reported_quarantine = 0
        self._failed: set[str] = set()
        self._calls = deque[Callable[[], None]]()
        # Whom to tell when a step has ended, for the next one, and for those that the workers have.
        self._telling: list[Callable[[], None]] = []
        self._told = deque[list[Callable[[], None]]]()
        self.num_miscounted_tokens = 0

    def close(self) -> None:
        self.side_channel.close()
        self.asking.close()

    def relieve(self) -> bool:
        """Has offers give way if memory is short (`GivingWay.turn`). Returns whether the engine has to step."""
        if not self.engine.is_bound:
            return False
        if self._giving_way.turn():
            # Not |=: another thread may set it meanwhile (`EngineContext.woken`).
            self.engine.has_news = True
        return self.engine.has_news or self.engine.step.has_news

    def call_soon(self, call: Callable[[], None]) -> None:
        """Has something called on the engine's thread, between two steps. May be called from any thread."""
        self._calls.append(call)
        self.engine.woken()

    def run_calls(self) -> None:
        """Calls what `call_soon` was given. Called between two steps."""
        while self._calls:
            self._calls.popleft()()

    @property
    def pending(self) -> bool:
        """Whether the engine has to step with nothing to compute: workers have reports, or have to be told of changes.
        An engine that sleeps takes no reports and frees no blocks (vllm#45168)."""
        return bool(
            self.engine.has_news
            or self.engine.step.has_news
            or self._calls
            or any(self._told)
            or self._giving_way.owes
            or self.engine.refused
            or self.asking.has_news
            or self.fetching.has_news
            or self._starvation.ending
            or (self.engine.is_bound and self.engine.blocks.is_copied)
            or self.fetching.attempts.num_quarantined_blocks != self._reported_quarantine
            or self.due_in_seconds == 0
        )

    @property
    def watches_memory(self) -> bool:
        """Whether `relieve` has to be called while the engine rests."""
        return self.engine.is_bound and self._giving_way.watches

    @property
    def due_in_seconds(self) -> float | None:
        """Seconds until the next hand-over times out, the next offer is revoked, or a request has starved; None if
        there is none."""
        due_at = earliest(
            *(self.fetching.attempts.deadlines.first_seconds, self.offering.kept.revoked_at.first_seconds),
            *(self.offering.gate.held.first_seconds, self._starvation.due_at_seconds),
            self.asking.due_at_seconds,
        )
        return None if due_at is None else max(0.0, due_at - self.engine.clock.now_seconds())

    @property
    def may_offer(self) -> bool:
        """Whether KV is offered that requests ask for: nobody would fetch what a decode server's client has offered."""
        return self._accepts_params or self.engine.stock.is_producer

    def arrived(self, request: RequestView, *, may_hold: bool = True) -> bool:
        """A request has entered the engine. Returns whether it is to be held: a prefill server is asked for its KV."""
        self.outdate_renamed()
        if not self._accepts_params:
            request.refuse_prefill()
        self.fetching.arrived(request)
        if self.may_offer:
            self.offering.arrived(request)
        return may_hold and self.asking.arrived(request)

    def outdate_renamed(self) -> None:
        """Nobody finds KV in the prefix cache any more of an adapter whose name, which the cache knows it by, another
        one has got."""
        if names := self.read.take_renamed():
            # A request of the adapter of before, which begins only now, must not begin with KV of the new one. What is
            # under way goes on: its digest says which adapter computes it.
            self.engine.blocks.outdate(lambda _, name: name in names, even_waiting=True)

    def ask(self) -> bool:
        """Asks prefill servers, and lets requests begin that they have answered. Called before each step. Returns
        whether any may begin that could not before."""
        if not (self.engine.is_bound and self.asking.servers.all):
            return False
        return self.asking.turn(may_ask=self.engine.blocks.admits and not self._giving_way.yields)

    def refuse(self, request_id: str, client_index: int) -> None:
        """A request has arrived under the id of another one. Its client is told with the next step."""
        self.engine.refused.append((request_id, client_index))
        logger.error(
            "A request has arrived under the id %s of another request, which still runs here, whose blocks are kept "
            "for decode, or which was a streaming session that has failed; expected an unused id. It fails, and the "
            "other one is as before. Let vLLM make the engine's ids (AsyncLLM, LLM), and add no request twice.",
            request_id,
        )

    def matched(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens prefill has beyond those decode has, and whether they load asynchronously. None: the
        request may not begin yet; ask again (`StartGate`, `GivingWay.yields`)."""
        may_start = not self._yields(request.request_id) and self.offering.may_start(request.request_id)
        if not may_start or self.asking.holds_again(request):
            return None, False
        return self.fetching.matched(request, num_computed_tokens)

    def holds_back(self, request_id: str) -> bool:
        """Whether a request would not begin whatever blocks are free: see `matched`."""
        return request_id in self.offering.gate.held or self._yields(request_id)

    def _yields(self, request_id: str) -> bool:
        return self.fetching.needs_others(request_id) and self._giving_way.yields

    def allocated(self, request: RequestView, block_ids: BlockIds, num_external_tokens: int) -> None:
        """A request was given blocks; on decode, for its whole prompt."""
        self.asking.window.settle(request.request_id)
        self.fetching.allocated(request, block_ids, num_external_tokens)

    @property
    def awaits_tokens(self) -> bool:
        return bool(self.engine.timelines.unanswered or self.asking.local.break_even.begun)

    def answered(self, request_ids: Collection[str]) -> None:
        self.engine.timelines.answered(request_ids)
        self.asking.local.break_even.answered(request_ids)

    @property
    def offers_cached(self) -> bool:
        """Whether what is cached may be kept for a peer that asks for it: none have left enough waiting here, and no
        load of another connector, or step, under way into cached blocks, may yet fail."""
        is_short = self._giving_way.yields or self.offering.kept.is_left_waiting
        return not (is_short or self.engine.blocks.are_shared or self.engine.awaits_outputs)

    def offer_cached(
        self, request: RequestView, num_tokens: int, block_ids: BlockIds, told: Callable[[Mapping[str, Any]], None]
    ) -> bool:
        """Offers a prompt's beginning, which is cached. Returns whether it can, so that vLLM must keep these blocks
        until `collect` reports the request as sent. Calls ``told`` with the ``kv_transfer_params`` for the peer."""
        # When the step has ended that tells the workers. So has the one before, which may compute these blocks: vLLM
        # caches them when it schedules that.
        params = self.offering.offer_cached(request, num_tokens, block_ids)
        if params is not None:
            self._telling.append(functools.partial(told, self.look_up(num_tokens) | params))
        return params is not None

    def look_up(self, num_cached_tokens: int) -> dict[str, Any]:
        """The ``kv_transfer_params`` for a peer that asks how many tokens of a prompt are cached."""
        return {
            "remote_engine_id": self.engine.own.engine_id,
            CACHED_TOKENS_KEY: num_cached_tokens,
            HAS_CLIENTS_KEY: not self.engine.blocks.is_producer,
            HEADROOM_KEY: self.side_channel.in_answer(),
        }

    def take_step(self, progress: Iterable[Progress]) -> Step:
        """Returns all changes for the workers since the last call. ``progress``: what the step being built computes."""
        progress = list(progress)
        request_ids = [one.request_id for one in progress]
        # Where the engine runs in its client's process, nothing else calls it.
        may_begin = self.ask()
        self.fetching.progressed(request_ids)
        self.offering.gate.turn(request_ids)
        self.asking.computed(progress)
        self.engine.timelines.computed(request_ids)
        self.offering.scheduled(progress)
        self.offering.kept.turn()
        self._giving_way.stepped()
        self._starvation.turn()
        step = self.engine.take_step()
        self._told.append(self._telling)
        self._telling = []
        # vLLM has looked at its queue already.
        self.engine.has_news = may_begin
        step.counts = {**self.engine.failures.counts}
        self.engine.failures.counts.clear()
        step.lasted = self.engine.timelines.take_lasted()
        num_quarantined_blocks = self.fetching.attempts.num_quarantined_blocks
        if num_quarantined_blocks != self._reported_quarantine:
            step.quarantined_blocks = self._reported_quarantine = num_quarantined_blocks
        return step

    def filled_in_part(self, step: Step) -> list[int]:
        """Blocks that a step's fetches fill up to a request's last token; if vLLM zeroes blocks, it has to zero these
        before anything is written into them."""
        if not self.engine.stock.zeroes_blocks:
            return []
        groups = self.engine.groups.all
        pairs = [pair for fetch in step.of(FetchSpec) for pair in zip(groups, fetch.groups, strict=True)]
        filled = [blocks for group, blocks in pairs if group.keeps is not Keeps.STATE]
        return [block_id for blocks in filled for block_id in blocks.block_ids[-1:]]

    def spares(self, request_id: str) -> bool:
        """Whether a request that ends must keep all its blocks until `finished` is called, even those that have left
        its sliding window: workers may be writing into them, or a manifest names them."""
        if not self.engine.groups.drop_blocks:
            return False
        offered = self.offering.find(request_id)
        is_named = offered is not None and offered.manifest is not None
        return is_named or request_id in self.fetching.attempts.waiting

    def finished(self, request: RequestView, is_whole: bool, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; ``is_whole`` if its whole prompt was computed. Returns whether vLLM must keep its blocks
        until `collect` reports it as sent, and the ``kv_transfer_params`` for decode's request."""
        self.offering.gate.gone([request.request_id])
        self.asking.gone(request.request_id)
        self.fetching.finished(request)
        self.engine.timelines.end(request.request_id)
        is_kept, params = self.offering.finished(request, is_whole, block_ids)
        if params is not None:
            params[HEADROOM_KEY] = self.side_channel.in_answer()
        return is_kept, params

    def kept(self, request_id: str) -> None:
        """A request has ended, and at least one connector (of a ``MultiConnector``) keeps its blocks."""
        if not self.offering.kept.keeps(request_id):
            self.fetching.kept(request_id)

    def collect(self, reports: Reports) -> None:
        """Takes what workers have reported after a step, and adds to it the requests that are meant."""
        for tell in self._told.popleft() if self._told else ():
            tell()
        # Before the reports: of what they name, vLLM frees the blocks afterwards.
        self.relieve()
        self._take_timelines(reports)
        report, kept, attempts = reports.report, self.offering.kept, self.fetching.attempts
        self.offering.gate.claimed(report.claimed)
        # Before it is looked what is late.
        attempts.known(report.known)
        # Other connectors have released the blocks of these requests.
        attempts.let_go(reports.sent)
        failures = [(number, HandOverFailed(*why)) for number, why in report.failed.items()]
        received, failed = self.fetching.collect(failures, self._ended.take(report.ended))
        self._failed |= failed
        # A load that another connector reports as ended must not free blocks that decode may be reading.
        reports.received = {one for one in reports.received if not kept.keeps(one)} | received
        if failed:
            reports.invalid.add(FAILING)
        # Blocks of preempted requests, which no rank reads any more.
        for hold in self._idle.take(report.idle):
            self.engine.holds.give_back(hold)
        self._giving_way.reported(report, reports.sent)
        kept.stuck(report.stuck)
        reports.sent |= kept.let_go()
        ending, self.fetching.ending = self.fetching.ending, set()
        reports.ending |= self._starvation.ending | {one for one in ending if not self.asking.may_ask_again(one)}
        self._starvation.ending = set()
        reports.refused += self.engine.refused
        self.engine.refused = []

    def _take_timelines(self, reports: Reports) -> None:
        others = []
        for one in reports.timelines:
            attempt, trace, timeline = Timeline.read(one)
            fetch = self.fetching.attempts.find_waiting(attempt)
            if fetch is not None:
                self.engine.timelines.rank_ended(fetch.request_id, timeline)
            elif attempt:
                others.append(one)
            else:
                self.engine.timelines.add(trace, timeline, {})
        if len(others) < len(reports.timelines):
            # They came with statistics, which take these along.
            reports.lasted += self.engine.timelines.take_lasted()
        reports.timelines = others

    def take_failed(self) -> set[str]:
        failed, self._failed = self._failed, set()
        return failed


def build_scheduler(stock: StockScheduler, address: SideChannelAddress, clock: Clock) -> SchedulerFacade:
    """Builds the scheduler side. Called once per process, where vLLM constructs its connector; the side channel at
    ``address`` starts later."""
    settings = Settings.from_extra_config(stock.extra_config)
    if settings.transfer_mode.is_push and stock.window_kinds:
        logger.warning(
            "KV is pushed when a prompt has been computed, not while it is: blocks that leave the window of %s are "
            "freed while the prompt is computed.",
            ", ".join(stock.window_kinds),
        )
    if settings.transfer_mode.is_push and stock.output_checks:
        logger.warning(
            "KV is pushed when a prompt has been computed, not while it is: with %s vLLM may refuse what a step has "
            "computed.",
            ", ".join(stock.output_checks),
        )
    if STOCK_TIMEOUT in os.environ:
        logger.warning(
            "%s has no effect: prefill keeps a request's blocks for kv_lease_duration, %g s, and decode renews it.",
            STOCK_TIMEOUT,
            settings.kv_lease_duration_seconds,
        )
    own = RemotePrefill(stock.engine_id, *address.advertised, stock.tp_size, stock.pp_size)
    wake_address = WakeAddress(*address.local, secrets.token_hex(16))
    engine = EngineContext(stock, settings, own, secrets.token_hex(8), wake_address, clock)
    roles = {"is_consumer": stock.is_consumer and stock.pp_size == 1, "is_producer": stock.is_producer}
    return SchedulerFacade(engine, AskSettings.from_extra_config(stock.extra_config, **roles))
