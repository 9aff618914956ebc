# SPDX-License-Identifier: Apache-2.0
"""Decode: ranks of prefill that may still write, and how that ends (rule R13). Once per worker, on the transfer thread.

What an attempt that has failed may still be written is nobody's until every writer of its has an end:

    heard       it is told to stop, over NIXL, again and again, and says that it has
    gone        it was a process of this host, and the kernel says that it has ended; whatever its address answers
    fenced      it has not answered for UNHEARD_SECONDS, or another engine answers in its place, and it could write over
                a network only: what it writes through is closed (`gates`)
    held        neither can be: it stands still on this host, and could write from there past all that can be closed

That its side channel does not answer, refuses or times out says nothing of its workers: the client hears of it at once,
and the blocks wait for one of these all the same.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping

from kvcached_nixl.clock import Clock
from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.worker.decode.attempt import Attempt
from kvcached_nixl.worker.decode.write_part import WritePart
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.recent_set import RecentSet

__all__ = ["ActiveWriters"]

logger = logging.getLogger(SERVER_LOGGER)

LOOK_SECONDS = 5.0
"""Between two looks at whether a writer lives."""
UNHEARD_SECONDS = 20.0
"""One that has not said for so long that it has stopped is fenced."""
DEAD_SECONDS = 2.0
"""After a writer's process has ended: what this host's kernel still has of it is taken in by NIXL's thread."""
STILL_SECONDS = 1.0
"""Nobody has turned for so long: this process stood still, NIXL's thread with it."""


class ActiveWriters:
    """See the module.

    Args:
        attempts: those that are not over, by their numbers; somebody else's.
    """

    def __init__(self, context: WorkerContext, clock: Clock, attempts: Mapping[int, Attempt]) -> None:
        self._context = context
        self._clock = clock
        self._attempts = attempts
        self._at: defaultdict[Peer, dict[int, None]] = defaultdict(dict)
        self._looked_at = Deadlines[Peer]()
        self._failed_at: dict[int, float] = {}
        self._ended_at = Deadlines[tuple[str, int]]()
        self._is_put_off: set[tuple[str, int]] = set()
        self._turned_at_seconds = clock.now_seconds()
        self._said_held = RecentSet[str]()

    def expect(self, part: WritePart, number: int) -> None:
        """From now on a rank of prefill may write, and is asked now and then whether it lives."""
        self._at[part.address][number] = None
        self._looked_at.setdefault(part.address, self._clock.now_seconds() + LOOK_SECONDS)

    def failed(self, number: int) -> None:
        """An attempt wants nothing any more."""
        self._failed_at[number] = self._clock.now_seconds()

    def finished(self, attempt: Attempt) -> None:
        """Nobody writes any more for an attempt."""
        number = attempt.number
        self._failed_at.pop(number, None)
        for part in attempt.parts:
            if isinstance(part, WritePart):
                part.finish()
            waiting = self._at.get(part.address)
            if waiting is not None:
                waiting.pop(number, None)
                if not waiting:
                    del self._at[part.address]
                    self._looked_at.pop(part.address, None)

    def may_write(self, agent: str) -> bool:
        """Whether an agent was told of blocks, and has not said that it has stopped."""
        parts = (part for attempt in self._attempts.values() for part in attempt.parts)
        return any(isinstance(part, WritePart) and part.may_write and part.agent == agent for part in parts)

    def look_after(self, attempt: Attempt) -> None:
        """Somebody may still write for an attempt who was asked to stop, or cannot be asked."""
        now, number = self._clock.now_seconds(), attempt.number
        is_unheard = now - self._failed_at.get(number, now) >= UNHEARD_SECONDS
        for part in attempt.parts:
            if not isinstance(part, WritePart) or not part.may_write:
                continue
            assert part.agent is not None
            if part.is_dead:
                self._ended_at.setdefault((part.agent, number), now + DEAD_SECONDS)
            elif (is_unheard or part.is_abandoned) and not part.fence():
                self._say_held(part.agent, part.address)

    def turn(self) -> float | None:
        """What is due now; returns when to call again, in the clock's seconds, None if nothing will be."""
        now = self._clock.now_seconds()
        if now - self._turned_at_seconds > STILL_SECONDS:
            late = [one for one in self._ended_at if one not in self._is_put_off]
            self._ended_at.move(dict.fromkeys(late, now + DEAD_SECONDS))
            self._is_put_off.update(late)
        self._turned_at_seconds = now
        for agent, number in self._ended_at.take_due(now):
            self._is_put_off.discard((agent, number))
            attempt = self._attempts.get(number)
            for part in attempt.parts if attempt is not None else ():
                if isinstance(part, WritePart) and part.agent == agent:
                    part.dead()
        for address in self._looked_at.take_due(now):
            if self._at.get(address):
                self._looked_at[address] = now + LOOK_SECONDS
                self._context.peers.probe(address)
                self._look_for_ends(address)
        due = (self._looked_at.first_seconds, self._ended_at.first_seconds)
        return min((one for one in due if one is not None), default=None)

    def _look_for_ends(self, address: Peer) -> None:
        """A process of this host that has ended is noticed without a word of its engine's."""
        for number in list(self._at[address]):
            attempt = self._attempts.get(number)
            for part in attempt.parts if attempt is not None else ():
                if isinstance(part, WritePart) and part.address == address and part.may_write and part.is_dead:
                    assert attempt is not None
                    self.look_after(attempt)
                    reason = f"the process of rank {address.tp_rank} of prefill has ended"
                    attempt.fail(HandOverFailed(FailureCause.LOST, reason))

    def _say_held(self, agent: str, address: Peer) -> None:
        if agent in self._said_held:
            return
        self._said_held.add(agent)
        logger.warning(
            "Rank %d of prefill at %s:%d does not say that it has stopped, and could write from this host through "
            "shared memory, which nothing here can close. What it may write stays in quarantine until it answers or "
            "its process has ended: let it go on if it was stopped, or end it. If it has a process namespace of its "
            "own and the KV is in a device's memory, its end cannot be seen from here: give both one process "
            "namespace, or a UCX_TLS that names networks only.",
            address.tp_rank,
            address.host,
            address.port,
        )
