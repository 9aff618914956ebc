# SPDX-License-Identifier: Apache-2.0
"""Prefill: which registration is served from which offer. Once per worker, on the transfer thread.

Decode may come first, and may know no more than a name: then it waits for an offer of that name, and of that prompt.
Names alone pair nothing (rule R7). All that a name can do alone is to give an offer up: a request that decode's server
rejects has no prompt there. That holds for one offer, the only one of its name, and for no registration of its prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcached_nixl.clock import Clock
from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.messages import Registration, Release
from kvcached_nixl.worker.prefill.offer import Offer, WriteKey, WriteTask

__all__ = ["GRACE_SECONDS", "OfferMatcher"]

GRACE_SECONDS = 5.0
"""How long a registration waits for a request whose name prefill knows, though not for what decode wants: the router
may be trying both again, and prefill's comes second."""


class OfferMatcher:
    """See the module.

    Args:
        remembered_seconds: for how long the name of an offer that is over, and a release that came first, count. What
            releases no more than a name counts for `GRACE_SECONDS`: another request may come under that name.
        unmatched_seconds: how long a registration waits for prefill's request to appear.

    Attributes:
        offers: those that are not over, by the request's id.
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
        """When something is due next."""
        due = (one.first_seconds for one in (self._unmatched, self._released, self._recent))
        return min((one for one in due if one is not None), default=None)

    def add(self, offer: Offer) -> dict[int, int]:
        """There is a new offer; registrations that have waited for it are joined to it.

        Returns: ranks of decode that need nothing of it, as they have said before: tp_rank -> tp_size.
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
        """It is over. Its name counts as known for a while."""
        del self.offers[offer.request_id]
        named = self._named[offer.name]
        del named[offer.request_id]
        if not named:
            del self._named[offer.name]
        self._recent[offer.name] = self._clock.now_seconds() + self._remembered_seconds

    def join(self, task: WriteTask, offer: Offer) -> None:
        """The registration is served from this offer."""
        tp_rank = task.registration.decode.tp_rank
        if tp_rank in offer.waived:
            offer.waived.remove(tp_rank)
            offer.settled.discard(tp_rank)
        task.offer = offer
        offer.write_tasks[task.key] = task

    def wanted_by(self, registration: Registration) -> Offer | None:
        """The oldest offer of this name and prompt that this rank of decode has not had."""
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
        """There is no offer for it yet."""
        name = task.registration.name
        self._forget_waived(name)
        is_known = name in self._named or name in self._recent
        seconds = min(self._unmatched_seconds, GRACE_SECONDS) if is_known else self._unmatched_seconds
        self._unmatched[task.key] = self._clock.now_seconds() + seconds
        self._unmatched_of.setdefault(name, {})[task.key] = task

    def forget(self, task: WriteTask) -> None:
        """It waits for no offer any more. Harmless if it has not waited."""
        self._unmatched.pop(task.key, None)
        waiting = self._unmatched_of.get(task.registration.name)
        if waiting is not None:
            waiting.pop(task.key, None)
            if not waiting:
                del self._unmatched_of[task.registration.name]

    def renewed_by(self, name: str) -> Iterator[PrefillRequestId]:
        """Whose lease a beat renews. Decode may know the name of the transfer only."""
        return iter(self._named.get(name, (PrefillRequestId(name),)))

    def released_by(self, message: Release) -> Offer | None:
        """The offer of which a rank of decode needs nothing more; what comes before its offer is kept for it."""
        if message.request_id:
            return self.offers.get(PrefillRequestId(message.request_id))
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
        """Registrations that have waited for too long; what is remembered for too long is forgotten."""
        for meant in self._released.take_due(now_seconds):
            del self._released_ranks[meant]
        self._recent.take_due(now_seconds)
        return self._unmatched.take_due(now_seconds)

    def _waived_by(self, message: Release, named: list[Offer]) -> Offer | None:
        """The only offer of a name, if this rank is not being served from it. Of several, the name says none."""
        offer, *others = named
        served = {one.registration.decode.tp_rank for one in offer.write_tasks.values()}
        if others or message.tp_rank in served | offer.settled:
            return None
        offer.waived.add(message.tp_rank)
        return offer

    def _forget_waived(self, name: str) -> dict[int, int]:
        """Ranks of decode that have released no more than this name: tp_rank -> tp_size."""
        self._released.pop((name, ""), None)
        return self._released_ranks.pop((name, ""), {})
