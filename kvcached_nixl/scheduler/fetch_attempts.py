# SPDX-License-Identifier: Apache-2.0
"""Decode: attempts to fetch KV, the blocks that they fill, and who has yet to be told of those that fail. One per
engine, on the engine's thread.

    WAITING ─── every rank has reported ─────────────────────────────────────────► forgotten: the KV has arrived
       │
       └─ failed, timed out, revoked, aborted ─► OVER, its blocks held ── every rank has reported ─► blocks are free

A request ends at once when its attempt does. Its blocks do not: they are taken from it, and free when no rank has a
transfer into them in flight (rules R2 and R9).
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.ids import DecodeRequestId
from kvcached_nixl.scheduler.context import EngineContext
from kvcached_nixl.scheduler.fetch_request import FetchRequest
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.messages import draw_attempt
from kvcached_nixl.wire.step import EndRenewal

__all__ = ["FailedFetches", "FetchAttempts"]


class FetchAttempts:
    """Requests that were given blocks, by the numbers of their attempts; see the module.

    Attributes:
        num_quarantined_blocks: blocks held for requests that ended without KV.
    """

    def __init__(self, engine: EngineContext) -> None:
        self._engine = engine
        # Those of which not every rank has reported the end.
        self._attempts: dict[int, FetchRequest] = {}
        self._waiting: dict[DecodeRequestId, FetchRequest] = {}
        self._deadlines = Deadlines[int]()
        self._kept_by_others: dict[DecodeRequestId, set[int]] = {}
        self.num_quarantined_blocks = 0

    @property
    def due_at_seconds(self) -> float | None:
        """When the next attempt times out; None if none waits."""
        return self._deadlines.first_seconds

    @property
    def num_waiting(self) -> int:
        """Requests that have their blocks and wait only for KV."""
        return len(self._waiting)

    def waiting(self) -> list[FetchRequest]:
        """Returns a copy, those that were given blocks first in front: the caller may end them."""
        return list(self._waiting.values())

    def of_request(self, request_id: str) -> FetchRequest | None:
        """Returns a request that waits."""
        return self._waiting.get(DecodeRequestId(request_id))

    def find_waiting(self, number: int) -> FetchRequest | None:
        one = self._attempts.get(number)
        return one if one is not None and one.is_waiting else None

    def start(self, one: FetchRequest) -> None:
        """A request was given blocks, and waits. Its timeout begins."""
        one.attempt, one.is_waiting = draw_attempt(), True
        one.begun_seconds = self._engine.clock.now_seconds()
        self._attempts[one.attempt] = self._waiting[one.request_id] = one
        self._begin_timeout(one)

    def known(self, numbers: Iterable[int]) -> None:
        """Prefill has not computed what these wait for yet, and will: their timeouts begin again."""
        for one in filter(None, map(self.find_waiting, numbers)):
            self._begin_timeout(one)

    def _begin_timeout(self, one: FetchRequest) -> None:
        one.since_seconds = self._engine.clock.now_seconds()
        self._deadlines[one.attempt] = one.since_seconds + self._engine.terms.timeout_seconds

    def longest_seconds(self) -> float:
        """Returns for how long the first timeout has run; 0 if none does. May be called from any thread."""
        since = [one.since_seconds for one in self.waiting()]
        return max(0.0, self._engine.clock.now_seconds() - min(since)) if since else 0.0

    def take_due(self) -> list[FetchRequest]:
        """Returns the waiting ones whose time is over. Their deadlines are forgotten."""
        return [self._attempts[number] for number in self._deadlines.take_due(self._engine.clock.now_seconds())]

    def stop_waiting(self, one: FetchRequest) -> None:
        """The request goes on without its attempt, or has ended."""
        one.is_waiting = False
        self._deadlines.pop(one.attempt, None)
        del self._waiting[one.request_id]

    def hold(self, one: FetchRequest) -> None:
        """Takes the blocks from the request, until every rank has reported that nothing is in flight into them."""
        before = self._engine.holds.num_blocks
        self._engine.holds.take(self._engine.blocks, one.request_id, one.attempt)
        one.is_held = True
        self.num_quarantined_blocks += self._engine.holds.num_blocks - before

    def all_ranks_ended(self, number: int) -> FetchRequest | None:
        """No rank has a transfer of the attempt in flight. Frees its blocks, if they are held.

        Returns: its request, if that still waits: all its KV has arrived.
        """
        one = self._attempts.pop(number, None)
        if one is None:
            return None
        if one.is_waiting:
            self.stop_waiting(one)
            return one
        if one.is_held and number not in self._kept_by_others.get(one.request_id, ()):
            self._give_back(number)
        return None

    def kept(self, request_id: DecodeRequestId) -> None:
        """Another connector keeps the blocks of a request that has just ended: they are free when both release them."""
        held = {one.attempt for one in self._attempts.values() if one.is_held and one.request_id == request_id}
        if held:
            self._kept_by_others[request_id] = held

    def let_go(self, request_ids: Iterable[str]) -> None:
        """Other connectors have released the blocks of these requests."""
        for request_id in map(DecodeRequestId, request_ids):
            for number in self._kept_by_others.pop(request_id, ()):
                if number not in self._attempts:
                    self._give_back(number)

    def _give_back(self, number: int) -> None:
        before = self._engine.holds.num_blocks
        self._engine.holds.give_back(self._engine.blocks, number)
        self.num_quarantined_blocks -= before - self._engine.holds.num_blocks


class FailedFetches:
    """Hand-overs that bring no KV, and who has yet to be told of them.

    If ``kv_load_failure_policy`` says so, and decode has all of the prompt, the request is recomputed here; else it
    ends with an error. Prefill is told that its offer is not needed only if the request is recomputed: one that fails
    may be sent to another decode engine, with the same offer. vLLM is told with the next step.
    """

    def __init__(self, engine: EngineContext) -> None:
        self._engine = engine
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

    def refuse(self, one: FetchRequest, failure: HandOverFailed) -> None:
        """A request does not get its KV: counted, and its client is told if it ends."""
        self._engine.failures.not_received(
            one.request_id, failure, attempt=one.attempt or None, prefill_request_id=one.prefill_request_id
        )

    def pass_over(self, one: FetchRequest) -> None:
        """Has a session computed here, whatever the policy: one that failed would go on without its beginning."""
        reason = (
            "it is a streaming session (resumable), whose blocks are filled further by later input; expected a "
            "complete prompt. It is computed here. Send kv_transfer_params with requests of one prompt each"
        )
        self._engine.failures.not_received(one.request_id, HandOverFailed(FailureCause.PARAMETERS, reason))
        one.release()

    def fail(self, one: FetchRequest, failure: HandOverFailed) -> None:
        """A request that has its blocks does not wait for KV any more, or could not begin to."""
        one.refused = failure.with_traceback(None)
        self._failing.add(one.request_id)
        # Who cannot be reached, or refuses, would not hear it.
        if failure.cause not in (FailureCause.REFUSED, FailureCause.UNREACHABLE):
            self.release_computed(one)
        self.end_unless_computed(one)
        self._engine.step.tell(EndRenewal(one.request_id))
        self.refuse(one, failure)

    def fail_received(self, one: FetchRequest, failure: HandOverFailed) -> None:
        """A request has its KV, and may not use it; vLLM has not resumed it yet."""
        self.refuse(one, failure)
        # In the next step vLLM would resume the request before it was told of a failure.
        client = self._engine.blocks.let_go(one.request_id, recomputes=one.recomputes)
        if client is not None:
            self._ended.append((one.request_id, client))

    def end_unless_computed(self, one: FetchRequest) -> None:
        """The request ends, whatever the policy says, if decode does not have all of its prompt."""
        if not one.may_be_computed:
            self._ending.add(one.request_id)

    def release_computed(self, one: FetchRequest) -> None:
        """Tells prefill that its offer is not needed, if the request is computed here, and the offer is of its prompt:
        at once, or when its attempt is over."""
        if one.recomputes and one.has_own_offer:
            one.release(one.attempt or None)

    # -------------------------------------------------------------------------------------- what happens to it then

    def computed(self, request_id: DecodeRequestId) -> None:
        """A step computes the request, so vLLM has resumed it. One that is about to end is scheduled once more."""
        if request_id not in self._ending:
            self._engine.failures.computed(request_id)

    def request_ended(self, request_id: DecodeRequestId, *, is_waiting: bool) -> None:
        """A request of decode has ended, whatever has become of its hand-over.

        Args:
            is_waiting: for its KV.
        """
        self._engine.failures.request_ended(request_id)
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
