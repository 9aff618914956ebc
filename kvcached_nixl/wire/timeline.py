# SPDX-License-Identifier: Apache-2.0
"""When a hand-over entered which state: the one record behind the histogram of states and the spans of a trace.

Each side of a hand-over has a timeline of its own, and is in one state at any moment, so the times in all its states
add up to the whole. Workers send theirs to the scheduler of their engine with the statistics of a step.

Times are those of `Clock`, in seconds. Within an engine they may be compared between processes: an engine lives on one
host, where CLOCK_MONOTONIC is the same for all. They never leave the engine (rule R6).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

MOST_MARKS = 128
"""Of one timeline: an offer may be asked for and given up any number of times."""


class State(enum.IntEnum):
    """What one side of a hand-over is doing. The lower-case name is the label of the metric and the name of the span;
    docs/metrics.md says when each begins and ends.

    The states of a rank of decode are in the order in which it goes through them.
    """

    PREFILL_QUEUED = enum.auto()
    PREFILL_COMPUTING = enum.auto()
    PREFILL_OFFERED = enum.auto()
    PREFILL_COPYING = enum.auto()
    PREFILL_HANDSHAKE = enum.auto()
    PREFILL_SENDING = enum.auto()
    DECODE_HELD = enum.auto()
    DECODE_ASKING = enum.auto()
    DECODE_QUEUED = enum.auto()
    DECODE_ALLOCATED = enum.auto()
    DECODE_HANDSHAKE = enum.auto()
    DECODE_WAITING = enum.auto()
    DECODE_MOVING = enum.auto()
    DECODE_COPYING = enum.auto()
    DECODE_VERIFYING = enum.auto()
    DECODE_REPORTING = enum.auto()
    DECODE_RESUMING = enum.auto()
    DECODE_FIRST_TOKEN = enum.auto()
    DECODE_FAILED = enum.auto()

    @property
    def label(self) -> str:
        return self.name.lower()


Lasted: TypeAlias = tuple[int, bool, float]
"""A state, whether the direction is push, and how many seconds a hand-over was in that state."""

Reported: TypeAlias = Sequence[object]
"""[attempt, trace, marks, end] of a worker's timeline, as `Timeline.reported` makes it: plain values, because they
travel in vLLM's statistics."""


class Interval(NamedTuple):
    """A state, from when to when."""

    state: State
    begin_seconds: float
    end_seconds: float


@dataclass
class Timeline:
    """See the module.

    Attributes:
        marks: (state, since when), the oldest first.
        end_seconds: when the last state ended; None until then.
    """

    marks: list[tuple[State, float]] = field(default_factory=list)
    end_seconds: float | None = None

    @property
    def state(self) -> State | None:
        return self.marks[-1][0] if self.marks else None

    def enter(self, state: State, now_seconds: float) -> None:
        """Entering the present state changes nothing."""
        if self.state is not state and len(self.marks) < MOST_MARKS:
            self.marks.append((state, now_seconds))

    def end(self, now_seconds: float) -> None:
        """The last state ends. A repeated call changes nothing."""
        if self.end_seconds is None:
            self.end_seconds = now_seconds

    def take_in(self, marks: Sequence[tuple[State, float]], end_seconds: float) -> None:
        """Put a worker's timeline in front of the present state: that state begins where the worker's ended, and the
        worker's first state where the present one had begun."""
        if self.marks and marks:
            present, begin_seconds = self.marks[-1]
            self.marks[-1:] = [(marks[0][0], begin_seconds), *marks[1:], (present, end_seconds)]

    def intervals(self) -> Iterator[Interval]:
        """All states in order, without gaps."""
        ends = [*(begin for _, begin in self.marks[1:]), self.end_seconds or 0.0]
        for (state, begin_seconds), end_seconds in zip(self.marks, ends, strict=False):
            yield Interval(state, begin_seconds, max(begin_seconds, end_seconds))

    def lasted(self) -> dict[State, float]:
        """Seconds in each state that it was in."""
        found: dict[State, float] = {}
        for one in self.intervals():
            found[one.state] = found.get(one.state, 0.0) + one.end_seconds - one.begin_seconds
        return found

    def reported(self, attempt: int = 0, trace: str = "") -> Reported:
        return [attempt, trace, [[int(state), begin] for state, begin in self.marks], self.end_seconds]

    @classmethod
    def read(cls, reported: Reported) -> tuple[int, str, Timeline]:
        """Returns the attempt (0 for an offer of prefill), the trace and the timeline of what a worker has sent."""
        attempt, trace, marks, end_seconds = reported
        assert isinstance(attempt, int) and isinstance(trace, str) and isinstance(marks, list)
        assert isinstance(end_seconds, float)
        return attempt, trace, cls([(State(state), begin) for state, begin in marks], end_seconds)
