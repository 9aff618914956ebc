# SPDX-License-Identifier: Apache-2.0
"""Decode: which KV its requests fetch from prefill, and how each fetch ends. One per engine, on the engine's thread.

    arrived ─► (lease renewed) ─► matched ─► allocated ─► waiting ─► received
                                     │                      └──────► failed, withdrawn, or timed out
                                     └─► refused: the request is computed here, or fails

No time is limited while a request waits for its turn and for blocks: vLLM's own requests wait as long (`Starvation`
ends what nothing else would). The timeout begins when it has blocks. In push it begins again as often as prefill says
that its request waits for its turn there, or is computed (`Impasse` says for how long others wait for its blocks).

The client's result is decided immediately: if a hand-over brings no KV, the request fails or is recomputed, according
to ``kv_load_failure_policy`` (`FailedFetches`). Its blocks are handled separately: they are taken from the request and
held until no rank has a transfer into them in flight (`FetchAttempts`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kvcached_nixl.ids import DecodeRequestId
from kvcached_nixl.scheduler.engine import BlockPool, Request
from kvcached_nixl.scheduler.failures import FailedFetches
from kvcached_nixl.scheduler.fetch_attempts import FetchAttempt, FetchAttempts
from kvcached_nixl.scheduler.fetch_request import FetchRequest
from kvcached_nixl.scheduler.terms import Terms, is_meant
from kvcached_nixl.scheduler.timelines import Timelines
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.params import asks, cached_tokens_in, read_fetch
from kvcached_nixl.wire.step import BlockIds, EndRenewal, Step, UnneededOffer, Withdraw
from kvcached_nixl.wire.timeline import State

__all__ = ["DecodeFetches"]

logger = logging.getLogger(SERVER_LOGGER)


class DecodeFetches:
    """Decode's half of `SchedulerFacade`; see the module's docstring.

    Attributes:
        attempts: those that were given blocks, and the blocks.
        failed: those that bring no KV.
    """

    def __init__(self, terms: Terms, attempts: FetchAttempts, failed: FailedFetches, timelines: Timelines) -> None:
        self._terms = terms
        self._timelines = timelines
        self.attempts = attempts
        self.failed = failed
        self._fetch_requests: dict[DecodeRequestId, FetchRequest] = {}
        self._queued: set[DecodeRequestId] = set()
        # vLLM resumes them in a later step, which may be long in coming: the engine may be paused, or out of blocks.
        self._received: dict[DecodeRequestId, FetchRequest] = {}
        # By `give_up`, until they are computed here or end.
        self._given_up: set[DecodeRequestId] = set()

    @property
    def due_at_seconds(self) -> float | None:
        """When the next request times out; None if none waits."""
        return self.attempts.due_at_seconds

    @property
    def num_waiting(self) -> int:
        """Requests that have their blocks and wait only for KV."""
        return self.attempts.num_waiting

    def waiting_now(self) -> tuple[int, float]:
        """Returns how many requests wait for KV, with blocks or without, and for how long the first timeout has run.
        May be called from any thread."""
        return len(self._queued) + self.attempts.num_waiting, self.attempts.longest_seconds()

    @property
    def num_queued(self) -> int:
        """Requests that have no blocks yet."""
        return len(self._queued)

    # ---------------------------------------------------------------------------------------------- called from vLLM

    def arrived(self, request: Request, step: Step, *, computes: bool = True) -> None:
        """A request has entered the engine. Starts renewing its lease: until it is allocated, more time may pass than
        one lease lasts.

        Args:
            computes: as for `refuse`.
        """
        params = request.params
        request_id = DecodeRequestId(request.request_id)
        if params is None or not asks(params, "do_remote_prefill") or request_id in self._fetch_requests:
            return
        fetch, refused = None, None
        try:
            fetch = read_fetch(params, request.request_id, may_rendezvous=self._terms.mode.is_push)
        except HandOverFailed as error:
            refused = error.with_traceback(None)
        fetch_request = FetchRequest(request_id, request, fetch, request.adapter, refused, computes=computes)
        fetch_request.cached_tokens = cached_tokens_in(params)
        if request.is_session:
            fetch_request.check(request, self._terms)
            self.failed.pass_over(fetch_request, step)
            return
        self._fetch_requests[request_id] = fetch_request
        self._timelines.begin(request, State.DECODE_QUEUED)
        if refused is None:
            self._queued.add(request_id)
            fetch_request.renew(step, self._terms)

    def refuse(self, request: Request, failure: HandOverFailed, *, computes: bool) -> bool:
        """A request gets no KV although it was asked for. Returns whether it is computed here, when it is its turn:
        if ``computes``, and ``kv_load_failure_policy`` says so. Else it ends with an error, whatever it waits for."""
        request_id = DecodeRequestId(request.request_id)
        computes = computes and self._terms.recomputes
        one = FetchRequest(request_id, request, None, request.adapter, failure, computes=computes)
        self._timelines.begin(request, State.DECODE_QUEUED)
        if computes:
            self._fetch_requests[request_id] = one
        else:
            self.failed.refuse(one, failure)
            self.failed.end_unless_computed(one)
        return computes

    def answered(self, request: Request, params: Mapping[str, Any]) -> None:
        """Prefill has answered a request that has gone on before."""
        fetch_request = self._fetch_requests.get(DecodeRequestId(request.request_id))
        if fetch_request is not None:
            fetch_request.cached_tokens = cached_tokens_in(params)
            request.tell_cached(fetch_request.cached_tokens)

    def failure_of(self, request: Request) -> HandOverFailed | None:
        """Why a request that has no blocks gets no KV; None if it still may."""
        fetch_request = self._fetch_requests.get(DecodeRequestId(request.request_id))
        if fetch_request is None:
            return None
        fetch_request.check(request, self._terms)
        return fetch_request.refused

    def end(self, request: Request, failure: HandOverFailed, blocks: BlockPool, step: Step) -> bool:
        """What a request fetches will not come. Returns whether it still waited for it."""
        request_id = DecodeRequestId(request.request_id)
        attempt = self.attempts.of_request(request_id)
        fetch_request = self._fetch_requests.get(request_id)
        if attempt is not None:
            self._take_away(attempt, failure, blocks, step)
        elif fetch_request is not None and not fetch_request.is_tried:
            fetch_request.check(request, self._terms)
            fetch_request.refused = failure
        else:
            return False
        return True

    def may_compute(self, request: Request) -> bool:
        """Whether a request whose attempt has failed may be computed here as it is: all of its prompt is here."""
        fetch_request = self._fetch_requests[DecodeRequestId(request.request_id)]
        return fetch_request.is_tried and fetch_request.may_be_computed

    def forget(self, request: Request, step: Step) -> None:
        """The hand-over of a request that has no blocks has failed, and another one may follow."""
        request_id = DecodeRequestId(request.request_id)
        self._fetch_requests.pop(request_id).release(step)
        self._queued.discard(request_id)
        step.tell(EndRenewal(request_id))

    def unneeded(self, params: Mapping[str, Any], step: Step) -> None:
        """Prefill has answered, and nobody wants its KV any more: it need not keep it for a lease."""
        try:
            fetch = read_fetch(params, "", may_rendezvous=False)
        except HandOverFailed:
            return
        if fetch.manifest is not None:
            manifest = fetch.manifest
            step.tell(UnneededOffer(fetch.prefill, manifest.request_id, fetch.name, manifest.digest, None))

    def matched(
        self, request: Request, num_computed_tokens: int, step: Step, *, is_producer: bool = False
    ) -> tuple[int, bool]:
        """Returns how many tokens prefill has beyond those decode has, and whether they load asynchronously.

        Args:
            is_producer: as for `FetchRequest.check_start`.
        """
        request_id = DecodeRequestId(request.request_id)
        fetch_request = self._fetch_requests.get(request_id)
        if fetch_request is None or fetch_request.is_tried:
            return 0, False
        fetch_request.check(request, self._terms)
        fetch_request.check_start(num_computed_tokens, self._terms, is_producer=is_producer)
        if fetch_request.refused is None and request.computes_prompt:
            logger.info("Request %s asks for its prompt's log-probabilities, so it is computed here", request_id)
            fetch_request.release(step)
        elif fetch_request.refused is not None and self._terms.recomputes and fetch_request.may_be_computed:
            self.failed.refuse(fetch_request, fetch_request.refused)
            self.failed.release_computed(fetch_request, step)
        else:
            missing = fetch_request.end_token - num_computed_tokens
            if missing > 0:
                return missing, True
            if fetch_request.may_go_on:
                return 0, False
            self.failed.end_unless_computed(fetch_request)
        fetch_request.is_tried = True
        self._queued.discard(request_id)
        step.tell(EndRenewal(request_id))
        return 0, False

    def allocated(self, request: Request, block_ids: BlockIds, num_external_tokens: int, step: Step) -> None:
        """A request was given blocks for its whole prompt. Only the first time starts a fetch: after a preemption it is
        recomputed here."""
        request_id = DecodeRequestId(request.request_id)
        fetch_request = self._fetch_requests.get(request_id)
        if fetch_request is None or fetch_request.is_tried:
            return
        fetch_request.is_tried = True
        self._queued.discard(request_id)
        if not num_external_tokens:
            # Another connector has loaded the beginning of the prompt, and the rest is computed here.
            step.tell(EndRenewal(request_id))
            fetch_request.release(step)
            if fetch_request.refused is not None:
                self.failed.refuse(fetch_request, fetch_request.refused)
            if not fetch_request.may_go_on:
                self.failed.end_unless_computed(fetch_request)
            return
        refused = fetch_request.refused
        first_token = fetch_request.end_token - num_external_tokens
        try:
            if refused is not None:
                raise refused
            fetch_request.check_adapter(request)
            groups = fetch_request.groups(block_ids, first_token, self._terms)
        except HandOverFailed as error:
            self.failed.fail(fetch_request, error, step)
            return
        request.tell_cached(fetch_request.cached_tokens)
        attempt = self.attempts.start(request_id, fetch_request.adapter)
        self._timelines.enter(request_id, State.DECODE_REPORTING)
        step.tell(fetch_request.spec(attempt, first_token, groups))

    def is_waiting(self, request_id: str) -> bool:
        """Whether the workers may be writing into a request's blocks."""
        return self.attempts.of_request(DecodeRequestId(request_id)) is not None

    def finished(self, request: Request, blocks: BlockPool, step: Step) -> None:
        """A request ended, whether its KV had arrived or not."""
        request_id = DecodeRequestId(request.request_id)
        fetch_request = self._fetch_requests.pop(request_id, None)
        attempt = self.attempts.of_request(request_id)
        self._given_up.discard(request_id)
        self.failed.request_ended(request_id, is_waiting=attempt is not None)
        if fetch_request is None:
            return
        self._queued.discard(request_id)
        self._received.pop(request_id, None)
        step.tell(EndRenewal(request_id))
        if attempt is not None:
            self.attempts.stop_waiting(attempt)
            self.attempts.hold(attempt, blocks)
            step.tell(Withdraw(attempt.number, "the request has ended"))
            fetch_request.release(step, attempt.number)
        elif not fetch_request.is_tried:
            if not request.is_stand_in:
                fetch_request.check(request, self._terms)
            fetch_request.release(step)

    def kept(self, request_id: str) -> None:
        """Another connector keeps the blocks of a request that has just ended: they are free when both release them.

        vLLM frees a request as soon as one connector releases it (vllm#46240). So vLLM is told of the other one only.
        """
        ended = DecodeRequestId(request_id)
        self.failed.kept(ended)
        self.attempts.kept(ended)

    # ------------------------------------------------------------------------------------------------------- results

    def collect(
        self, failures: Iterable[tuple[int, HandOverFailed]], finished: Iterable[int], blocks: BlockPool, step: Step
    ) -> tuple[set[DecodeRequestId], set[DecodeRequestId]]:
        """Takes what the workers have reported, and ends the requests that have timed out.

        Returns: requests that no longer wait, and those of them whose KV has not arrived.
        """
        ended = set(finished)
        for number, failure in failures:
            attempt = self.attempts.find_waiting(number)
            if attempt is not None:
                self._fail(attempt, failure, step)
                if number not in ended:
                    self.attempts.hold(attempt, blocks)
                    # Ranks that saw no failure would wait forever for KV that is no longer sent to them.
                    step.tell(Withdraw(number, "it has failed"))
        self._end_late(ended, blocks, step)
        received = set()
        for number in ended:
            attempt = self.attempts.all_ranks_ended(number, blocks)
            if attempt is not None:
                step.tell(EndRenewal(attempt.request_id))
                received.add(attempt.request_id)
                self._timelines.arrived(attempt.request_id)
                self._received[attempt.request_id] = self._fetch_requests[attempt.request_id]
        failed, aborted = self.failed.take()
        return received | failed | aborted, failed

    def revoke(self, reason: str, blocks: BlockPool, step: Step, *, adapter: int | None = None) -> None:
        """Ends every hand-over that is under way: its request fails, or is recomputed, immediately.

        Args:
            adapter: only requests of this LoRA adapter, or of any adapter (`ANY_ADAPTER`); None for all requests.
        """
        for attempt in self.attempts.waiting():
            if is_meant(adapter, attempt.adapter):
                self._take_away(attempt, HandOverFailed(FailureCause.REVOKED, reason), blocks, step)
        for one in [one for one in self._received.values() if is_meant(adapter, one.adapter)]:
            del self._received[one.request_id]
            self.failed.fail_received(one, HandOverFailed(FailureCause.REVOKED, reason), blocks)

    def give_up(
        self, num_blocks: int, cause: HandOverFailed, blocks: BlockPool, step: Step, since_seconds: float = math.inf
    ) -> None:
        """Ends hand-overs whose KV has not come, those that were given blocks last first, until they had so many: they
        fail, or are recomputed later.

        Args:
            since_seconds: only those that wait since then.
        """
        enough = self.attempts.num_quarantined_blocks + num_blocks
        for attempt in reversed(list(self.attempts.waiting())):
            if self.attempts.num_quarantined_blocks >= enough:
                return
            if attempt.begun_seconds <= since_seconds:
                self._given_up.add(attempt.request_id)
                self._take_away(attempt, cause, blocks, step)

    def needs_others(self, request_id: str) -> bool:
        """Whether a request has no blocks, and would wait for KV with them, or has been given up for others."""
        one = DecodeRequestId(request_id)
        return one in self._queued or one in self._given_up

    def progressed(self, request_ids: Iterable[str]) -> None:
        """These requests are computed in a step, so vLLM has resumed them with their KV."""
        for request_id in map(DecodeRequestId, request_ids):
            self._given_up.discard(request_id)
            self._received.pop(request_id, None)
            self.failed.computed(request_id)

    @property
    def received(self) -> Collection[DecodeRequestId]:
        """Requests whose KV has arrived, and which vLLM has not resumed yet."""
        return self._received.keys()

    # -------------------------------------------------------------------------------------------------------- inside

    def _end_late(self, ended: set[int], blocks: BlockPool, step: Step) -> None:
        """Fails the requests that have timed out, except attempts that the workers have just reported as finished."""
        late = f"its KV has not come within {self._terms.timeout_seconds:g} s (handover_timeout)"
        for attempt in self.attempts.take_due():
            if attempt.number not in ended:
                self._take_away(attempt, HandOverFailed(FailureCause.DEADLINE, late), blocks, step)

    def _take_away(self, attempt: FetchAttempt, cause: HandOverFailed, blocks: BlockPool, step: Step) -> None:
        """Fails the attempt, and holds its blocks because transfers into them may be in flight."""
        self._fail(attempt, cause, step)
        self.attempts.hold(attempt, blocks)
        step.tell(Withdraw(attempt.number, str(cause)))

    def _fail(self, attempt: FetchAttempt, failure: HandOverFailed, step: Step) -> None:
        self.attempts.stop_waiting(attempt)
        self.failed.fail(self._fetch_requests[attempt.request_id], failure, step, attempt=attempt.number)
