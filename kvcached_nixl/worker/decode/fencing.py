# SPDX-License-Identifier: Apache-2.0
"""Decode: ranks of prefill that may still write, and how that ends (rule R13). Once per worker, on the transfer thread.

The blocks of a failed attempt are held until each of its writers is in one of the first three states:

    heard       it was told to stop, over NIXL and repeatedly, and has answered that it has
    dead        it was a process of this host, and the kernel says that it has ended, whatever its address answers
    fenced      it has not answered for UNHEARD_SECONDS, or another engine answers in its place, and it can write over
                a network only: the gate it writes through is closed
    held        none of these is possible: it is suspended on this host, and could write past all that can be closed

That its side channel does not answer, refuses or times out says nothing about its workers. If it refuses, the attempt
fails at once, else at its deadline at the latest; in each case its blocks still wait for one of these states.

All ranks of prefill write through one gate (`transport.agent.WriteGate`). To fence one of them, a second gate is opened
for all later registrations. The first is closed when no other rank writes through it any more, or after DRAIN_SECONDS.
After that no registration that was made through it can be written.

    present ─► retired ─► closing ─► closed        its parts are told that they are fenced
                             └──► again after AGAIN_SECONDS, if it was not closed

Gates are opened and closed on a background thread, because NIXL may take long. All else is the transfer thread's.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from kvcached_nixl.deadlines import HEARD_SECONDS, Clock, Deadlines, HeardDeadlines, earliest
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.agent import WriteGate
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.worker.background import Background, Work
from kvcached_nixl.worker.decode.attempt import Attempt, Part
from kvcached_nixl.worker.transfer.context import RecentSet, WorkerContext

logger = logging.getLogger(SERVER_LOGGER)

LOOK_SECONDS = 5.0
"""Between two checks whether a writer is alive."""
UNHEARD_SECONDS = 20.0
"""A writer that has not answered for so long that it has stopped is fenced."""
DEAD_SECONDS = HEARD_SECONDS
"""Wait after a writer's process has ended, or a WRITE of it has failed: NIXL's thread still receives what the kernel of
this host has buffered."""


class ActiveWriters:
    """Ranks that may still write, and whether they are alive. ``attempts``: a view of the receiver's dict."""

    def __init__(self, context: WorkerContext, attempts: Mapping[int, Attempt]) -> None:
        self._context = context
        self._clock: Clock = context.clock
        self._attempts = attempts
        self._at: defaultdict[Peer, dict[int, None]] = defaultdict(dict)
        self._looked_at = Deadlines[Peer]()
        self._ended_at = HeardDeadlines[tuple[str, int]](context.clock.now_seconds())
        self._said_held = RecentSet[str]()

    def expect(self, part: Part, number: int) -> None:
        """From now on a rank of prefill may write; check every LOOK_SECONDS whether it is alive."""
        self._at[part.address][number] = None
        self._looked_at.setdefault(part.address, self._clock.now_seconds() + LOOK_SECONDS)

    def finished(self, attempt: Attempt) -> None:
        number = attempt.number
        for part in attempt.parts:
            part.finish()
            waiting = self._at.get(part.address)
            if waiting is not None:
                waiting.pop(number, None)
                if not waiting:
                    del self._at[part.address]
                    self._looked_at.pop(part.address, None)

    def look_after(self, attempt: Attempt) -> None:
        """Fence, or wait for the end of, the ranks that may still write for an attempt although they were asked to stop
        or cannot be asked."""
        now, number = self._clock.now_seconds(), attempt.number
        is_unheard = attempt.failed_at_seconds is not None and now - attempt.failed_at_seconds >= UNHEARD_SECONDS
        for part in attempt.parts:
            if not part.may_write:
                continue
            assert part.agent is not None
            if part.is_dead:
                self._ended_at.setdefault((part.agent, number), now + DEAD_SECONDS)
            elif (is_unheard or part.is_abandoned) and not part.fence() and part.agent not in self._said_held:
                self._said_held.add(part.agent)
                logger.warning(
                    "Rank %d of prefill at %s:%d does not say that it has stopped, and could write from this host "
                    "through shared memory, which decode cannot close. The blocks that it may write stay in quarantine "
                    "until it answers or its process ends: continue the process if it is suspended, or end it. If it "
                    "runs in another PID namespace and the KV is in device memory, its end is not visible here: run "
                    "both in one PID namespace, or set UCX_TLS to network transports only.",
                    part.address.rank,
                    part.address.host,
                    part.address.port,
                )

    def turn(self) -> float | None:
        """Do what is due now; returns when to call again, in the clock's seconds, None if nothing will be due."""
        now = self._clock.now_seconds()
        for agent, number in self._ended_at.take_due(now):
            attempt = self._attempts.get(number)
            for part in attempt.parts if attempt is not None else ():
                if part.agent == agent:
                    part.end_without("is dead")
        for address in self._looked_at.take_due(now):
            if self._at.get(address):
                self._looked_at[address] = now + LOOK_SECONDS
                self._context.peers.probe(address)
                self._look_for_ends(address)
        return earliest(self._looked_at.first_seconds, self._ended_at.first_seconds)

    def _look_for_ends(self, address: Peer) -> None:
        """Find writers whose process on this host has ended, without any message from their engine."""
        for number in list(self._at[address]):
            attempt = self._attempts.get(number)
            for part in attempt.parts if attempt is not None else ():
                if part.address == address and part.may_write and part.is_dead:
                    assert attempt is not None
                    self.look_after(attempt)
                    reason = f"the process of rank {address.rank} of prefill has ended"
                    attempt.fail(HandOverFailed(FailureCause.LOST, reason))


DRAIN_SECONDS = 60.0
"""How long registrations through a retired gate may still be written; then they fail and the gate is closed."""
AGAIN_SECONDS = 10.0
"""Time between opening two gates, so that only a few are open; and before a failed open or close is retried."""


@dataclass(eq=False)
class GateUse:
    """A gate, and the parts that are registered through it.

    Attributes:
        fenced: parts whose writers do not answer.
        closes_at_seconds: when the gate is closed at the latest, or closing is retried; None for the present gate.
        is_closing: its notifications are not read any more.
        is_tried: the background thread is closing it now.
    """

    gate: WriteGate
    metadata: bytes = field(init=False)
    parts: dict[Part, None] = field(default_factory=dict)
    fenced: set[Part] = field(default_factory=set)
    closes_at_seconds: float | None = None
    is_closing: bool = False
    is_tried: bool = False

    def __post_init__(self) -> None:
        self.metadata = self.gate.metadata()

    @property
    def is_used(self) -> bool:
        """Whether a writer that is not fenced may still write through it."""
        return any(not part.is_idle for part in self.parts if part not in self.fenced)

    def leave(self, part: Part) -> None:
        """The part's attempt is finished, or the part was not registered after all."""
        self.parts.pop(part, None)
        self.fenced.discard(part)

    def fence(self, part: Part) -> None:
        """Fence a part whose writer does not answer; `Part.end_without` is called once that cannot write any more."""
        if part in self.parts:
            self.fenced.add(part)


class WriteGates:
    """The gates of this rank's memory. ``make`` opens one, on the background thread, except for the first."""

    def __init__(self, make: Callable[[], WriteGate], works: Background, clock: Clock) -> None:
        self._make = make
        self._works = works
        self._clock = clock
        self._present: GateUse | None = None
        self._retired: list[GateUse] = []
        self._is_opening = False
        self._opens_at_seconds = 0.0

    def __iter__(self) -> Iterator[WriteGate]:
        """Gates whose notifications have to be read."""
        if self._present is not None:
            yield self._present.gate
        yield from (one.gate for one in self._retired if not one.is_closing)

    def join(self, *parts: Part) -> GateUse:
        """Return the gate for parts that are about to be registered. Opens the first one, which takes a while. Raises
        `TransportError` if it cannot."""
        if self._present is None:
            self._present = GateUse(self._make())
        self._present.parts.update(dict.fromkeys(parts))
        return self._present

    def close(self) -> None:
        """Close all gates, on the calling thread: the engine ends. `turn` must not be called afterwards."""
        for one in self._retired if self._present is None else [self._present, *self._retired]:
            one.gate.close()

    def turn(self) -> float | None:
        """Open and close gates that are due; returns when to call again, in the clock's seconds, None if never."""
        now = self._clock.now_seconds()
        due: list[float] = []
        present = self._present
        if present is not None and not self._is_opening and not all(part.is_idle for part in present.fenced):
            if now >= self._opens_at_seconds:
                self._open()
            else:
                due.append(self._opens_at_seconds)
        for one in list(self._retired):
            assert one.closes_at_seconds is not None
            is_due = now >= one.closes_at_seconds
            if is_due and not one.is_closing:
                for part in [part for part in one.parts if not (part.is_idle or part in one.fenced)]:
                    one.fenced.add(part)
                    part.cut_off()
            if one.is_tried:
                continue
            if is_due or not (one.is_used or one.is_closing):
                self._close(one)
            else:
                due.append(one.closes_at_seconds)
        return min(due, default=None)

    def _open(self) -> None:
        self._is_opening = True
        self._opens_at_seconds = self._clock.now_seconds() + AGAIN_SECONDS

        def made(use: GateUse | None, failed: str) -> None:
            self._is_opening = False
            if use is None:
                logger.error(
                    "%s. Blocks that a peer without an answer may still write stay in quarantine; trying again every "
                    "%g s",
                    failed,
                    AGAIN_SECONDS,
                )
                return
            before, self._present = self._present, use
            assert before is not None
            before.closes_at_seconds = self._clock.now_seconds() + DRAIN_SECONDS
            self._retired.append(before)

        self._works.submit(Work("opening another write gate", lambda: GateUse(self._make()), made))

    def _close(self, use: GateUse) -> None:
        use.is_closing = use.is_tried = True

        def closed(is_closed: bool | None, failed: str) -> None:
            use.is_tried = False
            if not is_closed:
                use.closes_at_seconds = self._clock.now_seconds() + AGAIN_SECONDS
                logger.error(
                    "A write gate could not be closed%s. Blocks that a peer without an answer may still write stay in "
                    "quarantine; trying again every %g s",
                    failed and f" ({failed})",
                    AGAIN_SECONDS,
                )
                return
            self._retired.remove(use)
            for part in list(use.parts):
                if not part.is_idle:
                    part.end_without("does not answer, and is now fenced: it can no longer write here")
                use.leave(part)

        self._works.submit(Work("closing a write gate", use.gate.close, closed))
