# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of hand-overs: decode's half and prefill's half, between vLLM's scheduler and the workers.

One per engine, used on the engine's thread only, except `woken`, `headroom` and `watch_memory`. Changes go to the
workers with the next step, and the workers' reports come back with a step's output. Between steps the engine sleeps
until a worker reports something.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvcached_nixl.clock import Clock
from kvcached_nixl.ids import DecodeRequestId, PrefillRequestId
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.scheduler.engine import BlockPool, Progress, Reader, Request
from kvcached_nixl.scheduler.failed_fetches import FailedFetches
from kvcached_nixl.scheduler.failures import Failures
from kvcached_nixl.scheduler.fetch_attempts import FetchAttempts
from kvcached_nixl.scheduler.giving_way import GivingWay
from kvcached_nixl.scheduler.holds import Holds
from kvcached_nixl.scheduler.kept_offers import KeptOffers
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.scheduler.side_channel_listener import (
    Answers,
    Envelope,
    HandshakeListener,
    answers_of,
    is_staged,
    weights_of,
)
from kvcached_nixl.scheduler.start_gate import StartGate
from kvcached_nixl.scheduler.starvation import Starvation
from kvcached_nixl.scheduler.terms import ANY_ADAPTER, Terms
from kvcached_nixl.scheduler.timelines import Spans, Timelines
from kvcached_nixl.scheduler.told_headroom import ToldHeadroom
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed, RevocationCause
from kvcached_nixl.wire.headroom import encode_headroom
from kvcached_nixl.wire.kv_groups import Keeps
from kvcached_nixl.wire.params import HEADROOM_KEY, RemotePrefill
from kvcached_nixl.wire.step import (
    FAILING,
    BlockIds,
    Reports,
    Step,
    WakeAddress,
    failure_of,
    finished_attempts_of,
    idle_holds_of,
    take_claimed,
    take_spared,
)
from kvcached_nixl.wire.timeline import attempt_of

__all__ = ["SchedulerFacade"]

logger = logging.getLogger(SERVER_LOGGER)


NO_REASON = "the worker did not say why"
QUIET_SECONDS = 2.0
"""How long a pause waits for transfers that may be in flight, before its caller is told that the cache is not clear."""


class SchedulerFacade:
    """What the patches in `seams` call in the engine core; see the module's docstring.

    Args:
        own: what a peer needs to find this engine's ranks.
        incarnation: 16 hexadecimal digits, drawn when this engine starts, and again whenever its weights change.
        read: wraps vLLM's requests.
        wake_address: where the side channel listens for this engine's own workers, and the key that they send.
        spans: makes spans of hand-overs; None if nothing is traced.

    Attributes:
        keeps_states: some layers keep a state, so prefill has to stop one token before the end of a prompt.
        timelines: of the hand-overs.
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
    ) -> None:
        self.own = own
        self.read = read
        self.incarnation = incarnation
        self.wake_address = wake_address
        self._terms = terms
        self.keeps_states = terms.groups.have_states
        self._clock = clock
        self._holds = Holds()
        self._failures = Failures()
        self._attempts = FetchAttempts(self._holds)
        self.timelines = Timelines(clock, spans, is_push=terms.mode.is_push)
        self._failed_fetches = FailedFetches(terms, self._failures, self.timelines)
        self._fetching = DecodeFetches(terms, clock, self._attempts, self._failed_fetches, self.timelines)
        self._kept = KeptOffers(terms, clock, self._holds)
        self._offering = PrefillOffers(
            *(own, incarnation, terms, self._kept, self._holds, self._failures), self.timelines
        )
        self._step = self._new_step()
        self._gate = StartGate(clock, terms.allocation_seconds)
        # `KeptOffers.is_left_waiting`, once it was looked up for the step being built.
        self._is_left_waiting: bool | None = None
        self._starvation = Starvation(clock, terms.timeout_seconds)
        self._giving_way = GivingWay(
            *(clock, terms.patience_seconds, self._offering, self._fetching), is_push=terms.mode.is_push
        )
        self._headroom = ToldHeadroom(clock, terms.groups.tokens_per_block, self._kept, self._fetching)
        self._reported_quarantine = 0
        self._has_news = False
        self._blocks: BlockPool | None = None
        self._wake: Callable[[], None] | None = None
        self._failed: set[str] = set()
        self._refused: list[tuple[str, int]] = []
        self._listener: HandshakeListener | None = None
        self._weights: dict[Any, Any] | None = None
        self._quiet_by_seconds = 0.0

    # ------------------------------------------------------------------------------------------------ the engine's loop

    def bind(self, blocks: BlockPool) -> None:
        """Sets the engine's KV-cache blocks; called before the first request. Idempotent: the first call counts."""
        if self._blocks is None:
            self._blocks = blocks

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """Sets the function that wakes the engine; it may be called from any thread."""
        self._wake = wake

    def introduce(self, metadata: Mapping[Any, Envelope], listen: Callable[[Answers], HandshakeListener]) -> None:
        """Sets the handshakes of this engine's ranks. Called when the workers have registered their memory, and again
        when their weights may have changed. The side channel answers peers with them until `close`."""
        self._offering.is_read_early |= is_staged(metadata)
        weights = weights_of(metadata)
        if self._weights not in (None, weights):
            self.weights_changed()
        self._weights = weights
        answers = answers_of(metadata, self.incarnation)
        if self._listener is None:
            self._listener = listen(answers)
        else:
            self._listener.answer(answers)

    def close(self) -> None:
        """Stops the side channel; called when the engine shuts down."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def headroom(self) -> bytes:
        """Returns this engine's `Headroom`, encoded; empty before its first step. Called on the listener's thread."""
        self.watch_memory()
        return b"" if self._blocks is None else encode_headroom(self._headroom.of(self._blocks))

    def watch_memory(self) -> None:
        """Counts what kvcached has mapped and unmapped since the last call. Called on the listener's thread."""
        if self._blocks is not None:
            self._headroom.watch(self._blocks)

    def woken(self) -> None:
        """A worker has something to report: makes the engine step. May be called from any thread."""
        self._has_news = True
        if self._wake is not None:
            self._wake()

    def hide(self) -> None:
        """Answers peers that this engine has no rank, until `introduce` is called again."""
        self.weights_changed()
        if self._listener is not None:
            self._listener.answer({})

    # ------------------------------------------------------------------------------------------------------ revocation

    def weights_changed(self, adapter: int | None = None) -> None:
        """Revokes every hand-over of KV that was computed with the weights of before.

        Args:
            adapter: only the weights of this LoRA adapter have changed; None for the model's.
        """
        reason = "the weights were changed" if adapter is None else "an adapter was loaded again"
        # The prefix cache identifies an adapter by its name, so its blocks would match the new weights, too.
        self._offering.stale.add(adapter)
        # An idle engine has to step, too, to tell its workers.
        self._has_news = True
        if adapter is None:
            self.incarnation = self._step.incarnation = self._offering.incarnation = secrets.token_hex(8)
            self._weights = None
        self._offering.revoke(RevocationCause.WEIGHTS, f"prefill: {reason}", self._step, adapter=adapter)
        if self._blocks is not None:
            self._fetching.revoke(f"decode: {reason}", self._blocks, self._step, adapter=adapter)
            self.freshen()

    def adapters_changed(self, adapter: int | None = None) -> None:
        """A LoRA adapter was loaded under a number that was in use, or was removed; None: any adapter may have been."""
        self.read.forget(adapter)
        self.weights_changed(adapter or ANY_ADAPTER)

    def paused(self, *, grace_seconds: float, clears: bool) -> None:
        """The engine is paused until `resumed`. Revokes offers: with blocks kept for peers it would never be idle.

        Args:
            grace_seconds: how long decode still has to fetch from requests that have ended, or end from now on.
            clears: the cache is cleared, too, so no transfer into it or out of it may be under way.
        """
        self._quiet_by_seconds = self._clock.now_seconds() + grace_seconds + QUIET_SECONDS
        self._kept.close("prefill is paused", self._step, grace_seconds=grace_seconds)
        if clears:
            self.clear(running=not grace_seconds)

    def clear(self, *, running: bool = True) -> None:
        """The cache is about to be cleared: revokes the hand-overs out of it and into it.

        Args:
            running: running requests lose what they have computed, so their offers are revoked, too.
        """
        self._quiet_by_seconds = max(self._quiet_by_seconds, self._clock.now_seconds() + QUIET_SECONDS)
        if running:
            self._offering.revoke(RevocationCause.CLEARED, "prefill's cache is cleared", self._step)
        if self._blocks is not None:
            self._fetching.revoke("decode's cache is cleared", self._blocks, self._step)

    def relieve(self) -> bool:
        """Tells neighbours what this engine waits for, and takes back offers that nobody fetches, if memory is short.
        Looks four times a second, however often it is called.

        Returns: whether the engine has to step.
        """
        if self._blocks is None:
            return False
        self._has_news |= self._giving_way.turn(self._blocks, self._step)
        return self._has_news or self._step.has_news

    def resumed(self) -> None:
        """The engine runs again after `paused`."""
        self._kept.reopen()

    @property
    def has_blocks(self) -> bool:
        """Whether blocks are held, kept for decode, or waiting for KV, although no running request uses them."""
        waits = self._fetching.num_waiting or self._fetching.num_received
        return bool(self.num_held_blocks or self._kept.num_kept or waits)

    @property
    def quiet_in_seconds(self) -> float:
        """How long a pause still waits for transfers in flight; 0 if none can be in flight, or nobody waits."""
        if not (self.num_held_blocks or self._kept.num_kept):
            return 0.0
        return max(0.0, self._quiet_by_seconds - self._clock.now_seconds())

    # -------------------------------------------------------------------------------------------------- pending work

    @property
    def pending(self) -> bool:
        """Whether the engine has to step with nothing to compute: workers have reports, or have to be told of changes.

        vllm#45168: an engine that sleeps takes no reports and frees no blocks.
        """
        is_counted = self.num_quarantined_blocks == self._reported_quarantine
        has_ends = bool(self._refused) or self._failed_fetches.has_news
        has_news = self._has_news or self._giving_way.owes or has_ends or self._step.has_news or not is_counted
        return has_news or self.due_in_seconds == 0

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
        return self._giving_way.watches

    @property
    def num_kept(self) -> int:
        """Requests that have ended, and whose blocks vLLM keeps because decode may fetch them."""
        return self._kept.num_kept

    @property
    def due_in_seconds(self) -> float | None:
        """Seconds until the next hand-over times out, or the next offer is revoked; None if there is none."""
        some = (self._fetching.due_at_seconds, self._kept.due_at_seconds, self._gate.due_at_seconds)
        due_at = min((one for one in some if one is not None), default=None)
        return None if due_at is None else max(0.0, due_at - self._clock.now_seconds())

    # ---------------------------------------------------------------------------------------------- called from vLLM

    def arrived(self, request: Request) -> None:
        """A request has entered the engine."""
        if self.read.take_renamed():
            self._offering.stale.add(ANY_ADAPTER)
        self._fetching.arrived(request, self._step)
        self._offering.arrived(request, self._step)

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
            if not self._gate.may_start(request_id, self._step, needs_claim=self._is_left_waiting):
                return None, False
        is_stale = self._offering.is_stale(request.adapter)
        is_producer = self._bound().is_producer
        return self._fetching.matched(
            request, num_computed_tokens, self._step, is_stale=is_stale, is_producer=is_producer
        )

    def holds_back(self, request_id: str) -> bool:
        """Whether a request would not begin whatever blocks are free: see `matched`."""
        return self._gate.holds(request_id) or self._yields(request_id)

    def _yields(self, request_id: str) -> bool:
        return self._fetching.needs_others(request_id) and self._giving_way.yields

    def allocated(self, request: Request, block_ids: BlockIds, num_external_tokens: int) -> None:
        """A request was given blocks; on decode, for its whole prompt."""
        self._fetching.allocated(request, block_ids, num_external_tokens, self._step)

    def take_step(self, progress: Iterable[Progress]) -> Step:
        """Returns all changes for the workers since the last call.

        Args:
            progress: the requests that the step being built computes.
        """
        progress = list(progress)
        self._fetching.progressed(one.request_id for one in progress)
        self._gate.turn(one.request_id for one in progress)
        self.timelines.computed(one.request_id for one in progress)
        self._offering.scheduled(progress, self._bound(), self._step)
        self._kept.turn(self._step)
        self.relieve()
        self._has_news, self._is_left_waiting = False, None
        step, self._step = self._step, self._new_step()
        step.counts = {**self._failures.counts}
        self._failures.counts.clear()
        step.lasted = self.timelines.take_lasted()
        if self.num_quarantined_blocks != self._reported_quarantine:
            step.quarantined_blocks = self._reported_quarantine = self.num_quarantined_blocks
        return step

    def filled_in_part(self, step: Step) -> list[int]:
        """Blocks that a step's fetches fill up to a request's last token; if vLLM zeroes blocks, it has to zero these
        before anything is written into them."""
        if not self._terms.zeroes_blocks:
            return []
        pairs = [zip(self._terms.groups.all, fetch.groups, strict=True) for fetch in step.fetches]
        return [
            block_id
            for pair in pairs
            for group, blocks in pair
            if group.keeps is not Keeps.STATE
            for block_id in blocks.block_ids[-1:]
        ]

    def spares(self, request_id: str) -> bool:
        """Whether a request that ends must keep all its blocks until `finished` is called, even those that have left
        its sliding window."""
        if not self._terms.groups.drop_blocks:
            return False
        return self._fetching.is_waiting(request_id) or self._offering.is_named(request_id)

    def preempted(self, request_id: str) -> None:
        """A request is preempted. Holds its blocks if workers may be reading them."""
        if self._offering.is_read(request_id):
            self._offering.preempted(request_id, self._bound(), self._step)

    def finished(self, request: Request, is_whole: bool, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; ``is_whole`` if its whole prompt was computed.

        Returns: whether vLLM must keep its blocks until `collect` reports it as sent, and the ``kv_transfer_params``
        for decode's request.
        """
        self._gate.gone([request.request_id])
        self._fetching.finished(request, self._bound(), self._step)
        self.timelines.end(request.request_id)
        is_kept, params = self._offering.finished(request, is_whole, block_ids, self._bound(), self._step)
        if params is not None:
            params[HEADROOM_KEY] = self._headroom.in_answer(self._bound())
        return is_kept, params

    def keeps(self, request_id: str) -> bool:
        """Whether a request has ended and its blocks are kept for decode; vLLM may have freed the request already."""
        return self._kept.keeps(request_id)

    def kept(self, request_id: str) -> None:
        """A request has ended, and at least one connector (of a ``MultiConnector``) keeps its blocks."""
        if not self._kept.keeps(request_id):
            self._fetching.kept(request_id)

    def collect(self, reports: Reports) -> None:
        """Takes what all ranks have reported: replaces this package's ids and marks by the requests that they mean."""
        self._take_timelines(reports)
        if self._kept.spared(take_spared(reports.invalid)):
            # Others may give way instead.
            self._giving_way.look_soon()
        self._gate.claimed(take_claimed(reports.invalid))
        marked = [found for mark in reports.invalid if (found := failure_of(mark)) is not None]
        failures = [(number, HandOverFailed(cause, reports.reasons.get(number, NO_REASON))) for number, cause in marked]
        reports.invalid = {block_id for block_id in reports.invalid if failure_of(block_id) is None}
        finished, blocks = finished_attempts_of(reports.received), self._bound()
        # Other connectors have released the blocks of these requests.
        self._attempts.let_go(map(DecodeRequestId, reports.sent), blocks)
        received, failed = self._fetching.collect(failures, finished, blocks, self._step)
        # A load that another connector reports as ended must not free blocks that decode may be reading.
        reports.received = {one for one in reports.received if not self._kept.keeps(one)} | received
        self._failed |= failed
        if failed:
            reports.invalid.add(FAILING)
        self._offering.drained(idle_holds_of(reports.sent), blocks)
        num_fetched, num_owed = self._kept.ended(reports.sent, blocks)
        self._giving_way.owe(num_owed)
        if num_fetched:
            self._giving_way.fetched()
        reports.sent |= self._kept.let_go(blocks)
        self.freshen()

    def _take_timelines(self, reports: Reports) -> None:
        found, others = [], []
        for one in reports.timelines:
            attempt = self._attempts.find_waiting(number) if (number := attempt_of(one)) else None
            if number and attempt is None:
                others.append(one)
            else:
                found.append(("" if attempt is None else attempt.request_id, one))
        if found:
            self.timelines.take(found)
            # They came with statistics, which take these along.
            reports.lasted += self.timelines.take_lasted()
        reports.timelines = others

    def freshen(self) -> None:
        """Clears the prefix cache if it may hold KV of other weights and none of its blocks is in use."""
        if self._offering.stale and self._bound().forget_prefixes():
            self._offering.stale.clear()

    def take_ending(self) -> set[str]:
        """Requests that must end with an error now, whatever they wait for (rule R4)."""
        return self._starved() | self._failed_fetches.take_ending()

    def _starved(self) -> set[str]:
        """Fails the request that has waited too long for blocks which only the end of a quarantine could free."""
        may_stall = self.num_quarantined_blocks and not (self.num_waiting or self.num_kept)
        request_id = self._bound().stalled if may_stall else None
        if not self._starvation.has_starved(request_id) or request_id is None:
            return set()
        reason = self._starvation.reason(self.num_quarantined_blocks)
        self._failures.not_received(request_id, HandOverFailed(FailureCause.QUARANTINE, reason))
        return {request_id}

    def take_told(self) -> dict[str, str]:
        """Requests that ended without KV since the last call -> the message for their clients."""
        return self._failures.take_ended()

    def take_failed(self) -> set[str]:
        """Requests whose KV has failed to arrive since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def _bound(self) -> BlockPool:
        assert self._blocks is not None, "no request has entered the engine"
        return self._blocks

    def _new_step(self) -> Step:
        return Step(self.own.host, self.own.port, self.wake_address, self.incarnation)
