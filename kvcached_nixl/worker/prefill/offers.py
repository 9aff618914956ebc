# SPDX-License-Identifier: Apache-2.0
"""Prefill: offers, decode's registrations of them, and which belong together. Owned by the transfer thread.

An `Offer` is a request whose KV decode may have; a `WriteTask` is a registration of decode that is written from it.

    WriteTask  waiting for its peer, its offer or for tokens -> writing -> everything posted -> finished
                  \\------- told to stop, or something failed: nothing more is posted -------> finished, answered

Decode may register before the offer exists, and may know the transfer's name but not the id of prefill's request. The
registration then waits for an offer with that name and the same prompt. A name alone never matches a registration with
an offer (rule R7). It can only release an offer, because a request that decode's server rejects has no prompt there.
Such a release counts for one offer, the only one of its name, and not for registrations of its prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from kvcached_nixl.deadlines import Clock, Deadlines, earliest
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.causes import HandOverFailed
from kvcached_nixl.wire.manifest import Manifest
from kvcached_nixl.wire.messages import KernelBlockRange, Registration, Release, StagingGrant, Written, encode
from kvcached_nixl.wire.step import OfferUpdate
from kvcached_nixl.wire.timeline import State, Timeline
from kvcached_nixl.worker.outcomes import OutcomeQueue
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.staging import Held
from kvcached_nixl.worker.transfer.topology import ConnectedPeer
from kvcached_nixl.worker.transfer.transfer_queue import TransferJob, TransferTally

WriteKey = tuple[str, int]
"""(agent that registered, its attempt)."""


@dataclass(eq=False)
class WriteTask:
    """A registration that is not finished.

    Attributes:
        known: the rank that registered, after the handshake.
        offer: what is written; None until prefill has it.
        next_token: the first token that is in no WRITE yet.
        next_index: number of the next WRITE.
        grant: the slots that decode grants now, where decode stages.
        asked: the (first, end) tokens for which a grant was last asked.
        jobs: WRITEs not ended: being checksummed, queued or in flight; and whether each is the registration's last.
        awaiting_checksum: those of ``jobs`` whose checksum is being computed, so their bytes are being read.
        stopping: why nothing more is posted; None if it was not stopped.
        tally: of its WRITEs.
        has_failed: NIXL has said so of one of them.
        windows: slots for its next tokens, where prefill stages and its offer is not parked.
    """

    agent: str
    registration: Registration
    known: ConnectedPeer | None = None
    offer: Offer | None = None
    next_token: int = 0
    next_index: int = 0
    grant: StagingGrant | None = None
    asked: tuple[int, int] = (-1, -1)
    jobs: dict[TransferJob, bool] = field(default_factory=dict)
    awaiting_checksum: set[TransferJob] = field(default_factory=set)
    stopping: HandOverFailed | None = None
    tally: TransferTally = field(default_factory=TransferTally)
    windows: list[Held] = field(default_factory=list)
    is_finished: bool = False
    has_failed: bool = False

    @property
    def key(self) -> WriteKey:
        return self.agent, self.registration.attempt

    @property
    def decode_engine(self) -> str:
        """The engine that has registered."""
        return self.registration.decode.engine

    @property
    def is_complete(self) -> bool:
        """Whether a WRITE was made for every token."""
        return self.next_token >= self.registration.end_token

    def say(
        self, tp_rank: int, end: int, manifest: Manifest | None, digest: str | None, _: int, is_last: bool
    ) -> bytes:
        """Returns the notification of the next WRITE. ``is_last``: of its range, which ends with the token ``end``."""
        index, self.next_index = self.next_index, self.next_index + 1
        said = Written(self.registration.attempt, tp_rank, index)
        if is_last:
            made = None if manifest is None else msgspec.structs.replace(manifest, groups=())
            said = msgspec.structs.replace(said, manifest=made, end_token=end, digest=digest)
        return encode(said)


@dataclass(eq=False)
class Offer:
    """A request of prefill whose KV decode may have.

    Attributes:
        update: the scheduler's last.
        blocks: those of ``update``, as kernel blocks.
        finished: prefill computes no more tokens of it.
        stopped: why decode may not have it; empty if it may.
        is_kept: vLLM keeps its blocks until the request is reported as done.
        settled: ranks of decode that need nothing more of it.
        waived: those of ``settled`` that have released its name only. They may still register, for this prompt.
        readers: ranks of decode that have begun to read its blocks.
        wanted_until_seconds: time until which decode counts as waiting for the offer. Each heartbeat moves it.
        wanted_by: agents of decode that have sent heartbeats for it.
        in_the_way_seconds: prompts that decode has registered for, and since when they have no blocks because of it.
        awaited: how many ranks must be in ``settled``; None until a rank of decode has told its size.
        draining: holds of earlier preemptions, whose blocks may still be read.
        write_tasks: registrations that are served from it.
        parked: slots that all of it is copied into; None where it is not parked.
        copies: copies of its blocks under way.
        claim: number to report when decode registers for it; 0 for none.
        timeline: from the end of its request on. What is written before that is written while prefill computes.
    """

    update: OfferUpdate
    blocks: tuple[KernelBlockRange, ...] = ()
    finished: bool = False
    stopped: str = ""
    is_kept: bool = True
    settled: set[int] = field(default_factory=set)
    waived: set[int] = field(default_factory=set)
    readers: set[int] = field(default_factory=set)
    wanted_until_seconds: float = 0.0
    wanted_by: set[str] = field(default_factory=set)
    in_the_way_seconds: dict[PrefillRequestId, float] = field(default_factory=dict)
    awaited: int | None = None
    draining: list[int] = field(default_factory=list)
    write_tasks: dict[WriteKey, WriteTask] = field(default_factory=dict)
    parked: Held | None = None
    copies: int = 0
    claim: int = 0
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def request_id(self) -> PrefillRequestId:
        return self.update.request_id

    def means(self, other: OfferUpdate | Registration) -> bool:
        """Whether that is of the same prompt."""
        return (self.update.digest, self.update.num_tokens) == (other.digest, other.num_tokens)

    def follow(self, now_seconds: float) -> None:
        """Note in the timeline in what state it is now."""
        if not self.finished or (self.is_satisfied and self.timeline.marks):
            return
        tasks, state = self.write_tasks.values(), State.PREFILL_OFFERED
        # Of a push everything may have been written before prefill's request has ended.
        if self.is_satisfied or self.readers - self.settled or any(task.known is not None for task in tasks):
            state = State.PREFILL_SENDING
        elif tasks:
            state = State.PREFILL_HANDSHAKE
        elif self.copies:
            state = State.PREFILL_COPYING
        self.timeline.enter(state, now_seconds)

    def report_claim(self, outcomes: OutcomeQueue) -> None:
        """A rank of decode has registered for it, or needs nothing of it."""
        if self.claim:
            outcomes.claimed(self.claim)
            self.claim = 0

    def lose_blocks(self) -> None:
        """The request was preempted: it has no blocks and no computed tokens any more."""
        self.blocks = ()
        self.update = msgspec.structs.replace(self.update, groups=(), ready_tokens=0, manifest=None, is_held=False)

    @property
    def ranks_served(self) -> set[int]:
        return {task.registration.decode.tp_rank for task in self.write_tasks.values()}

    @property
    def is_satisfied(self) -> bool:
        return self.awaited is not None and len(self.settled) >= self.awaited

    @property
    def may_be_read(self) -> bool:
        """Whether it has blocks that vLLM will not reuse before they are reported idle, and decode may have them."""
        return bool(self.blocks) and (self.update.is_held or self.finished) and not self.stopped

    @property
    def is_free_of_blocks(self) -> bool:
        """Whether all of it is copied into slots, so that its blocks are not needed any more."""
        return self.parked is not None and self.parked.staged_token >= self.update.num_tokens and not self.copies


GRACE_SECONDS = 5.0
"""How long a registration waits if prefill knows its name, but has no matching offer: the router may be retrying both
sides, and prefill's request arrives second."""


class OfferMatcher:
    """Offers and registrations that wait for each other. Once per worker.

    The name of a finished offer, and a release that arrived before its offer, are remembered for as long as a lease; a
    release by name only for `GRACE_SECONDS`: another request may use that name.

    Attributes:
        offers: those that are not finished, by request id.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._clock: Clock = context.clock
        self._remembered_seconds = context.settings.kv_lease_duration_seconds
        self._unmatched_seconds = context.settings.handover_timeout_seconds
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
        """Add a new offer, and join the registrations that have waited for it. Returns the ranks of decode that have
        already released it: tp_rank -> tp_size."""
        self.offers[offer.request_id] = offer
        self._named.setdefault(offer.update.name, {})[offer.request_id] = offer
        for task in list(self._unmatched_of.get(offer.update.name, {}).values()):
            if task.stopping is None and self.wanted_by(task.registration) is offer:
                self.forget(task)
                self.join(task, offer)
        self._released.pop((offer.update.name, offer.update.digest), None)
        ranks = self._released_ranks.pop((offer.update.name, offer.update.digest), {})
        waiving = self._forget_waived(offer.update.name)
        if len(self._named[offer.update.name]) == 1:
            offer.waived = waiving.keys() - ranks.keys() - offer.ranks_served
            ranks = {**waiving, **ranks}
        return {tp_rank: tp_size for tp_rank, tp_size in ranks.items() if tp_rank not in offer.ranks_served}

    def remove(self, offer: Offer) -> None:
        """Remove a finished offer. Its name is remembered for ``remembered_seconds``."""
        del self.offers[offer.request_id]
        named = self._named[offer.update.name]
        del named[offer.request_id]
        if not named:
            del self._named[offer.update.name]
        self._recent[offer.update.name] = self._clock.now_seconds() + self._remembered_seconds

    def join(self, task: WriteTask, offer: Offer) -> None:
        tp_rank = task.registration.decode.tp_rank
        if tp_rank in offer.waived:
            offer.waived.remove(tp_rank)
            offer.settled.discard(tp_rank)
        task.offer = offer
        offer.write_tasks[task.key] = task

    def wanted_by(self, registration: Registration) -> Offer | None:
        """Returns the oldest offer of this name and prompt that this rank of decode has not used yet."""
        rank = registration.decode.tp_rank
        for offer in self._named.get(registration.name, {}).values():
            had = offer.ranks_served | (offer.settled - offer.waived)
            if offer.means(registration) and not offer.stopped and rank not in had:
                return offer
        return None

    def wait(self, task: WriteTask) -> None:
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
            return found if found is None or message.digest in ("", found.update.digest) else None
        named = self._named.get(message.name, {})
        if not message.digest and named:
            offer, *others = named.values()
            if others or message.tp_rank in offer.ranks_served | offer.settled:
                return None
            offer.waived.add(message.tp_rank)
            return offer
        for offer in named.values():
            if offer.update.digest == message.digest and message.tp_rank not in offer.settled:
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

    def _forget_waived(self, name: str) -> dict[int, int]:
        """Forget and return the ranks of decode that have released this name only: tp_rank -> tp_size."""
        self._released.pop((name, ""), None)
        return self._released_ranks.pop((name, ""), {})
