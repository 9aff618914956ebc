# SPDX-License-Identifier: Apache-2.0
"""Decode: which KV its requests fetch from prefill, and how each fetch ends. One per engine, on the engine's thread.

    arrived ─► (lease renewed) ─► matched ─► allocated ─► waiting ─► received
                                     │                      └──────► failed, withdrawn, or timed out
                                     └─► refused: the request is computed here, or fails

No time is limited while a request waits for its turn and for blocks, as for vLLM's own requests. The timeout begins
when it has blocks; in push it begins again as often as prefill says that the request waits for its turn there, or is
computed. `Starvation` and `Impasse` end what would wait for ever.

The client's result is decided at once: the request is recomputed here if ``kv_load_failure_policy`` says so and decode
has all of its prompt, or else ends with an error. Its blocks are held until no rank has a transfer into them in flight
(`FetchAttempts`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvcached_nixl.ids import DecodeRequestId
from kvcached_nixl.scheduler.context import EngineContext, is_meant
from kvcached_nixl.scheduler.fetch_request import FetchAttempts, FetchRequest
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.params import asks, cached_tokens_in, read_fetch
from kvcached_nixl.wire.step import BlockIds, FetchSpec, LeaseRenewal, UnneededOffer, Withdraw
from kvcached_nixl.wire.timeline import State

if TYPE_CHECKING:
    from kvcached_nixl.vllm.adapter.requests import RequestView

logger = logging.getLogger(SERVER_LOGGER)


class DecodeFetches:
    """Decode's half of `SchedulerFacade`; see the module's docstring.

    Attributes:
        attempts: those that were given blocks, and the blocks.
        queued: requests that have no blocks yet.
        ending: requests that end with an error, whatever ``kv_load_failure_policy`` says.
        received: requests whose KV has arrived. vLLM resumes them in a later step, which may be long in coming: the
            engine may be paused, or out of blocks.
    """

    def __init__(self, engine: EngineContext) -> None:
        self._engine = engine
        self.attempts = FetchAttempts(engine)
        self._requests: dict[DecodeRequestId, FetchRequest] = {}
        self.queued: set[DecodeRequestId] = set()
        self.received: dict[DecodeRequestId, FetchRequest] = {}
        # By `give_up`, until they are computed here or end.
        self._given_up: set[DecodeRequestId] = set()
        # They wait with their blocks, and vLLM is yet to be told that their KV does not come.
        self._failing: set[DecodeRequestId] = set()
        self.ending: set[DecodeRequestId] = set()
        # They have ended while they waited, so vLLM is yet to be told that they no longer do.
        self._aborted: set[DecodeRequestId] = set()

    @property
    def has_news(self) -> bool:
        """Whether vLLM has to be told of a failed, aborted or ended request in the next step."""
        return bool(self._failing or self._aborted or self.ending)

    def waiting_now(self) -> tuple[int, float]:
        """Returns how many requests wait for KV, with blocks or without, and for how long the first timeout has run; 0
        if none does. May be called from any thread."""
        waiting, now = list(self.attempts.waiting.values()), self._engine.clock.now_seconds()
        longest_seconds = max([0.0, *(now - one.since_seconds for one in waiting)])
        return len(self.queued) + len(waiting), longest_seconds

    def needs_others(self, request_id: str) -> bool:
        """Whether a request has no blocks, and would wait for KV with them, or has been given up for others."""
        one = DecodeRequestId(request_id)
        return one in self.queued or one in self._given_up

    def arrived(self, request: RequestView, *, computes: bool = True, is_asked: bool = False) -> None:
        """A request has entered the engine, or prefill was asked for it. Starts renewing its lease, which may end
        before it has blocks."""
        params = request.params
        if params is None or not asks(params, "do_remote_prefill") or request.request_id in self._requests:
            return
        fetch, refused = None, None
        try:
            fetch = read_fetch(params, request.request_id, may_rendezvous=self._engine.is_push)
        except HandOverFailed as error:
            refused = error.with_traceback(None)
        one = FetchRequest(self._engine, request, fetch, refused, computes, cached_tokens_in(params), is_asked)
        if request.is_session:
            # Whatever the policy: one that failed would go on without its beginning.
            reason = (
                "it is a streaming session (resumable), whose blocks are filled further by later input; expected a "
                "complete prompt. It is computed here. Send kv_transfer_params with requests of one prompt each"
            )
            one.check()
            self._engine.failures.not_received(one.request_id, HandOverFailed(FailureCause.PARAMETERS, reason))
            one.release()
            return
        self._requests[one.request_id] = one
        self._engine.timelines.begin(request, State.DECODE_QUEUED)
        if refused is None:
            self.queued.add(one.request_id)
            one.renew()

    def refuse(self, request: RequestView, failure: HandOverFailed, *, computes: bool) -> bool:
        """A request gets no KV although it was asked for. Returns whether it is computed here, when it is its turn:
        if ``computes``, and ``kv_load_failure_policy`` says so. Else it ends with an error, whatever it waits for."""
        computes = computes and self._engine.stock.recomputes
        one = FetchRequest(self._engine, request, None, failure, computes, is_asked=True)
        self._engine.timelines.begin(request, State.DECODE_QUEUED)
        if computes:
            self._requests[one.request_id] = one
        else:
            one.not_received(failure)
            self.ending.add(one.request_id)
        return computes

    def answered(self, request: RequestView, params: Mapping[str, Any]) -> None:
        """Prefill has answered a request that has gone on before."""
        one = self._requests.get(DecodeRequestId(request.request_id))
        if one is not None:
            one.cached_tokens = cached_tokens_in(params)
            request.tell_cached(one.cached_tokens)

    def failure_of(self, request: RequestView) -> HandOverFailed | None:
        """Why a request that has no blocks gets no KV; None if it still may."""
        one = self._requests.get(DecodeRequestId(request.request_id))
        if one is None:
            return None
        one.check()
        return one.refused

    def end(self, request: RequestView, failure: HandOverFailed) -> bool:
        """What a request fetches will not come. Returns whether it still waited for it."""
        one = self._requests.get(DecodeRequestId(request.request_id))
        if one is not None and one.is_waiting:
            self._take_away(one, failure)
        elif one is not None and not one.is_tried:
            one.check()
            one.refused = failure
        else:
            return False
        return True

    def is_tried(self, request: RequestView) -> bool:
        """Whether a request whose hand-over has failed had blocks for it."""
        return self._requests[DecodeRequestId(request.request_id)].is_tried

    def forget(self, request: RequestView) -> None:
        """The hand-over of a request that has no blocks has failed, and another one may follow."""
        one = self._requests.pop(DecodeRequestId(request.request_id))
        one.release()
        self._end_renewal(one)

    def unneeded(self, params: Mapping[str, Any]) -> None:
        """Prefill has answered, and nobody wants its KV any more: it need not keep it for a lease."""
        try:
            fetch = read_fetch(params, "", may_rendezvous=False)
        except HandOverFailed:
            return
        if fetch.manifest is not None:
            manifest = fetch.manifest
            self._engine.step.tell(UnneededOffer(fetch.prefill, manifest.request_id, fetch.name, manifest.digest))

    def matched(self, request: RequestView, num_computed_tokens: int) -> tuple[int, bool]:
        """Returns how many tokens prefill has beyond those decode has, and whether they load asynchronously."""
        one = self._requests.get(DecodeRequestId(request.request_id))
        if one is None or one.is_tried:
            return 0, False
        one.check()
        one.check_start(num_computed_tokens)
        if one.refused is None and request.computes_prompt:
            logger.info("Request %s asks for its prompt's log-probabilities, so it is computed here", one.request_id)
            one.release()
        elif one.refused is not None and one.recomputes:
            one.not_received(one.refused)
            one.release_computed()
        else:
            one.first_token = num_computed_tokens
            if one.first_token < one.end_token:
                return one.end_token - one.first_token, True
            if one.may_go_on:
                return 0, False
            self.ending.add(one.request_id)
        one.is_tried = True
        self._end_renewal(one)
        return 0, False

    def allocated(self, request: RequestView, block_ids: BlockIds, num_external_tokens: int) -> None:
        """A request was given blocks for its whole prompt. Only the first time starts a fetch: after a preemption it is
        recomputed here."""
        one = self._requests.get(DecodeRequestId(request.request_id))
        if one is None or one.is_tried:
            return
        one.is_tried = True
        if not num_external_tokens:
            self._loads_nothing(one)
            return
        self.queued.discard(one.request_id)
        try:
            groups = one.groups(block_ids, num_external_tokens)
        except HandOverFailed as error:
            self._fail(one, error)
            return
        request.tell_cached(one.cached_tokens)
        self.attempts.start(one)
        self._engine.timelines.enter(one.request_id, State.DECODE_REPORTING)
        assert one.fetch is not None
        spec = FetchSpec(
            *(one.attempt, one.request_id, one.fetch.prefill, one.fetch.manifest, one.fetch.name, one.digest),
            *(one.num_tokens, one.first_token, one.end_token, groups),
        )
        self._engine.step.tell(spec)

    def _loads_nothing(self, one: FetchRequest) -> None:
        """What is left of a prompt is computed here: another connector has loaded its beginning, or a part of a
        block is cached here. Where neither can be, vLLM has dropped what `matched` has promised."""
        self._end_renewal(one)
        one.release()
        is_little = one.end_token - one.first_token < self._engine.groups.step_tokens
        is_dropped = not (is_little or self._engine.blocks.are_shared)
        if is_dropped and one.refused is None:
            reason = f"vLLM loads none of the tokens {one.first_token} to {one.end_token}, which prefill has"
            one.refused = HandOverFailed(FailureCause.RANGE, reason)
        if one.refused is not None:
            one.not_received(one.refused)
        if not (one.recomputes if is_dropped else one.may_go_on):
            self.ending.add(one.request_id)

    def finished(self, request: RequestView) -> None:
        """A request ended, whether its KV had arrived or not."""
        request_id = DecodeRequestId(request.request_id)
        one = self._requests.pop(request_id, None)
        self._given_up.discard(request_id)
        self._engine.failures.request_ended(request_id)
        self.ending.discard(request_id)
        # In both cases vLLM has to be told: it may have been aborted before vLLM was told that it failed.
        if (one is not None and one.is_waiting) or request_id in self._failing:
            self._failing.discard(request_id)
            self._aborted.add(request_id)
        if one is None:
            return
        self.received.pop(request_id, None)
        self._end_renewal(one)
        if one.is_waiting:
            self._stop(one, "the request has ended")
            one.release(one.attempt)
        elif not one.is_tried:
            if not request.is_stand_in:
                one.check()
            one.release()

    def kept(self, request_id: str) -> None:
        """Another connector keeps the blocks of a request that has just ended: they are free when both release them."""
        ended = DecodeRequestId(request_id)
        # vLLM frees a request as soon as one connector releases it (vllm#46240): it is told of the other one only.
        self._aborted.discard(ended)
        self.attempts.kept(ended)

    def collect(
        self, failures: Iterable[tuple[int, HandOverFailed]], finished: Iterable[int]
    ) -> tuple[set[DecodeRequestId], set[DecodeRequestId]]:
        """Takes what the workers have reported, and ends the requests that have timed out. Returns the requests that no
        longer wait, and those of them whose KV has not arrived."""
        ended = set(finished)
        for number, failure in failures:
            one = self.attempts.find_waiting(number)
            if one is None:
                continue
            if number in ended:
                self.attempts.stop_waiting(one)
            else:
                # Ranks that saw no failure would wait forever for KV that is no longer sent to them.
                self._stop(one, "it has failed")
            self._fail(one, failure)
        late = f"its KV has not come within {self._engine.settings.handover_timeout_seconds:g} s (handover_timeout)"
        for number in self.attempts.deadlines.take_due(self._engine.clock.now_seconds()):
            one = self.attempts.find_waiting(number)
            if one is not None and number not in ended:
                self._take_away(one, HandOverFailed(FailureCause.DEADLINE, late))
        received = set()
        for number in ended:
            arrived = self.attempts.all_ranks_ended(number)
            if arrived is not None:
                self._engine.step.tell(LeaseRenewal(arrived.request_id))
                self._engine.timelines.enter(arrived.request_id, State.DECODE_RESUMING)
                received.add(arrived.request_id)
                self.received[arrived.request_id] = arrived
        failed, self._failing = self._failing, set()
        aborted, self._aborted = self._aborted, set()
        return received | failed | aborted, failed

    def revoke(self, reason: str, *, adapter: int | None = None) -> None:
        """Ends every hand-over that is under way: its request fails, or is recomputed, immediately. ``adapter``: only
        those that `is_meant` selects by it."""
        for one in list(self.attempts.waiting.values()):
            if is_meant(adapter, one.request.adapter):
                self._take_away(one, HandOverFailed(FailureCause.REVOKED, reason))
        for one in [one for one in self.received.values() if is_meant(adapter, one.request.adapter)]:
            del self.received[one.request_id]
            one.not_received(HandOverFailed(FailureCause.REVOKED, reason))
            # In the next step vLLM would resume the request before it was told of a failure.
            client = self._engine.blocks.let_go(one.request_id, recomputes=one.recomputes)
            if client is not None:
                self._engine.refused.append((one.request_id, client))

    def give_up(self, num_blocks: int, cause: HandOverFailed, since_seconds: float = math.inf) -> None:
        """Ends hand-overs whose KV has not come, and that wait since then, those that were given blocks last first,
        until they had so many: they fail, or are recomputed later."""
        enough = self.attempts.num_quarantined_blocks + num_blocks
        for one in reversed([*self.attempts.waiting.values()]):
            if self.attempts.num_quarantined_blocks >= enough:
                return
            if one.begun_seconds <= since_seconds:
                self._given_up.add(one.request_id)
                self._take_away(one, cause)

    def progressed(self, request_ids: Iterable[str]) -> None:
        """These requests are computed in a step, so vLLM has resumed them with their KV."""
        for request_id in map(DecodeRequestId, request_ids):
            self._given_up.discard(request_id)
            self.received.pop(request_id, None)
            # One that is about to end is scheduled once more.
            if request_id not in self.ending:
                self._engine.failures.computed(request_id)

    def _take_away(self, one: FetchRequest, cause: HandOverFailed) -> None:
        """Fails the request's attempt, and holds its blocks because transfers into them may be in flight."""
        self._stop(one, str(cause))
        self._fail(one, cause)

    def _fail(self, one: FetchRequest, failure: HandOverFailed) -> None:
        """A request that has its blocks does not wait for KV any more, or could not begin to."""
        one.refused = failure.with_traceback(None)
        self._failing.add(one.request_id)
        # Who cannot be reached, or refuses, would not hear it.
        if failure.cause not in (FailureCause.REFUSED, FailureCause.UNREACHABLE):
            one.release_computed()
        if not one.may_be_computed:
            self.ending.add(one.request_id)
        self._engine.step.tell(LeaseRenewal(one.request_id))
        one.not_received(failure)

    def _stop(self, one: FetchRequest, reason: str) -> None:
        self.attempts.stop_waiting(one)
        self.attempts.hold(one)
        self._engine.step.tell(Withdraw(one.attempt, reason))

    def _end_renewal(self, one: FetchRequest) -> None:
        self.queued.discard(one.request_id)
        self._engine.step.tell(LeaseRenewal(one.request_id))
