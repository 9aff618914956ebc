# SPDX-License-Identifier: Apache-2.0
"""Decode: ranks of prefill that may still write, and how that ends (rule R13). Once per worker, on the transfer thread.

The blocks of a failed attempt are held until each of its writers is in one of the first three states:

    heard       it was told to stop, over NIXL and repeatedly, and has answered that it has
    dead        it was a process of this host, and the kernel says that it has ended, whatever its address answers
    fenced      it has not answered for UNHEARD_SECONDS, or another engine answers in its place, and it can write over
                a network only: the gate it writes through is closed (`write_gates`)
    held        none of these is possible: it is suspended on this host, and could write past all that can be closed

That its side channel does not answer, refuses or times out says nothing about its workers. If it refuses, the attempt
fails at once, else at its deadline at the latest; in each case its blocks still wait for one of these states.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping

from kvcached_nixl.deadlines import Clock, Deadlines, earliest
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.worker.decode.attempt import Attempt, Part
from kvcached_nixl.worker.transfer.context import RecentSet, WorkerContext

__all__ = ["ActiveWriters"]

logger = logging.getLogger(SERVER_LOGGER)

LOOK_SECONDS = 5.0
"""Between two checks whether a writer is alive."""
UNHEARD_SECONDS = 20.0
"""A writer that has not answered for so long that it has stopped is fenced."""
DEAD_SECONDS = 2.0
"""Wait after a writer's process has ended: NIXL's thread still receives what this host's kernel has buffered of it."""
STILL_SECONDS = 1.0
"""If `turn` was not called for so long, this process was stopped, and NIXL's thread with it."""


class ActiveWriters:
    """See the module.

    Args:
        attempts: those that are not finished, by number; a view of the receiver's dict.
    """

    def __init__(self, context: WorkerContext, attempts: Mapping[int, Attempt]) -> None:
        self._context = context
        self._clock: Clock = context.clock
        self._attempts = attempts
        self._at: defaultdict[Peer, dict[int, None]] = defaultdict(dict)
        self._looked_at = Deadlines[Peer]()
        self._failed_at: dict[int, float] = {}
        self._ended_at = Deadlines[tuple[str, int]]()
        self._is_put_off: set[tuple[str, int]] = set()
        self._turned_at_seconds = context.clock.now_seconds()
        self._said_held = RecentSet[str]()

    def expect(self, part: Part, number: int) -> None:
        """From now on a rank of prefill may write; check every LOOK_SECONDS whether it is alive."""
        self._at[part.address][number] = None
        self._looked_at.setdefault(part.address, self._clock.now_seconds() + LOOK_SECONDS)

    def failed(self, number: int) -> None:
        """An attempt has failed, so its writers are asked to stop; UNHEARD_SECONDS begin."""
        self._failed_at[number] = self._clock.now_seconds()

    def finished(self, attempt: Attempt) -> None:
        """No rank writes for this attempt any more."""
        number = attempt.number
        self._failed_at.pop(number, None)
        for part in attempt.parts:
            part.finish()
            waiting = self._at.get(part.address)
            if waiting is not None:
                waiting.pop(number, None)
                if not waiting:
                    del self._at[part.address]
                    self._looked_at.pop(part.address, None)

    def may_write(self, agent: str) -> bool:
        """Whether an agent was told of blocks to write, and has not answered that it has stopped."""
        parts = (part for attempt in self._attempts.values() for part in attempt.parts)
        return any(part.may_write and part.agent == agent for part in parts)

    def look_after(self, attempt: Attempt) -> None:
        """Fence, or wait for the end of, the ranks that may still write for an attempt although they were asked to stop
        or cannot be asked."""
        now, number = self._clock.now_seconds(), attempt.number
        is_unheard = now - self._failed_at.get(number, now) >= UNHEARD_SECONDS
        for part in attempt.parts:
            if not part.may_write:
                continue
            assert part.agent is not None
            if part.is_dead:
                self._ended_at.setdefault((part.agent, number), now + DEAD_SECONDS)
            elif (is_unheard or part.is_abandoned) and not part.fence():
                self._say_held(part.agent, part.address)

    def turn(self) -> float | None:
        """Do what is due now; returns when to call again, in the clock's seconds, None if nothing will be due."""
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
                if part.agent == agent:
                    part.dead()
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
                    reason = f"the process of rank {address.tp_rank} of prefill has ended"
                    attempt.fail(HandOverFailed(FailureCause.LOST, reason))

    def _say_held(self, agent: str, address: Peer) -> None:
        if agent in self._said_held:
            return
        self._said_held.add(agent)
        logger.warning(
            "Rank %d of prefill at %s:%d does not say that it has stopped, and could write from this host through "
            "shared memory, which decode cannot close. The blocks that it may write stay in quarantine until it "
            "answers or its process ends: continue the process if it is suspended, or end it. If it runs in another "
            "PID namespace and the KV is in device memory, its end is not visible here: run both in one PID namespace, "
            "or set UCX_TLS to network transports only.",
            address.tp_rank,
            address.host,
            address.port,
        )
