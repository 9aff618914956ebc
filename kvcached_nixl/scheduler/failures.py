# SPDX-License-Identifier: Apache-2.0
"""Why hand-overs brought no KV: counted, logged once, and told to the client under the same label. One per engine.

The metric, the log line and the client's error carry the cause's label; the last two also carry the attempt and both
requests' ids (`HandOverFailed.tags`). A worker's reason is in the log line only: it may name hosts and ports.
"""

from __future__ import annotations

import logging
from collections import Counter

from kvcached_nixl.ids import DecodeRequestId
from kvcached_nixl.scheduler.engine import BlockPool
from kvcached_nixl.scheduler.fetch_request import FetchRequest
from kvcached_nixl.scheduler.terms import Terms
from kvcached_nixl.scheduler.timelines import Timelines
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.causes import FAILED, STARVED, FailureCause, HandOverFailed
from kvcached_nixl.wire.step import EndRenewal, Step

__all__ = ["FailedFetches", "Failures"]


class FailedFetches:
    """Decode: hand-overs that bring no KV, and who has yet to be told of them. One per engine, on the engine's thread.

    If ``kv_load_failure_policy`` says so, and decode has all of the prompt, the request is recomputed here; else it
    ends with an error. Prefill is told that its offer is not needed only if the request is recomputed: one that fails
    may be sent to another decode engine, with the same offer. vLLM is told with the next step.
    """

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
        fetch_request.refused = failure.with_traceback(None)
        self._timelines.failed(request_id, failure.cause)
        self._failing.add(request_id)
        # Who cannot be reached, or refuses, would not hear it.
        if failure.cause not in (FailureCause.REFUSED, FailureCause.UNREACHABLE):
            self.release_computed(fetch_request, step, attempt)
        self.end_unless_computed(fetch_request)
        step.tell(EndRenewal(request_id))
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


logger = logging.getLogger(SERVER_LOGGER)


class Failures:
    """Counts and logs failed hand-overs; see the module's docstring. Used on the engine's thread only.

    Attributes:
        counts: failures by `FailureCause` since the last step; `SchedulerFacade.take_step` copies and clears them.
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self._told: dict[str, str] = {}
        self._ended: dict[str, str] = {}

    def not_received(
        self, request_id: str, failure: HandOverFailed, *, attempt: int | None = None, prefill_request_id: str = ""
    ) -> None:
        """Decode: a request does not get its KV. It fails, or is recomputed here."""
        tags = failure.tags(request_id, attempt=attempt, prefill_request_id=prefill_request_id)
        self.counts[failure.cause] += 1
        self._told[request_id] = f"{FAILED}{tags}"
        logger.warning("%s%s: %s", FAILED, tags, failure)

    def starved(self, request_id: str, failure: HandOverFailed) -> None:
        """A request ends because it never gets blocks, whether it is a hand-over or not."""
        self.counts[failure.cause] += 1
        told = self._told[request_id] = f"{STARVED}{failure.tags(request_id)}: {failure}"
        logger.warning("%s", told)

    def not_offered(self, request_id: str, failure: HandOverFailed) -> None:
        """Prefill: a request's KV is not offered to decode. The request is computed all the same."""
        self.counts[failure.cause] += 1
        logger.warning("KV is not offered: %s: %s", failure.tags(prefill_request_id=request_id), failure)

    def computed(self, request_id: str) -> None:
        """The request is computed here instead: how it ends has nothing to do with the hand-over."""
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
