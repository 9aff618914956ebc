# SPDX-License-Identifier: Apache-2.0
"""Decode: which KV its requests fetch from prefill, and how each fetch ends. One per engine, on the engine's thread.

    arrived ─► (lease renewed) ─► matched ─► allocated ─► waiting ─► received
                                     │                      └──────► failed, withdrawn, or timed out
                                     └─► refused: the request is computed here, or fails

The client's result is decided here, and immediately: if a hand-over brings no KV, the request fails or is recomputed,
according to ``kv_load_failure_policy``. Its blocks are handled separately: they are taken from the request and held
until no rank has a transfer into them in flight.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvcached_nixl.clock import Clock
from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.ids import DecodeRequestId
from kvcached_nixl.scheduler.engine import BlockPool, Request
from kvcached_nixl.scheduler.failures import Failures
from kvcached_nixl.scheduler.fetch_attempts import FetchAttempt, FetchAttempts
from kvcached_nixl.scheduler.fetch_request import FetchRequest
from kvcached_nixl.scheduler.terms import Terms, is_meant
from kvcached_nixl.scheduler.timelines import Timelines
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.lease import is_nameable
from kvcached_nixl.wire.params import FetchParams, asks, read_fetch
from kvcached_nixl.wire.step import BlockIds, FetchSpec, LeaseRenewal, Step, UnneededOffer
from kvcached_nixl.wire.timeline import State

__all__ = ["DecodeFetches"]

logger = logging.getLogger(SERVER_LOGGER)


class DecodeFetches:
    """Decode's half of `SchedulerFacade`; see the module's docstring.

    Attributes:
        attempts: those that were given blocks, and the blocks.
        ended: (request id, client index) of requests that were ended between two steps; their clients are yet to be
            told.
    """

    def __init__(
        self, terms: Terms, clock: Clock, attempts: FetchAttempts, failures: Failures, timelines: Timelines
    ) -> None:
        self._terms = terms
        self._clock = clock
        self._timelines = timelines
        self.attempts = attempts
        self._fetch_requests: dict[DecodeRequestId, FetchRequest] = {}
        # Timeouts start when the request arrives, whatever it waits for (rule R4).
        self._queued = Deadlines[DecodeRequestId]()
        self._failing: dict[DecodeRequestId, HandOverFailed] = {}
        self._ending: set[DecodeRequestId] = set()
        # vLLM resumes them in a later step, which may be long in coming: the engine may be paused, or out of blocks.
        self._received: dict[DecodeRequestId, int] = {}
        self.ended: list[tuple[str, int]] = []
        self._aborted: set[DecodeRequestId] = set()
        # By `give_up_one`, until they are computed here or end.
        self._given_up: set[DecodeRequestId] = set()
        self._failures = failures

    @property
    def due_at_seconds(self) -> float | None:
        """When the next request times out; None if none waits."""
        due = (self.attempts.due_at_seconds, self._queued.first_seconds)
        return min((one for one in due if one is not None), default=None)

    @property
    def num_waiting(self) -> int:
        """Requests that have their blocks and wait only for KV."""
        return self.attempts.num_waiting

    def waiting_now(self) -> tuple[int, float]:
        """Returns how many requests wait for KV, with blocks or without, and the seconds since the first one arrived.
        May be called from any thread."""
        # Not `_queued`: iterating over deadlines changes them. One that was refused waits only to be computed here.
        waiting = [
            one.arrived_at_seconds
            for request_id, one in list(self._fetch_requests.items())
            if self.attempts.of_request(request_id) is not None or not (one.is_tried or one.refused)
        ]
        return len(waiting), max(0.0, self._clock.now_seconds() - min(waiting)) if waiting else 0.0

    @property
    def num_queued(self) -> int:
        """Requests that have no blocks yet."""
        return len(self._queued)

    @property
    def has_news(self) -> bool:
        """Whether vLLM has to be told of a failed, aborted or ended request in the next step."""
        return bool(self._failing or self._aborted or self._ending or self.ended)

    # ---------------------------------------------------------------------------------------------- called from vLLM

    def arrived(self, request: Request, step: Step) -> None:
        """A request has entered the engine. Starts renewing its lease: until it is allocated, more time may pass than
        one lease lasts."""
        params = request.params
        request_id = DecodeRequestId(request.request_id)
        if params is None or not asks(params, "do_remote_prefill") or request_id in self._fetch_requests:
            return
        now = self._clock.now_seconds()
        try:
            fetch = read_fetch(params, request.request_id, may_rendezvous=self._terms.mode.is_push)
        except HandOverFailed as error:
            if request.is_session:
                self._pass_over(request, None, step)
            else:
                self._fetch_requests[request_id] = FetchRequest(None, now, request.adapter, refused=error)
                self._timelines.begin(request, State.DECODE_QUEUED)
            return
        if request.is_session:
            self._pass_over(request, fetch, step)
            return
        self._fetch_requests[request_id] = FetchRequest(fetch, now, request.adapter, request=request)
        self._timelines.begin(request, State.DECODE_QUEUED)
        self._queued[request_id] = now + self._terms.allocation_seconds
        lease_seconds = self._terms.lease_seconds if fetch.manifest is None else fetch.manifest.lease_seconds
        if is_nameable(fetch.lease_name):
            longest = self._terms.timeout_seconds
            step.renewed.append(LeaseRenewal(request_id, fetch.prefill, fetch.lease_name, lease_seconds, longest))
        else:
            logger.warning(
                "Request %s waits for the KV of %.80r, which a heartbeat cannot name: expected no comma, and at most 4 "
                "KB. Its lease cannot be renewed and lasts as long as prefill first granted. Send it with another "
                "X-Request-Id.",
                request_id,
                fetch.lease_name,
            )

    def matched(
        self,
        request: Request,
        num_computed_tokens: int,
        step: Step,
        *,
        is_stale: bool = False,
        is_producer: bool = False,
    ) -> tuple[int, bool]:
        """Returns how many tokens prefill has beyond those decode has, and whether they load asynchronously.

        Args:
            is_stale: decode's prefix cache may hold KV that other weights have computed.
            is_producer: vLLM frees blocks while a step that is under way may still write into them
                (``defer_block_free`` is for consumers), so no KV is loaded into them.
        """
        request_id = DecodeRequestId(request.request_id)
        fetch_request = self._fetch_requests.get(request_id)
        if fetch_request is None or fetch_request.is_tried:
            return 0, False
        fetch_request.check(request, self._terms)
        if fetch_request.refused is None and num_computed_tokens % self._terms.groups.step_tokens:
            reason = f"its first {num_computed_tokens} tokens end inside a block of {self._terms.groups.step_tokens}"
            fetch_request.refused = HandOverFailed(FailureCause.RANGE, reason)
        if fetch_request.refused is None and is_stale and num_computed_tokens:
            reason = "its first tokens are in the prefix cache, which may hold KV that other weights have computed"
            fetch_request.refused = HandOverFailed(
                FailureCause.REVOKED, f"{reason}. Clear the prefix cache, or wait until no request runs"
            )
        if fetch_request.refused is None and is_producer:
            reason = (
                "kv_transfer_params have do_remote_prefill, but this engine's kv_role is kv_producer: its blocks may "
                "still be written when they are allocated again. Send the request to a server with kv_consumer, or "
                "start this one with kv_both"
            )
            fetch_request.refused = HandOverFailed(FailureCause.PARAMETERS, reason)
        if fetch_request.refused is None and request.computes_prompt:
            logger.info("Request %s asks for its prompt's log-probabilities, so it is computed here", request_id)
            self._release(fetch_request, step)
        elif fetch_request.refused is not None and self._terms.recomputes and fetch_request.may_be_computed:
            self._refuse(request_id, fetch_request.refused)
            self._release_computed(fetch_request, step)
        else:
            missing = fetch_request.end_token - num_computed_tokens
            if missing > 0:
                return missing, True
            if fetch_request.may_be_computed:
                return 0, False
            self._ending.add(request_id)
        fetch_request.is_tried = True
        self._queued.pop(request_id, None)
        step.unrenewed.append(request_id)
        return 0, False

    def allocated(self, request: Request, block_ids: BlockIds, num_external_tokens: int, step: Step) -> None:
        """A request was given blocks for its whole prompt. Only the first time starts a fetch: after a preemption it is
        recomputed here."""
        request_id = DecodeRequestId(request.request_id)
        fetch_request = self._fetch_requests.get(request_id)
        if fetch_request is None or fetch_request.is_tried:
            return
        fetch_request.is_tried = True
        self._queued.pop(request_id, None)
        if not num_external_tokens:
            # Another connector has loaded the beginning of the prompt, and the rest is computed here.
            step.unrenewed.append(request_id)
            self._release(fetch_request, step)
            if fetch_request.refused is not None:
                self._refuse(request_id, fetch_request.refused)
            if not fetch_request.may_be_computed:
                self._ending.add(request_id)
            return
        refused = fetch_request.refused
        first_token = fetch_request.end_token - num_external_tokens
        try:
            if refused is not None:
                raise refused
            groups = fetch_request.groups(block_ids, first_token, self._terms)
        except HandOverFailed as error:
            self._refuse(request_id, error)
            self._failing[request_id] = error
            step.unrenewed.append(request_id)
            self._release_computed(fetch_request, step)
            if not fetch_request.may_be_computed:
                self._ending.add(request_id)
            return
        assert fetch_request.fetch is not None
        fetch = fetch_request.fetch
        due_at_seconds = fetch_request.arrived_at_seconds + self._terms.timeout_seconds
        self._timelines.enter(request_id, State.DECODE_REPORTING)
        step.fetches.append(
            FetchSpec(
                self.attempts.start(request_id, fetch_request.adapter, due_at_seconds),
                request_id,
                fetch.prefill,
                fetch.manifest,
                fetch.name,
                fetch_request.digest,
                fetch_request.num_tokens,
                first_token,
                fetch_request.end_token,
                groups,
                is_traced=bool(self._timelines.trace_of(request_id)),
            )
        )

    def is_waiting(self, request_id: str) -> bool:
        """Whether the workers may be writing into a request's blocks."""
        return self.attempts.of_request(DecodeRequestId(request_id)) is not None

    def finished(self, request: Request, blocks: BlockPool, step: Step) -> None:
        """A request ended, whether its KV had arrived or not."""
        request_id = DecodeRequestId(request.request_id)
        fetch_request = self._fetch_requests.pop(request_id, None)
        self._failures.request_ended(request_id)
        self._given_up.discard(request_id)
        if fetch_request is None:
            return
        self._queued.pop(request_id, None)
        self._received.pop(request_id, None)
        self._ending.discard(request_id)
        step.unrenewed.append(request_id)
        attempt = self.attempts.of_request(request_id)
        if attempt is not None:
            self.attempts.stop_waiting(attempt)
            self.attempts.hold(attempt, blocks)
            step.withdrawn[attempt.number] = "the request has ended"
            self._release(fetch_request, step, attempt.number)
            self._aborted.add(request_id)
        elif request_id in self._failing:
            # It was aborted before vLLM was told that it failed.
            del self._failing[request_id]
            self._aborted.add(request_id)
        elif not fetch_request.is_tried:
            if not request.is_stand_in:
                fetch_request.check(request, self._terms)
            self._release(fetch_request, step)

    def kept(self, request_id: str) -> None:
        """Another connector keeps the blocks of a request that has just ended: they are free when both release them.

        vLLM frees a request as soon as one connector releases it (vllm#46240). So vLLM is told of the other one only.
        """
        ended = DecodeRequestId(request_id)
        self._aborted.discard(ended)
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
                self._end(attempt, failure, step)
                if number not in ended:
                    self.attempts.hold(attempt, blocks)
                    # Ranks that saw no failure would wait forever for KV that is no longer sent to them.
                    step.withdrawn[number] = "it has failed"
        self._end_late(ended, blocks, step)
        received = set()
        for number in ended:
            attempt = self.attempts.all_ranks_ended(number, blocks)
            if attempt is not None:
                step.unrenewed.append(attempt.request_id)
                received.add(attempt.request_id)
                self._timelines.arrived(attempt.request_id)
                self._received[attempt.request_id] = attempt.adapter
        failed, self._failing = set(self._failing), {}
        aborted, self._aborted = self._aborted, set()
        return received | failed | aborted, failed

    def revoke(self, reason: str, blocks: BlockPool, step: Step, *, adapter: int | None = None) -> None:
        """Ends every hand-over that is under way: its request fails, or is recomputed, immediately.

        Args:
            adapter: only requests of this LoRA adapter, or of any adapter (`ANY_ADAPTER`); None for all requests.
        """
        for attempt in self.attempts.waiting():
            if is_meant(adapter, attempt.adapter):
                self._take_away(attempt, HandOverFailed(FailureCause.REVOKED, reason), blocks, step)
        for request_id in [one for one, used in self._received.items() if is_meant(adapter, used)]:
            del self._received[request_id]
            self._refuse(request_id, HandOverFailed(FailureCause.REVOKED, reason))
            fetch_request = self._fetch_requests.get(request_id)
            # In the next step vLLM would resume the request before it was told of a failure.
            client = blocks.let_go(
                request_id, recomputes=self._terms.recomputes and bool(fetch_request and fetch_request.may_be_computed)
            )
            if client is not None:
                self.ended.append((request_id, client))

    def give_up_one(self, blocks: BlockPool, step: Step) -> None:
        """Ends the hand-over that was given blocks last, whose KV has not come: it fails, or is recomputed later."""
        for attempt in list(self.attempts.waiting())[-1:]:
            reason = "another engine on decode's device waits for memory, and its KV has not come yet"
            self._given_up.add(attempt.request_id)
            self._take_away(attempt, HandOverFailed(FailureCause.REVOKED, reason), blocks, step)

    def needs_others(self, request_id: str) -> bool:
        """Whether a request has no blocks, and would wait for KV with them, or has been given up for others."""
        one = DecodeRequestId(request_id)
        return one in self._queued or one in self._given_up

    def progressed(self, request_ids: Iterable[str]) -> None:
        """These requests are computed in a step, so vLLM has resumed them with their KV."""
        for request_id in request_ids:
            self._given_up.discard(DecodeRequestId(request_id))
            self._received.pop(DecodeRequestId(request_id), None)
            # One that is about to end for its hand-over is scheduled once more.
            if request_id not in self._ending:
                self._failures.computed(request_id)

    @property
    def num_received(self) -> int:
        """Requests whose KV has arrived, and which vLLM has not resumed yet."""
        return len(self._received)

    def take_ending(self) -> set[DecodeRequestId]:
        """Requests, since the last call, that end with an error whatever ``kv_load_failure_policy`` says."""
        ending, self._ending = self._ending, set()
        return ending

    # -------------------------------------------------------------------------------------------------------- inside

    def _end_late(self, ended: set[int], blocks: BlockPool, step: Step) -> None:
        """Fails the requests that have timed out, except attempts that the workers have just reported as finished."""
        now, late = self._clock.now_seconds(), f"its KV has not come within {self._terms.timeout_seconds:g} s"
        for attempt in self.attempts.take_due(now):
            if attempt.number not in ended:
                self._take_away(attempt, HandOverFailed(FailureCause.DEADLINE, late), blocks, step)
        for request_id in self._queued.take_due(now):
            reason = f"it was given no blocks within {self._terms.allocation_seconds:g} s (allocation_timeout)"
            self._give_up_queued(request_id, HandOverFailed(FailureCause.NO_BLOCKS, reason), step)

    def _take_away(self, attempt: FetchAttempt, cause: HandOverFailed, blocks: BlockPool, step: Step) -> None:
        """Fails the attempt, and holds its blocks because transfers into them may be in flight."""
        self._end(attempt, cause, step)
        self.attempts.hold(attempt, blocks)
        step.withdrawn[attempt.number] = str(cause)

    def _give_up_queued(self, request_id: DecodeRequestId, cause: HandOverFailed, step: Step) -> None:
        """The request is still in vLLM's waiting queue: it ends, or is computed here when vLLM schedules it."""
        fetch_request = self._fetch_requests[request_id]
        step.unrenewed.append(request_id)
        if fetch_request.request is not None:
            fetch_request.check(fetch_request.request, self._terms)
        self._release(fetch_request, step)
        if self._terms.recomputes:
            # `matched` decides whether it may be computed at all, when vLLM schedules it.
            fetch_request.refused = fetch_request.refused or cause
        else:
            fetch_request.is_tried = True
            self._refuse(request_id, cause)
            self._ending.add(request_id)

    def _refuse(self, request_id: DecodeRequestId, failure: HandOverFailed) -> None:
        self._timelines.failed(request_id, failure.cause)
        self._failures.not_received(request_id, failure, prefill_request_id=self._prefill_request_id(request_id))

    def _prefill_request_id(self, request_id: DecodeRequestId) -> str:
        fetch_request = self._fetch_requests.get(request_id)
        fetch = None if fetch_request is None else fetch_request.fetch
        return "" if fetch is None or fetch.manifest is None else fetch.manifest.request_id

    def _end(self, attempt: FetchAttempt, failure: HandOverFailed, step: Step) -> None:
        """Ends the request's wait with a failure; its client is told with the next output."""
        self.attempts.stop_waiting(attempt)
        request_id = attempt.request_id
        self._timelines.failed(request_id, failure.cause)
        self._failing[request_id] = failure
        fetch_request = self._fetch_requests.get(request_id)
        if fetch_request is not None:
            # Who cannot be reached, or refuses, would not hear it.
            if failure.cause not in (FailureCause.REFUSED, FailureCause.UNREACHABLE):
                self._release_computed(fetch_request, step, attempt.number)
            if not fetch_request.may_be_computed:
                self._ending.add(request_id)
        step.unrenewed.append(request_id)
        prefill_request_id = self._prefill_request_id(request_id)
        self._failures.not_received(request_id, failure, attempt=attempt.number, prefill_request_id=prefill_request_id)

    def _pass_over(self, request: Request, fetch: FetchParams | None, step: Step) -> None:
        """Has the session computed here, whatever the policy: one that failed would go on without its beginning."""
        reason = (
            "it is a streaming session (resumable), whose blocks are filled further by later input; expected a "
            "complete prompt. It is computed here. Send kv_transfer_params with requests of one prompt each"
        )
        self._refuse(DecodeRequestId(request.request_id), HandOverFailed(FailureCause.PARAMETERS, reason))
        fetch_request = FetchRequest(fetch, self._clock.now_seconds())
        fetch_request.check(request, self._terms)
        self._release(fetch_request, step)

    def _release_computed(self, fetch_request: FetchRequest, step: Step, attempt: int | None = None) -> None:
        """As `_release`, if the request is computed here, and the offer is of its prompt. One that fails may be sent to
        another decode engine, with the same offer."""
        if self._terms.recomputes and fetch_request.may_be_computed and fetch_request.has_own_offer:
            self._release(fetch_request, step, attempt)

    def _release(self, fetch_request: FetchRequest, step: Step, attempt: int | None = None) -> None:
        """Tells prefill that decode does not need the offer's KV (vllm#41269): at once, or when ``attempt`` is over."""
        fetch = fetch_request.fetch
        # The end of a registration frees its offer. A release by name might count for a later request of that name.
        if fetch is not None and (attempt is None or fetch.manifest is not None):
            request_id = "" if fetch.manifest is None else fetch.manifest.request_id
            step.released.append(UnneededOffer(fetch.prefill, request_id, fetch.name, fetch_request.digest, attempt))
