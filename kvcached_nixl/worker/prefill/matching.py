# SPDX-License-Identifier: Apache-2.0
"""Prefill: matches decode's registrations with offers. Once per worker, on the transfer thread.

Decode may register before the offer exists, and may know the transfer's name but not the id of prefill's request. The
registration then waits for an offer with that name and the same prompt. A name alone never matches a registration with
an offer (rule R7). It can only release an offer, because a request that decode's server rejects has no prompt there.
Such a release counts for one offer, the only one of its name, and not for registrations of its prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcached_nixl.deadlines import Clock, Deadlines, earliest
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.messages import Registration, Release
from kvcached_nixl.worker.prefill.offer import Offer, WriteKey, WriteTask

__all__ = ["GRACE_SECONDS", "OfferMatcher"]

GRACE_SECONDS = 5.0
"""How long a registration waits if prefill knows its name, but has no matching offer: the router may be retrying both
sides, and prefill's request arrives second."""


class OfferMatcher:
    """See the module.

    Args:
        remembered_seconds: how long the name of a finished offer, and a release that arrived before its offer, are
            remembered. A release by name only is remembered for `GRACE_SECONDS`: another request may use that name.
        unmatched_seconds: how long a registration waits for prefill's request to appear.

    Attributes:
        offers: those that are not finished, by request id.
    """

    def __init__(self, clock: Clock, *, remembered_seconds: float, unmatched_seconds: float) -> None:
        self._clock = clock
        self._remembered_seconds = remembered_seconds
        self._unmatched_seconds = unmatched_seconds
        self.offers: dict[PrefillRequestId, Offer] = {}
        self._named: dict[str, dict[PrefillRequestId, Offer]] = {}
        self._recent = Deadlines[str]()
        self._unmatched = Deadlines[WriteKey]()
        self._unmatched_of: dict[str, dict[WriteKey, WriteTask]] = {}
        self._released = Deadlines[tuple[str, str]]()
        self._released_ranks: dict[tuple[str, str], dict[int, int]] = {}

    @property
    def first_seconds(self) -> float | None:
        """When something is due next, in the clock's seconds; None if nothing is."""
        return earliest(*(one.first_seconds for one in (self._unmatched, self._released, self._recent)))

    def add(self, offer: Offer) -> dict[int, int]:
        """Add a new offer, and join the registrations that have waited for it.

        Returns: the ranks of decode that have already released it: tp_rank -> tp_size.
        """
        self.offers[offer.request_id] = offer
        self._named.setdefault(offer.name, {})[offer.request_id] = offer
        for task in list(self._unmatched_of.get(offer.name, {}).values()):
            if task.stopping is None and self.wanted_by(task.registration) is offer:
                self.forget(task)
                self.join(task, offer)
        self._released.pop((offer.name, offer.digest), None)
        ranks = self._released_ranks.pop((offer.name, offer.digest), {})
        waiving = self._forget_waived(offer.name)
        served = {task.registration.decode.tp_rank for task in offer.write_tasks.values()}
        if len(self._named[offer.name]) == 1:
            offer.waived = waiving.keys() - ranks.keys() - served
            ranks = {**waiving, **ranks}
        return {tp_rank: tp_size for tp_rank, tp_size in ranks.items() if tp_rank not in served}

    def remove(self, offer: Offer) -> None:
        """Remove a finished offer. Its name is remembered for ``remembered_seconds``."""
        del self.offers[offer.request_id]
        named = self._named[offer.name]
        del named[offer.request_id]
        if not named:
            del self._named[offer.name]
        self._recent[offer.name] = self._clock.now_seconds() + self._remembered_seconds

    def join(self, task: WriteTask, offer: Offer) -> None:
        """Serve a registration from this offer."""
        tp_rank = task.registration.decode.tp_rank
        if tp_rank in offer.waived:
            offer.waived.remove(tp_rank)
            offer.settled.discard(tp_rank)
        task.offer = offer
        if offer.update.trace:
            task.tally.timeline = offer.timeline
        offer.write_tasks[task.key] = task

    def wanted_by(self, registration: Registration) -> Offer | None:
        """Returns the oldest offer of this name and prompt that this rank of decode has not used yet."""
        meant = registration.digest, registration.num_tokens
        rank = registration.decode.tp_rank
        for offer in self._named.get(registration.name, {}).values():
            had = {
                *(offer.settled - offer.waived),
                *(one.registration.decode.tp_rank for one in offer.write_tasks.values()),
            }
            if (offer.digest, offer.num_tokens) == meant and not offer.stopped and rank not in had:
                return offer
        return None

    def wait(self, task: WriteTask) -> None:
        """Let a registration wait for its offer."""
        name = task.registration.name
        self._forget_waived(name)
        is_known = name in self._named or name in self._recent
        seconds = min(self._unmatched_seconds, GRACE_SECONDS) if is_known else self._unmatched_seconds
        self._unmatched[task.key] = self._clock.now_seconds() + seconds
        self._unmatched_of.setdefault(name, {})[task.key] = task

    def forget(self, task: WriteTask) -> None:
        """The registration does not wait for an offer any more. Idempotent."""
        self._unmatched.pop(task.key, None)
        waiting = self._unmatched_of.get(task.registration.name)
        if waiting is not None:
            waiting.pop(task.key, None)
            if not waiting:
                del self._unmatched_of[task.registration.name]

    def renewed_by(self, name: str) -> Iterator[PrefillRequestId]:
        """Returns the requests whose leases a heartbeat with this name renews. Decode may know only the name;
        if no offer has that name, it is taken for a request id."""
        return iter(self._named.get(name, (PrefillRequestId(name),)))

    def released_by(self, message: Release) -> Offer | None:
        """Returns the offer that a rank of decode releases. A release that arrives before its offer is remembered."""
        if message.request_id:
            found = self.offers.get(PrefillRequestId(message.request_id))
            # Parameters of one request may name another one's offer.
            return found if found is None or message.digest in ("", found.digest) else None
        named = self._named.get(message.name, {})
        if not message.digest and named:
            return self._waived_by(message, list(named.values()))
        for offer in named.values():
            if offer.digest == message.digest and message.tp_rank not in offer.settled:
                return offer
        meant = message.name, message.digest
        seconds = self._remembered_seconds if message.digest else min(self._remembered_seconds, GRACE_SECONDS)
        self._released_ranks.setdefault(meant, {})[message.tp_rank] = message.tp_size
        self._released[meant] = self._clock.now_seconds() + seconds
        return None

    def take_due(self, now_seconds: float) -> list[WriteKey]:
        """Returns registrations that have waited for too long, and forgets names and releases that are too old."""
        for meant in self._released.take_due(now_seconds):
            del self._released_ranks[meant]
        self._recent.take_due(now_seconds)
        return self._unmatched.take_due(now_seconds)

    def _waived_by(self, message: Release, named: list[Offer]) -> Offer | None:
        """Returns the offer of a name if there is only one, and this rank does not use it and has not settled it."""
        offer, *others = named
        served = {one.registration.decode.tp_rank for one in offer.write_tasks.values()}
        if others or message.tp_rank in served | offer.settled:
            return None
        offer.waived.add(message.tp_rank)
        return offer

    def _forget_waived(self, name: str) -> dict[int, int]:
        """Forget and return the ranks of decode that have released this name only: tp_rank -> tp_size."""
        self._released.pop((name, ""), None)
        return self._released_ranks.pop((name, ""), {})
