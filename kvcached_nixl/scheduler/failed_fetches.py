# SPDX-License-Identifier: Apache-2.0
"""Decode: hand-overs that bring no KV, and who has yet to be told of them. One per engine, on the engine's thread.

If ``kv_load_failure_policy`` says so, and decode has all of the prompt, the request is recomputed here; else it ends
with an error. Prefill is told that its offer is not needed only if the request is recomputed: one that fails may be
sent to another decode engine, with the same offer. vLLM is told with the next step.
"""

from __future__ import annotations

from kvcached_nixl.ids import DecodeRequestId
from kvcached_nixl.scheduler.engine import BlockPool
from kvcached_nixl.scheduler.failures import Failures
from kvcached_nixl.scheduler.fetch_request import FetchRequest
from kvcached_nixl.scheduler.terms import Terms
from kvcached_nixl.scheduler.timelines import Timelines
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.step import Step

__all__ = ["FailedFetches"]


class FailedFetches:
    """See the module."""

    def __init__(self, terms: Terms, failures: Failures, timelines: Timelines) -> None:
        self._terms = terms
        self._failures = failures
        self._timelines = timelines
        # They wait with their blocks, and vLLM is yet to be told that their KV does not come.
        self._failing: set[DecodeRequestId] = set()
        # They end with an error, whatever the policy says.
        self._ending: set[DecodeRequestId] = set()
        # They have ended while they waited, so vLLM is yet to be told that they no longer do.
        self._aborted: set[DecodeRequestId] = set()
        self._ended: list[tuple[str, int]] = []

    @property
    def has_news(self) -> bool:
        """Whether vLLM has to be told of a failed, aborted or ended request in the next step."""
        return bool(self._failing or self._aborted or self._ending or self._ended)

    # ------------------------------------------------------------------------------------ by where the request is

    def refuse(self, fetch_request: FetchRequest, failure: HandOverFailed) -> None:
        """A request that does not wait gets no KV: counted, and its client is told if it ends."""
        self._timelines.failed(fetch_request.request_id, failure.cause)
        self._failures.not_received(
            fetch_request.request_id, failure, prefill_request_id=fetch_request.prefill_request_id
        )

    def pass_over(self, fetch_request: FetchRequest, step: Step) -> None:
        """Has a session computed here, whatever the policy: one that failed would go on without its beginning."""
        reason = (
            "it is a streaming session (resumable), whose blocks are filled further by later input; expected a "
            "complete prompt. It is computed here. Send kv_transfer_params with requests of one prompt each"
        )
        self._failures.not_received(fetch_request.request_id, HandOverFailed(FailureCause.PARAMETERS, reason))
        fetch_request.release(step)

    def fail(
        self, fetch_request: FetchRequest, failure: HandOverFailed, step: Step, *, attempt: int | None = None
    ) -> None:
        """A request that has its blocks does not wait for KV any more.

        Args:
            attempt: what it has waited for; None if it could not begin one.
        """
        request_id = fetch_request.request_id
        fetch_request.refused = failure
        self._timelines.failed(request_id, failure.cause)
        self._failing.add(request_id)
        # Who cannot be reached, or refuses, would not hear it.
        if failure.cause not in (FailureCause.REFUSED, FailureCause.UNREACHABLE):
            self.release_computed(fetch_request, step, attempt)
        self.end_unless_computed(fetch_request)
        step.unrenewed.append(request_id)
        self._failures.not_received(
            request_id, failure, attempt=attempt, prefill_request_id=fetch_request.prefill_request_id
        )

    def fail_received(self, fetch_request: FetchRequest, failure: HandOverFailed, blocks: BlockPool) -> None:
        """A request has its KV, and may not use it; vLLM has not resumed it yet."""
        self.refuse(fetch_request, failure)
        # In the next step vLLM would resume the request before it was told of a failure.
        recomputes = self._terms.recomputes and fetch_request.may_be_computed
        client = blocks.let_go(fetch_request.request_id, recomputes=recomputes)
        if client is not None:
            self._ended.append((fetch_request.request_id, client))

    def end_unless_computed(self, fetch_request: FetchRequest) -> None:
        """The request ends, whatever the policy says, if decode does not have all of its prompt."""
        if not fetch_request.may_be_computed:
            self._ending.add(fetch_request.request_id)

    def release_computed(self, fetch_request: FetchRequest, step: Step, attempt: int | None = None) -> None:
        """Tells prefill that its offer is not needed, if the request is computed here, and the offer is of its prompt:
        at once, or when ``attempt`` is over."""
        if self._terms.recomputes and fetch_request.may_be_computed and fetch_request.has_own_offer:
            fetch_request.release(step, attempt)

    # -------------------------------------------------------------------------------------- what happens to it then

    def computed(self, request_id: DecodeRequestId) -> None:
        """A step computes the request, so vLLM has resumed it. One that is about to end is scheduled once more."""
        if request_id not in self._ending:
            self._failures.computed(request_id)

    def request_ended(self, request_id: DecodeRequestId, *, is_waiting: bool) -> None:
        """A request of decode has ended, whatever has become of its hand-over.

        Args:
            is_waiting: for its KV.
        """
        self._failures.request_ended(request_id)
        self._ending.discard(request_id)
        # In both cases vLLM has to be told: it may have been aborted before vLLM was told that it failed.
        if is_waiting or request_id in self._failing:
            self._failing.discard(request_id)
            self._aborted.add(request_id)

    def kept(self, request_id: DecodeRequestId) -> None:
        """Another connector keeps the blocks of a request that has just ended, so vLLM is not told of this one."""
        self._aborted.discard(request_id)

    # ---------------------------------------------------------------------------------------------- what vLLM is told

    def take(self) -> tuple[set[DecodeRequestId], set[DecodeRequestId]]:
        """Returns, since the last call, requests whose KV does not come, and those that were aborted."""
        failed, self._failing = self._failing, set()
        aborted, self._aborted = self._aborted, set()
        return failed, aborted

    def take_ending(self) -> set[DecodeRequestId]:
        """Requests, since the last call, that end with an error whatever ``kv_load_failure_policy`` says."""
        ending, self._ending = self._ending, set()
        return ending

    def take_ended(self) -> list[tuple[str, int]]:
        """(Request id, client index) of requests, since the last call, that were ended between two steps; their clients
        are yet to be told."""
        ended, self._ended = self._ended, []
        return ended
