# SPDX-License-Identifier: Apache-2.0
"""Requests that would wait for blocks for ever (rule R4). One per engine, on its thread.

kvcached's limit, other engines on the device, or a quarantine may leave less memory than the next request in the queue
needs. It waits without a limit while anything may free blocks: requests that run, hand-overs under way, offers. If
there is nothing of that, it ends with an error, once it has waited like that for a time. It need not be a hand-over.
"""

from __future__ import annotations

from kvcached_nixl.scheduler.context import EngineContext
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed

__all__ = ["STOOD_SECONDS", "Starvation"]

STOOD_SECONDS = 30.0
"""An engine that rests steps more often. One that has not stepped for so long was paused, or blocked by a call."""


class Starvation:
    """See the module."""

    def __init__(self, engine: EngineContext, fetching: DecodeFetches) -> None:
        self._engine = engine
        self._fetching = fetching
        # Those that wait while nothing frees blocks, in vLLM's order, and since when.
        self._since_seconds: dict[str, float] = {}
        # The first of them, the fewest blocks that it lacked, and the fewest that were held.
        self._least: tuple[str, int, int] = ("", 0, 0)
        self._looked_at_seconds = 0.0
        self._limit_seconds = 0.0
        self._ending: set[str] = set()

    @property
    def due_at_seconds(self) -> float | None:
        """When the next request has to end; None if none waits in vain."""
        first = next(iter(self._since_seconds.values()), None)
        return None if first is None else first + self._limit_seconds

    @property
    def has_news(self) -> bool:
        """Whether vLLM has to be told of a request that ends."""
        return bool(self._ending)

    def turn(self) -> None:
        """A step was built: notices an engine that stands still, and whose next request gets no blocks any more."""
        blocks = self._engine.blocks
        # KV under way is computed on when it has come, and its blocks are free then (or `Impasse` ends it).
        waiting = [] if self._fetching.attempts.num_waiting else blocks.stalled
        self._engine.step.is_stalled = blocks.is_paused or bool(waiting)
        # So are those of offers, when decode has fetched them or their leases end, and of other connectors. Not those
        # of requests that have their KV and wait for more blocks, too: memory may have gone since they were admitted.
        # Blocks that are parked are in no table.
        if waiting and (blocks.is_copied or blocks.others_have_blocks({*waiting, *self._fetching.received})):
            waiting = []
        self._look(waiting)

    def _look(self, waiting: list[str]) -> None:
        """Ends the first of these requests if it has waited too long. They wait for blocks, in vLLM's order, and
        nothing is under way that frees some."""
        now, blocks, num_held_blocks = (
            self._engine.clock.now_seconds(),
            self._engine.blocks,
            self._engine.holds.num_blocks,
        )
        starved = blocks.starved if waiting else None
        if self._has_moved(starved, num_held_blocks) or now > self._looked_at_seconds + STOOD_SECONDS:
            self._since_seconds.clear()
        self._looked_at_seconds = now
        self._since_seconds = {one: self._since_seconds.get(one, now) for one in waiting if one not in self._ending}
        terms = self._engine.terms
        self._limit_seconds = terms.timeout_seconds if num_held_blocks else terms.allocation_seconds
        due_at_seconds = self.due_at_seconds
        # vLLM has tried the first one in vain in this step. Those behind one that is about to end get their turn first.
        if self._ending or due_at_seconds is None or now < due_at_seconds:
            return
        request_id = next(iter(self._since_seconds))
        del self._since_seconds[request_id]
        if starved is None or starved[0] != request_id:
            return
        self._ending.add(request_id)
        cause = FailureCause.QUARANTINE if num_held_blocks else FailureCause.NO_BLOCKS
        reason = self._reason(blocks.usage().num_free, starved[1], num_held_blocks)
        self._engine.failures.starved(request_id, HandOverFailed(cause, reason))

    def _has_moved(self, starved: tuple[str, int] | None, num_held_blocks: int) -> bool:
        """Whether blocks have come free since the last step. Those that were free before do not count again."""
        request_id, num_missing = starved or ("", 0)
        before = self._least
        if before[0] != request_id:
            self._least = request_id, num_missing, num_held_blocks
            return False
        self._least = request_id, min(before[1], num_missing), min(before[2], num_held_blocks)
        return self._least != before

    def take_ending(self) -> set[str]:
        """Returns the requests, since the last call, that have to end with an error."""
        ending, self._ending = self._ending, set()
        return ending

    def _reason(self, num_free: int, num_missing: int, num_held_blocks: int) -> str:
        found = (
            f"found {num_free} free KV-cache blocks, and nothing has freed more for {self._limit_seconds:g} s; "
            f"expected at least {num_free + num_missing}. The request ends, so that others get their turn. "
        )
        if num_held_blocks:
            return (
                f"{found}{num_held_blocks} blocks are in quarantine for peers that do not answer and may still write. "
                "Peers on other hosts are fenced within about two minutes, and their blocks are free then. If a "
                "process of a peer on this host hangs, continue or end it"
            )
        return (
            f"{found}Raise kvcached's limit (kvctl limit), have other engines on this device leave it more memory, or "
            "send shorter prompts"
        )
