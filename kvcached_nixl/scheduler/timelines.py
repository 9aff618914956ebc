# SPDX-License-Identifier: Apache-2.0
"""The timelines of an engine's hand-overs, from a request's arrival on: what becomes of them for the metrics and for
traces. One per engine, on the engine's thread.

A timeline begins and ends here. What a rank does with a hand-over in between is in its own timeline, which comes with
the statistics of a step; of decode's ranks the slowest one counts, because the request waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.scheduler.engine import Request
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.timeline import Lasted, Reported, State, Timeline

__all__ = ["Spans", "Timelines"]


class Spans(Protocol):
    """Makes spans of timelines; implemented by `adapter.tracing.EngineSpans`. Never raises for what a client sent."""

    def trace_of(self, request: Request) -> str:
        """The trace that a request belongs to, as a W3C ``traceparent``; "" if it belongs to none."""
        ...

    def add(self, trace: str, timeline: Timeline, attributes: dict[str, str]) -> None:
        """Adds a span for each state of a timeline that has ended."""
        ...


@dataclass
class _Followed:
    """A request's hand-over.

    Attributes:
        trace: "" if it is not traced.
        slowest: the timeline of the rank of decode that ended last.
        cause: of its failure; "" if it has not failed.
    """

    timeline: Timeline
    trace: str
    slowest: Timeline | None = None
    cause: str = ""


class Timelines:
    """See the module.

    Args:
        spans: None if nothing is traced.

    Attributes:
        lasted: for the metrics, since `take_lasted` was last called.
    """

    def __init__(self, clock: Clock, spans: Spans | None, *, is_push: bool) -> None:
        self._clock = clock
        self._spans = spans
        self._is_push = is_push
        self._followed: dict[str, _Followed] = {}
        # Those of decode that vLLM has not answered with a token yet.
        self._unanswered: set[str] = set()
        self.lasted: list[Lasted] = []

    def __len__(self) -> int:
        """Hand-overs that are followed."""
        return len(self._followed)

    def begin(self, request: Request, state: State) -> None:
        """A request has arrived that hands over, or is handed over to; or decode has asked for it."""
        request_id = request.request_id
        if request_id not in self._followed:
            trace = "" if self._spans is None else self._spans.trace_of(request)
            self._followed[request_id] = _Followed(Timeline(), trace)
        self.enter(request_id, state)
        if state is State.DECODE_QUEUED:
            self._unanswered.add(request_id)

    def enter(self, request_id: str, state: State) -> None:
        """A hand-over is in another state; ignored if it is not followed (any more)."""
        followed = self._followed.get(request_id)
        if followed is not None:
            followed.timeline.enter(state, self._clock.now_seconds())

    def trace_of(self, request_id: str) -> str:
        """The trace that a hand-over belongs to; "" if it is not traced."""
        followed = self._followed.get(request_id)
        return "" if followed is None else followed.trace

    def failed(self, request_id: str, cause: FailureCause) -> None:
        """A hand-over of decode brings no KV."""
        followed = self._followed.get(request_id)
        if followed is not None:
            self._take_in(followed)
            followed.cause = followed.cause or cause.label
            followed.timeline.enter(State.DECODE_FAILED, self._clock.now_seconds())

    def arrived(self, request_id: str) -> None:
        """Every rank has the KV of a request."""
        followed = self._followed.get(request_id)
        if followed is not None:
            self._take_in(followed)
            followed.timeline.enter(State.DECODE_RESUMING, self._clock.now_seconds())

    def computed(self, request_ids: Iterable[str]) -> None:
        """Requests are computed in a step."""
        if not self._unanswered:
            return
        for request_id in self._unanswered.intersection(request_ids):
            followed = self._followed[request_id]
            if followed.timeline.state is not State.DECODE_FAILED:
                followed.timeline.enter(State.DECODE_FIRST_TOKEN, self._clock.now_seconds())

    @property
    def awaits_tokens(self) -> bool:
        """Whether a hand-over ends with the next token of its request."""
        return bool(self._unanswered)

    def answered(self, request_ids: Iterable[str]) -> None:
        """Requests have got a token: hand-overs of decode end with the first one."""
        for request_id in self._unanswered.intersection(request_ids):
            self.end(request_id)

    def end(self, request_id: str) -> None:
        """A hand-over has ended here, or its request has; ignored if it is not followed (any more)."""
        followed = self._followed.pop(request_id, None)
        self._unanswered.discard(request_id)
        if followed is None:
            return
        self._take_in(followed)
        followed.timeline.end(self._clock.now_seconds())
        attributes = {"kvcached_nixl.request_id": request_id}
        if followed.cause:
            attributes["kvcached_nixl.cause"] = followed.cause
        self._add(followed.trace, followed.timeline, attributes)

    def take(self, reported: Iterable[tuple[str, Reported]]) -> None:
        """Take the timelines of workers.

        Args:
            reported: with each, the request of decode that its attempt is for; "" if it does not wait any more.
        """
        for request_id, one in reported:
            attempt, trace, timeline = Timeline.read(one)
            followed = self._followed.get(request_id)
            if not attempt:
                self._add(trace, timeline, {})
            elif followed is not None and _end_of(followed.slowest) <= _end_of(timeline):
                followed.slowest = timeline

    def take_lasted(self) -> list[Lasted]:
        """Returns, and forgets, what the metrics have not counted yet."""
        lasted, self.lasted = self.lasted, []
        return lasted

    def _take_in(self, followed: _Followed) -> None:
        slowest, followed.slowest = followed.slowest, None
        if slowest is not None and followed.timeline.state is State.DECODE_REPORTING:
            followed.timeline.take_in(slowest.marks, _end_of(slowest))

    def _add(self, trace: str, timeline: Timeline, attributes: dict[str, str]) -> None:
        self.lasted += [(int(state), self._is_push, seconds) for state, seconds in timeline.lasted().items()]
        if trace and self._spans is not None:
            attributes["kvcached_nixl.direction"] = "push" if self._is_push else "pull"
            self._spans.add(trace, timeline, attributes)


def _end_of(timeline: Timeline | None) -> float:
    return float("-inf") if timeline is None or timeline.end_seconds is None else timeline.end_seconds
