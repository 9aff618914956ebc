# SPDX-License-Identifier: Apache-2.0
"""What an engine does when memory is short, for itself or for its neighbours on the device. One per engine, on its
thread.

It tells neighbours what the next request waits for, has idle blocks of the prefix cache and then offers give way
(`MemoryPressure` says when), and gives kvcached's pages back that were freed for others.

In push decode has blocks before prefill computes, and could take all of a device that both are on. So while a neighbour
runs nothing for want of memory, decode takes no more blocks for KV that has to come yet, and gives up what has waited
the shortest, as much as the neighbour waits for. For its own requests it does so when they have waited in vain
(`Impasse`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.scheduler.context import EngineContext
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed, RevocationCause
from kvcached_nixl.wire.step import Report

STOOD_SECONDS = 30.0
"""An engine that rests steps more often. One that has not stepped for so long was paused, or blocked by a call."""
UNHEARD_SECONDS = 3.0
"""A neighbour that waits for memory repeats that every second. One that has not for this long no longer waits."""
FETCHED_SECONDS = 10.0
"""Decode fetches, and whoever waits for memory gets none of it all the same: after so long, that protects no offer."""


class MemoryPressure:
    """When blocks that nobody uses have to be given back, because memory is short (rule R12).

    Memory is short if the next request waits for blocks, if the engine uses more than kvcached's limit allows, or if
    another engine on the device waits for memory. What the prefix cache keeps is then dropped, whatever decode fetches.
    Offers give way only if none was fetched for as long (`KeptOffers.give_way`), or if the same one waits in vain: what
    is fetched may share its blocks with others, or make room for somebody else.

    Args:
        patience_seconds: how long memory is short before blocks are given back.
    """

    def __init__(self, clock: Clock, patience_seconds: float) -> None:
        self._clock = clock
        self._patience_seconds = patience_seconds
        self._since_seconds: float | None = None
        self._last_seconds = 0.0
        # Who waits for memory: since when, and when that was seen last.
        self._waits: dict[RevocationCause, tuple[str, float, float]] = {}

    def turn(self, missing_blocks: Mapping[RevocationCause, int]) -> dict[RevocationCause, int]:
        """Returns how many of the blocks that are missing at this moment have to be given back now, by cause."""
        now = self._clock.now_seconds()
        missing = {cause: count for cause, count in missing_blocks.items() if count > 0}
        if missing:
            # An engine that had nothing to give has not looked for a while.
            is_new = now >= self._last_seconds + self._patience_seconds + UNHEARD_SECONDS
            self._last_seconds = now
            if self._since_seconds is None or is_new:
                self._since_seconds = now
        elif now >= self._last_seconds + self._patience_seconds:
            # Not at once: else each request in a queue would wait anew.
            self._since_seconds = None
        is_due = self._since_seconds is not None and now >= self._since_seconds + self._patience_seconds
        return missing if is_due else {}

    def waits_in_vain(self, cause: RevocationCause, request_id: str) -> bool:
        """Whether this one has waited for FETCHED_SECONDS. Called in each turn in which it cannot go on otherwise."""
        now = self._clock.now_seconds()
        before_id, since_seconds, last_seconds = self._waits.get(cause, ("", now, now))
        if before_id != request_id or now >= last_seconds + UNHEARD_SECONDS:
            since_seconds = now
        self._waits[cause] = request_id, since_seconds, now
        return now >= since_seconds + FETCHED_SECONDS


RING_TIMEOUTS = 2
"""How long the next request waits where prompts for peers wait, too, in times of ``handover_timeout``."""
VAIN_TIMEOUTS = 10
"""The same, where no peer waits for this engine: longer than prefill's queue can be in a service that is of any use."""


class Impasse:
    """Push: ends hand-overs that keep the blocks which the next request needs, and whose KV does not come (rule R4).

    They have blocks before prefill computes, and no time is limited while prefill says that it goes on. Two engines
    that prefill for each other may so wait for each other, each full of what waits for the other one; or a prefill says
    so for ever. Small requests that run meanwhile change nothing about that.
    """

    def __init__(self, engine: EngineContext, fetching: DecodeFetches) -> None:
        self._engine = engine
        self._fetching = fetching
        # The next request, the fewest blocks that it lacked, since when it lacks them, and when that was seen last.
        self._request_id = ""
        self._least_blocks = 0
        self._since_seconds = 0.0
        self._seen_seconds = -math.inf

    def turn(self, *, are_peers_waiting: bool) -> None:
        """``are_peers_waiting``: peers may wait for a prompt that has no blocks here."""
        now, blocks = self._engine.clock.now_seconds(), self._engine.blocks
        request_id, num_missing = blocks.starved or ("", 0)
        is_past = now > self._seen_seconds + STOOD_SECONDS
        # Others may stand in front of it for a moment, by their priority.
        if not num_missing or (request_id != self._request_id and not is_past):
            return
        if is_past or num_missing < self._least_blocks:
            self._request_id, self._least_blocks, self._since_seconds = request_id, num_missing, now
        self._seen_seconds = now
        times = RING_TIMEOUTS if are_peers_waiting else VAIN_TIMEOUTS
        since_seconds = self._since_seconds
        if now < since_seconds + times * self._engine.settings.handover_timeout_seconds:
            return
        self._since_seconds = now
        if num_missing > blocks.num_running_blocks:
            seconds = now - since_seconds
            reason = f"its KV has not come, and the next request has waited for its blocks for {seconds:.0f} s"
            self._fetching.give_up(num_missing, HandOverFailed(FailureCause.DEADLINE, reason), since_seconds)


MOST_YIELD_SECONDS = 20.0
"""A neighbour whose want cannot be met does not hold decode up for longer."""
LOOK_SECONDS = 0.25
"""How often an engine tells its neighbours what it waits for, and looks what they wait for."""
_STEPS_TO_TRIM = 2
"""With batches in flight, kvcached keeps pages that have come free out of reach of `BlockPool.trim` until the next step
has ended."""


class GivingWay:
    """See the module."""

    def __init__(self, engine: EngineContext, offering: PrefillOffers, fetching: DecodeFetches) -> None:
        self._engine = engine
        self._patience_seconds = engine.settings.give_way_after_seconds
        # Decode has blocks before prefill computes.
        self._is_push = engine.is_push
        # When a stalled neighbour was heard first, and last.
        self._stalled_seconds: tuple[float, float] | None = None
        # When blocks went into quarantine for it, and those that were there before.
        self._given_seconds, self._quarantined_blocks = -math.inf, 0
        self._had_yielded = False
        self._offering = offering
        self._fetching = fetching
        self._pressure = MemoryPressure(engine.clock, self._patience_seconds)
        self._impasse = Impasse(engine, fetching)
        # Blocks that were freed for others, and that the prefix cache may still keep.
        self._owed_blocks = 0
        # Steps until pages that were freed for others can be given back; None if there are none.
        self._steps_to_trim: int | None = None
        self._look_at_seconds = 0.0
        self._has_told = False

    @property
    def owes(self) -> bool:
        return self._owed_blocks > 0 or self._steps_to_trim is not None

    @property
    def watches(self) -> bool:
        """Whether an engine that has nothing to compute has to look all the same: it has something to give."""
        blocks = self._engine.blocks
        waits = self._is_push and (self._fetching.attempts.waiting or self._fetching.queued)
        return bool(self._offering.kept.num_kept or waits or blocks.num_cached or blocks.has_reserve)

    @property
    def yields(self) -> bool:
        """Whether decode takes no blocks for KV that has to come yet."""
        if self._stalled_seconds is None:
            return False
        first_seconds, last_seconds = self._stalled_seconds
        now = self._engine.clock.now_seconds()
        return now < min(last_seconds + UNHEARD_SECONDS, first_seconds + MOST_YIELD_SECONDS)

    def stepped(self) -> None:
        if self._steps_to_trim:
            self._steps_to_trim -= 1

    def reported(self, report: Report, sent: Iterable[str]) -> None:
        """Takes in which offers have not given way, whether one was fetched, and which have ended."""
        kept = self._offering.kept
        if report.has_fetched:
            kept.fetched()
        if kept.spared(report.spared):
            # Others may give way instead: the next turn looks, whenever the last look was.
            self._look_at_seconds = 0.0
        self._owed_blocks += kept.ended(sent)

    def turn(self) -> bool:
        """Looks every LOOK_SECONDS, however often it is called. Must not be called while vLLM builds a step: what it
        copies between blocks in that step, only the prefix cache may keep.

        Returns: whether the engine has to step: blocks of the prefix cache were freed, or decode yields no longer.
        """
        num_dropped, blocks = self._give_back(), self._engine.blocks
        now = self._engine.clock.now_seconds()
        if now < self._look_at_seconds:
            # What it waits for no longer must not cost neighbours anything.
            self._has_told = self._has_told and (blocks.starved is not None or self._tell())
            return num_dropped > 0
        self._look_at_seconds = now + LOOK_SECONDS
        # A request that a limit of before keeps waiting allocates nothing, and would wait for ever.
        blocks.apply_limit()
        self._has_told = self._tell()
        # Before looking: an engine that had nothing to give has not looked for a while.
        if self._stalled_seconds is not None and now >= self._stalled_seconds[1] + UNHEARD_SECONDS:
            self._stalled_seconds = None
        if self.watches:
            num_dropped += self._give_way()
            if self._is_push and self._fetching.attempts.waiting:
                self._impasse.turn(are_peers_waiting=self._offering.are_awaited)
        had_yielded, self._had_yielded = self._had_yielded, self.yields
        return num_dropped > 0 or (had_yielded and not self._had_yielded)

    def _tell(self) -> bool:
        return self._engine.blocks.tell_neighbours(lambda one: self._is_push and self._fetching.needs_others(one))

    def _hear(self, num_wanted: int, *, is_stalled: bool) -> bool:
        """Decode's part, where a neighbour wants memory. Returns whether hand-overs were given up."""
        if not (self._is_push and is_stalled):
            return False
        now, num_quarantined = self._engine.clock.now_seconds(), self._fetching.attempts.num_quarantined_blocks
        first_seconds = now if self._stalled_seconds is None else self._stalled_seconds[0]
        self._stalled_seconds = first_seconds, now
        # What stays in quarantine for long is not given soon. Then others are given up.
        is_long = now >= self._given_seconds + MOST_YIELD_SECONDS / 2
        self._quarantined_blocks = num_quarantined if is_long else min(self._quarantined_blocks, num_quarantined)
        # Offers and the prefix cache go first.
        is_last = not self._offering.kept.num_kept and not self._engine.blocks.num_cached
        if not (self.yields and is_last and now >= first_seconds + self._patience_seconds):
            return False
        reason = "another engine on decode's device waits for memory, and its KV has not come yet"
        # What was given up for it before may be in quarantine yet.
        num_wanted -= num_quarantined - self._quarantined_blocks
        if num_wanted > 0:
            self._fetching.give_up(num_wanted, HandOverFailed(FailureCause.REVOKED, reason))
        if self._fetching.attempts.num_quarantined_blocks > num_quarantined:
            self._given_seconds = now
        return True

    def _give_way(self) -> int:
        """Returns how many blocks of the prefix cache were freed."""
        blocks, kept = self._engine.blocks, self._offering.kept
        num_wanted, is_neighbour_stalled = blocks.wanted_by_neighbours()
        if num_wanted > 0:
            # What kvcached has mapped in advance costs nothing to give.
            num_wanted -= blocks.trim()
            has_given = self._hear(num_wanted, is_stalled=is_neighbour_stalled)
            if has_given or num_wanted <= 0:
                blocks.neighbours_served()
        # Blocks of its own prefix cache vLLM takes by itself.
        starved, num_missing = (blocks.starved if kept.num_kept else None) or ("", 0)
        missing = {
            RevocationCause.BLOCKS: num_missing,
            RevocationCause.LIMIT: blocks.blocks_over_limit,
            RevocationCause.NEIGHBOUR: num_wanted,
        }
        num_dropped = 0
        for cause, num_blocks in self._pressure.turn(missing).items():
            # What decode waits for goes only to those who could not go on without it. Another prompt to be offered is
            # none of them, unless this engine, too, has requests that wait for what its peers keep.
            keeps_wanted = False
            if cause is RevocationCause.BLOCKS:
                is_for_offer = self._offering.find(starved) is not None and not self._fetching.queued
                keeps_wanted = is_for_offer or not blocks.stalled
            elif cause is RevocationCause.NEIGHBOUR:
                keeps_wanted = not is_neighbour_stalled
                blocks.neighbours_served()
            if cause is not RevocationCause.BLOCKS:
                dropped = blocks.drop_cached(num_blocks)
                num_dropped, num_blocks = num_dropped + dropped, num_blocks - dropped
                if dropped:
                    self._steps_to_trim = _STEPS_TO_TRIM
            waiting = starved if cause is RevocationCause.BLOCKS else ""
            heeds_fetches = keeps_wanted or not self._pressure.waits_in_vain(cause, waiting)
            kept.give_way(
                cause,
                num_blocks,
                keeps_wanted=keeps_wanted,
                heeds_fetches=heeds_fetches,
                computing=self._offering.computing,
            )
        return num_dropped

    def _give_back(self) -> int:
        """Frees what has been taken back for others, and their pages: those are unmapped at the end of a step, or kept
        by kvcached for its next allocation."""
        num_blocks, self._owed_blocks = self._owed_blocks, 0
        if num_blocks:
            self._steps_to_trim = _STEPS_TO_TRIM
            return self._engine.blocks.drop_cached(num_blocks)
        if self._steps_to_trim == 0:
            self._steps_to_trim = None
            self._engine.blocks.trim()
        return 0


class Starvation:
    """Requests that would wait for blocks for ever (rule R4).

    kvcached's limit, other engines on the device, or a quarantine may leave less memory than the next request in the
    queue needs. It waits without a limit while anything may free blocks: requests that run, hand-overs under way,
    offers. If there is nothing of that, it ends with an error, once it has waited like that for a time. It need not be
    a hand-over.

    Attributes:
        ending: requests that have to end with an error.
    """

    def __init__(self, engine: EngineContext, fetching: DecodeFetches) -> None:
        self._engine = engine
        self._fetching = fetching
        # Those that wait while nothing frees blocks, in vLLM's order, and since when.
        self._since_seconds: dict[str, float] = {}
        # The one that vLLM refuses blocks, the fewest that it lacked, and the fewest that were held.
        self._least: tuple[str, int, int] = ("", 0, 0)
        self._looked_at_seconds = 0.0
        self._limit_seconds = 0.0
        self.ending: set[str] = set()

    @property
    def due_at_seconds(self) -> float | None:
        """When the request that vLLM refuses blocks has to end; None if none waits in vain."""
        since_seconds = self._since_seconds.get(self._least[0])
        return None if since_seconds is None else since_seconds + self._limit_seconds

    def turn(self) -> None:
        """A step was built: notices an engine that stands still, and whose next request gets no blocks any more."""
        blocks = self._engine.blocks
        # KV under way is computed on when it has come, and its blocks are free then (or `Impasse` ends it).
        waiting = [] if self._fetching.attempts.waiting else blocks.stalled
        self._engine.step.is_stalled = blocks.is_paused or bool(waiting)
        # So are those of offers, when decode has fetched them or their leases end, and of other connectors. Not those
        # of requests that have their KV and wait for more blocks, too: memory may have gone since they were admitted.
        # Blocks that are parked are in no table.
        if waiting and (blocks.is_copied or blocks.others_have_blocks({*waiting, *self._fetching.received})):
            waiting = []
        self._look(waiting)

    def _look(self, waiting: list[str]) -> None:
        """Ends the one of these requests that vLLM refuses blocks, if it has waited too long. They wait for their turn,
        and nothing is under way that frees blocks."""
        engine, blocks, num_held_blocks = self._engine, self._engine.blocks, self._engine.holds.num_blocks
        now = engine.clock.now_seconds()
        starved = blocks.starved if waiting else None
        if starved is None:
            self._since_seconds, self._least = {}, ("", 0, 0)
            return
        if self._has_moved(*starved, num_held_blocks) or now > self._looked_at_seconds + STOOD_SECONDS:
            self._since_seconds.clear()
        self._looked_at_seconds = now
        self._since_seconds = {one: self._since_seconds.get(one, now) for one in waiting if one not in self.ending}
        timeout_seconds = engine.settings.handover_timeout_seconds
        self._limit_seconds = timeout_seconds if num_held_blocks else engine.allocation_seconds
        due_at_seconds = self.due_at_seconds
        # vLLM has tried it in vain in this step. Those behind one that is about to end get their turn first.
        if self.ending or due_at_seconds is None or now < due_at_seconds:
            return
        request_id, num_missing = starved
        del self._since_seconds[request_id]
        self.ending.add(request_id)
        cause = FailureCause.QUARANTINE if num_held_blocks else FailureCause.NO_BLOCKS
        reason = self._reason(blocks.usage().num_free, num_missing, num_held_blocks)
        engine.failures.starved(request_id, HandOverFailed(cause, reason))

    def _has_moved(self, request_id: str, num_missing: int, num_held_blocks: int) -> bool:
        """Whether blocks have come free since the last step. Those that were free before do not count again."""
        before = self._least
        if before[0] != request_id:
            self._least = request_id, num_missing, num_held_blocks
            return False
        self._least = request_id, min(before[1], num_missing), min(before[2], num_held_blocks)
        return self._least != before

    def _reason(self, num_free: int, num_missing: int, num_held_blocks: int) -> str:
        found = (
            f"found {num_free} free KV-cache blocks, and nothing has freed more for {self._limit_seconds:g} s; "
            f"expected at least {num_free + num_missing}. The request ends, so that others get their turn. "
        )
        if num_held_blocks:
            return (
                f"{found}{num_held_blocks} blocks are in quarantine: peers that do not answer may still write them, or "
                "are still sent them. Peers on other hosts are fenced or found gone within minutes, and their blocks "
                "are free then. If a process of a peer on this host hangs, continue or end it"
            )
        return (
            f"{found}Raise kvcached's limit (kvctl limit), have other engines on this device leave it more memory, or "
            "send shorter prompts"
        )
