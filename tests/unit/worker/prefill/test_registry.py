# SPDX-License-Identifier: Apache-2.0
"""worker/prefill/{registry,registrations,offers,writer}.py: what is written for whom, and when blocks are free."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from support.engine_fakes import grown
from support.internals import forbid_scans, leftovers, matcher_of, registrations_of, tokens_of, writer_of
from support.worker_fakes import (
    BLOCK_SIZE,
    DIGEST,
    OTHER_DIGEST,
    TOKENS,
    HeldCopies,
    Local,
    Memory,
    Remote,
    manifest,
    registration,
    staging_over,
)

from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.settings import Settings
from kvcached_nixl.transfer_mode import TransferMode
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed, RevocationCause
from kvcached_nixl.wire.manifest import Manifest
from kvcached_nixl.wire.messages import (
    KernelBlockRange,
    Message,
    Reading,
    Registration,
    Release,
    StagingGrant,
    StagingRequest,
    Stopped,
    Withdrawal,
    Written,
    decode,
)
from kvcached_nixl.wire.step import OfferUpdate, Revocation
from kvcached_nixl.wire.timeline import Reported, State, Timeline
from kvcached_nixl.worker.prefill.offers import GRACE_SECONDS
from kvcached_nixl.worker.prefill.registry import OfferRegistry
from kvcached_nixl.worker.transfer.context import CAPACITY, RecentSet
from kvcached_nixl.worker.transfer.slab import Slots, Use
from kvcached_nixl.worker.transfer.transfer_queue import Budget, TransferTally

P1, P2, P3 = map(PrefillRequestId, ("p-1", "p-2", "p-3"))
BLOCKS = ([7, 3, 9],)
LEASE, UNMATCHED = 30.0, 60.0
NAME = "transfer:t"


def hear(registry: OfferRegistry, agent: str, message: Message) -> None:
    """As the transfer thread does when it has read a message."""
    match message:
        case Registration():
            registry.registrations.register(agent, message)
        case StagingGrant():
            registry.registrations.take_grant(agent, message)
        case Withdrawal():
            registry.registrations.withdraw(agent, message)
        case Reading():
            registry.read(message)
        case Release():
            registry.release(message)


class Prefill(Local):
    """`OfferRegistry`, and what it has reported. ``is_push``: prefill WRITEs; ``slots``: where prefill stages, those of
    its slab, which is `memory` then."""

    def __init__(
        self, *, is_push: bool = True, unmatched: float = UNMATCHED, slots: Slots | None = None, **more: Any
    ) -> None:
        super().__init__(**more)
        self.copies = HeldCopies()
        if slots is not None:
            self.side.staging = staging_over(slots, self.copies, (BLOCK_SIZE,))
        self.done: list[str] = []
        self.quiet: list[int] = []
        self.expired: list[str] = []
        self.moved: list[TransferTally] = []
        self.revoked: list[RevocationCause] = []
        self.claimed: list[int] = []
        self.timed: list[Reported] = []
        self.table = self.side.token_table
        outcomes: Any = SimpleNamespace(
            done=self._done,
            hold_idle=self.quiet.append,
            expired=self.expired.append,
            moved=self.moved.append,
            revoked=self.revoked.append,
            claimed=self.claimed.append,
            timed=self.timed.append,
        )
        self.side.outcomes = outcomes
        self.side.settings = Settings(
            TransferMode.PUSH if is_push else TransferMode.PULL,
            kv_lease_duration_seconds=LEASE,
            handover_timeout_seconds=unmatched,
        )
        self.registry = OfferRegistry(self.side)
        self.listener.role = self.registry.registrations
        self.memory.cells[:] = np.arange(self.memory.cells.size).reshape(self.memory.cells.shape) + 1

    def _done(self, request_id: PrefillRequestId) -> None:
        assert request_id not in self.done, "done twice"
        assert request_id not in tokens_of(self.table), "its ownership token is still there"
        self.done.append(request_id)

    def offer(
        self,
        ready_tokens: int = TOKENS,
        request_id: PrefillRequestId = P1,
        *,
        name: str = NAME,
        digest: str = DIGEST,
        blocks: tuple[list[int], ...] = BLOCKS,
        is_finished: bool = False,
    ) -> None:
        made = manifest(request_id=request_id, digest=digest) if ready_tokens >= TOKENS else None
        self.registry.offer(OfferUpdate(request_id, name, digest, TOKENS, grown(*blocks), ready_tokens, made))
        if is_finished:
            self.registry.finish(request_id)

    def register(self, remote: Remote, attempt: int = 1, **changed: Any) -> Registration:
        made = registration(attempt, remote.address, **changed)
        hear(self.registry, remote.transport.name, made)
        return made

    def is_clean(self) -> bool:
        """Whether no offer, registration, deadline or transfer is left. Names of finished offers are remembered."""
        writer, matcher = writer_of(self.registry), matcher_of(self.registry)
        left = [
            *leftovers(self.registry, registrations_of(self.registry), writer),
            *leftovers(matcher, but=("_recent",)),
        ]
        return not left and not self.unreleased() and writer.num_final == 0


@pytest.fixture
def prefill() -> Prefill:
    return Prefill()


@pytest.fixture
def remote(prefill: Prefill) -> Remote:
    return prefill.remote()


def said(remote: Remote) -> list[Message]:
    return [decode(one) for _, one in remote.transport.received()]


def written(manifest_: Manifest | None = None, index: int = 0, attempt: int = 1, end_token: int = TOKENS) -> Written:
    return Written(attempt, 0, index, manifest_, end_token)


LAST = manifest()


def is_written(
    prefill: Prefill, remote: Remote, blocks: tuple[int, ...] = (7, 3, 9), theirs: tuple[int, ...] = (17, 13, 19)
) -> bool:
    return all(
        np.array_equal(prefill.memory.cells[:, here], remote.memory.cells[:, there])
        for here, there in zip(blocks, theirs, strict=True)
    )


# ------------------------------------------------------------------------------------------------------------ timelines


def timed(prefill: Prefill) -> list[tuple[State, float]]:
    """The states that its only offer was in, and for how long."""
    (reported,) = prefill.timed
    _, _, timeline = Timeline.read(reported)
    return [(one.state, one.end_seconds - one.begin_seconds) for one in timeline.intervals()]


# -------------------------------------------------------------------------------------------------------------- pairing


@pytest.mark.parametrize("is_first", ["registration", "offer"])
@pytest.mark.parametrize("digest", [OTHER_DIGEST, DIGEST])
def test_another_prompt_under_the_same_name_is_never_written(
    prefill: Prefill, remote: Remote, is_first: str, digest: str
) -> None:
    """A registration of another digest or length than the offer's is not written, whichever of them comes first."""
    end_token = TOKENS if digest != DIGEST else 9
    if is_first == "registration":
        prefill.register(remote, digest=digest, num_tokens=end_token, end_token=end_token)
        prefill.offer(is_finished=True)
    else:
        prefill.offer(is_finished=True)
        prefill.register(remote, digest=digest, num_tokens=end_token, end_token=end_token)
    prefill.deliver()
    assert said(remote) == [] and not remote.memory.cells.any()
    prefill.clock.advance(UNMATCHED)
    prefill.registry.turn()
    prefill.deliver()
    (stopped,) = said(remote)
    assert isinstance(stopped, Stopped) and stopped.cause == FailureCause.DEADLINE
    assert "of this name and prompt" in stopped.reason
    assert not remote.memory.cells.any()


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"request_id": "p-9"}, FailureCause.LEASE),
        ({"request_id": "p-1", "digest": OTHER_DIGEST}, FailureCause.DIGEST),
        ({"request_id": "p-1", "num_tokens": 9, "end_token": 9}, FailureCause.DIGEST),
    ],
    ids=["unknown", "digest", "length"],
)
def test_an_exact_request_that_is_not_there_is_refused_at_once(
    prefill: Prefill, remote: Remote, changed: dict[str, Any], cause: FailureCause
) -> None:
    prefill.offer(is_finished=True)
    prefill.register(remote, **changed)
    prefill.deliver()
    (stopped,) = said(remote)
    assert isinstance(stopped, Stopped) and (stopped.attempt, stopped.cause) == (1, cause)
    assert not remote.memory.cells.any()


def test_grace_is_never_longer_than_the_wait() -> None:
    prefill = Prefill(unmatched=1.0)
    prefill.offer(digest=OTHER_DIGEST)
    remote = prefill.remote()
    prefill.register(remote)
    prefill.clock.advance(1.0)
    prefill.registry.turn()
    prefill.deliver()
    assert len(said(remote)) == 1


def test_a_name_is_forgotten_with_its_lease(prefill: Prefill, remote: Remote) -> None:
    prefill.offer(is_finished=True)
    prefill.registry.stop(P1, "aborted")
    prefill.clock.advance(LEASE)
    prefill.registry.turn()
    assert not leftovers(matcher_of(prefill.registry))
    prefill.register(remote)
    prefill.clock.advance(UNMATCHED - 1)
    prefill.registry.turn()
    prefill.deliver()
    assert said(remote) == [], "it waits longer than one whose name is known"
    prefill.clock.advance(1)
    prefill.registry.turn()
    prefill.deliver()
    (stopped,) = said(remote)
    assert isinstance(stopped, Stopped) and stopped.cause == FailureCause.DEADLINE


# -------------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize(
    "changed",
    [
        {"block_ids": ((17, 13),)},
        {"block_ids": ((17, 13, 32),)},
        {"block_ids": ((17, 13, 19), (1, 2, 3))},
        {"block_sizes": (2,), "block_ids": ((17, 13, 19, 20, 21),)},
    ],
    ids=["too few", "out of range", "groups", "block size"],
)
def test_a_registration_that_does_not_fit_is_stopped_and_writes_nothing(
    prefill: Prefill, remote: Remote, changed: dict[str, Any]
) -> None:
    """The registration names tokens or blocks that prefill does not have: it is answered, and nothing is written."""
    prefill.register(remote, **changed)
    prefill.offer(is_finished=True)
    prefill.deliver()
    (stopped,) = said(remote)
    assert isinstance(stopped, Stopped) and stopped.cause == FailureCause.RANGE
    assert not remote.memory.cells.any() and prefill.peers.connection("remote-0")
    assert prefill.done == ["p-1"] and prefill.is_clean()


def test_who_registers_for_another_is_refused(prefill: Prefill, remote: Remote) -> None:
    """Another agent answers at the registration's address than the one that sent it: nothing is written to either."""
    prefill.offer(is_finished=True)
    hear(prefill.registry, "stranger-0", registration(1, remote.address))
    prefill.deliver()
    assert prefill.transport.posted == [] and said(remote) == []
    assert prefill.done == ["p-1"] and prefill.is_clean()
    assert len(prefill.asking.asked) == 2 and not prefill.peers.dropped, "nobody is answered"
    prefill.register(remote, 2)
    prefill.deliver()
    assert said(remote) == [], "it counts as a rank that needs no more; another offer will be its own"
    assert prefill.done == ["p-1"]


def test_a_range_of_several_writes_has_arrived_with_the_last_of_them() -> None:
    """Only its notification names the end of the range, or has the manifest."""
    prefill = Prefill(budget=Budget(descriptors=2))
    remote = prefill.remote()
    prefill.register(remote)
    prefill.offer(8, blocks=([7, 3],))
    prefill.deliver()
    assert said(remote) == [written(end_token=0), written(index=1, end_token=8)]
    prefill.offer(is_finished=True)
    prefill.deliver()
    assert said(remote) == [written(LAST, 2)]
    assert is_written(prefill, remote)
    prefill = Prefill(budget=Budget(descriptors=1))
    remote = prefill.remote()
    prefill.offer(is_finished=True)
    prefill.register(remote)
    prefill.deliver()
    *others, last = said(remote)
    assert others == [written(index=index, end_token=0) for index in range(len(others))] and len(others) > 1
    assert last == written(LAST, len(others))


# ------------------------------------------------------------------------------------------------ decode's staging slab


def grant(remote: Remote, first_token: int, end_token: int, *slots: int, attempt: int = 1) -> StagingGrant:
    return StagingGrant(attempt, remote.address, first_token, end_token, (KernelBlockRange(first_token, slots),))


def test_decode_is_asked_for_slots_of_what_is_ready_and_grants_them_range_by_range(
    prefill: Prefill, remote: Remote
) -> None:
    """Once for each range, up to where the last grant has ended."""
    prefill.register(remote, is_staged=True, block_ids=((),))
    prefill.offer(3, blocks=([7],))
    prefill.deliver()
    assert said(remote) == []
    for ready in (8, 9):
        prefill.offer(ready, blocks=([7, 3, 9],))
        prefill.deliver()
    assert said(remote) == [StagingRequest(1, 0, 0, 8)]
    hear(prefill.registry, "remote-0", grant(remote, 0, 4, 20))
    prefill.deliver()
    assert said(remote) == [StagingRequest(1, 0, 4, 8), written(end_token=4)]
    prefill.offer(is_finished=True)
    hear(prefill.registry, "remote-0", grant(remote, 4, 8, 21))
    prefill.deliver()
    assert said(remote) == [StagingRequest(1, 0, 8, TOKENS), written(index=1, end_token=8)]
    hear(prefill.registry, "remote-0", grant(remote, 8, TOKENS, 22))
    prefill.deliver()
    assert said(remote) == [written(LAST, 2)]
    assert is_written(prefill, remote, (7, 3, 9), (20, 21, 22))
    assert prefill.done == ["p-1"] and prefill.is_clean()


@pytest.mark.parametrize(
    ("first_token", "end_token", "attempt", "agent"),
    [(4, 8, 1, "remote-0"), (0, 9, 1, "remote-0"), (0, 8, 2, "remote-0"), (0, 8, 1, "another-0")],
    ids=["not asked for", "more than was asked for", "attempt", "agent"],
)
def test_a_grant_that_was_not_asked_for_is_ignored(
    prefill: Prefill, remote: Remote, first_token: int, end_token: int, attempt: int, agent: str
) -> None:
    prefill.register(remote, is_staged=True, block_ids=((),))
    prefill.offer(8, blocks=([7, 3],))
    prefill.deliver()
    hear(prefill.registry, agent, grant(remote, first_token, end_token, 20, 21, 22, attempt=attempt))
    prefill.deliver()
    assert said(remote) == [StagingRequest(1, 0, 0, 8)] and not prefill.transport.posted
    hear(prefill.registry, "remote-0", grant(remote, 0, 8, 20, 21))
    hear(prefill.registry, "remote-0", grant(remote, 0, 8, 22, 23))
    prefill.deliver()
    assert said(remote) == [written(end_token=8)]
    assert is_written(prefill, remote, (7, 3), (20, 21)) and not remote.memory.cells[:, 22].any()


@pytest.mark.parametrize("is_verified", [True, False])
def test_what_decode_has_read_is_not_written_again(is_verified: bool, remote: Remote, prefill: Prefill) -> None:
    """Prefill only sends the checksum of it."""
    prefill.offer(is_finished=True)
    prefill.register(remote, is_verified=True, is_read=is_verified, **({"block_ids": ((),)} if is_verified else {}))
    prefill.turn()
    prefill.deliver()
    (told,) = said(remote)
    assert isinstance(told, Written) and (told.index, told.end_token, told.manifest) == (0, TOKENS, LAST)
    assert told.digest is not None and len(told.digest) == 32
    assert len(prefill.transport.posted) == (not is_verified) and remote.memory.cells.any() != is_verified
    assert prefill.done == ["p-1"] and prefill.is_clean()


def test_a_registration_whose_checksum_fails_is_stopped(prefill: Prefill, remote: Remote) -> None:
    """Its blocks are kept until the checksum has ended, whatever else happens."""
    prefill.awaiting_checksum.held, prefill.awaiting_checksum.fails = True, 1
    prefill.offer(is_finished=True)
    prefill.register(remote, is_verified=True)
    prefill.deliver()
    assert prefill.done == [] and said(remote) == []
    prefill.awaiting_checksum.held = False
    prefill.deliver()
    assert said(remote) == [Stopped(1, 0, FailureCause.DEFECT, "computing a checksum failed")]
    assert prefill.done == ["p-1"] and not prefill.transport.posted and prefill.is_clean()


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"is_staged": True, "block_ids": ((),)}, "StagingRequest"),
        ({"is_verified": True, "is_read": True, "block_ids": ((),)}, "Written"),
        ({}, "Stopped"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_is_said_about_a_registration_reaches_nobody_but_who_made_it(
    prefill: Prefill, remote: Remote, changed: dict[str, Any], what: str
) -> None:
    """Another agent of decode may answer at its address meanwhile, and may have an attempt of the same number."""
    prefill.register(remote, **changed)
    prefill.deliver()
    prefill.listener.role = None
    another = Remote(remote.address, prefill.network.agent("another agent"))
    prefill.asking.answers[remote.place] = another.answer()
    prefill.peers.lost("remote-0")
    prefill.deliver()
    if what == "Stopped":
        prefill.registry.registrations.fail(("remote-0", 1), HandOverFailed(FailureCause.DEFECT, "IndexError: of ours"))
    else:
        prefill.offer(is_finished=True)
    prefill.deliver()
    assert said(another) == [] and said(remote) == []
    assert prefill.peers.dropped == {"meant for another agent": 1}


def test_blocks_are_free_as_soon_as_they_are_copied_and_this_is_reported_once() -> None:
    """Whoever registers later is written from the slots."""
    prefill = Prefill(slots=Slots(24, 8))
    remote = prefill.remote()
    prefill.offer(is_finished=True)
    assert prefill.copies.blocks == [[7, 3, 9]] and prefill.done == []
    prefill.copies.end()
    assert prefill.done == ["p-1"] and len(prefill.registry) == 1
    prefill.register(remote)
    prefill.deliver()
    assert said(remote) == [written(LAST)] and is_written(prefill, remote, (0, 1, 2))
    assert prefill.done == ["p-1"] and prefill.side.staging is not None
    assert prefill.side.staging.slots.used(Use.PARKED) == 0 and prefill.is_clean()


def test_an_offer_that_is_copied_and_never_fetched_is_reported_once() -> None:
    prefill = Prefill(slots=Slots(24, 8))
    prefill.offer(is_finished=True)
    prefill.copies.end()
    prefill.clock.advance(LEASE)
    prefill.registry.turn()
    assert (prefill.done, prefill.expired) == (["p-1"], ["p-1"]) and prefill.is_clean()


def test_blocks_that_are_being_copied_are_not_free() -> None:
    """Nor is the hold of an offer that was preempted meanwhile."""
    prefill = Prefill(slots=Slots(24, 8))
    prefill.offer(is_finished=True)
    prefill.registry.preempt(P1, 4)
    prefill.registry.stop(P1, "aborted")
    assert prefill.done == [] and prefill.quiet == []
    prefill.copies.end()
    assert prefill.done == ["p-1"] and prefill.quiet == [4] and prefill.is_clean()


def test_a_hold_of_blocks_that_were_copied_is_idle_although_their_slots_are_written_from() -> None:
    """And these slots are not free before that has ended."""
    prefill = Prefill(slots=Slots(24, 8))
    remote = prefill.remote()
    prefill.registry.offer(OfferUpdate(P1, NAME, DIGEST, TOKENS, grown([7]), 4, None, True))
    prefill.copies.end()
    prefill.register(remote)
    prefill.turn()
    assert len(prefill.in_flight) == 1 and prefill.side.staging is not None
    prefill.registry.preempt(P1, 4)
    assert prefill.quiet == [4] and prefill.side.staging.slots.used(Use.PARKED) == 3
    prefill.deliver()
    assert said(remote) == [written(end_token=4)] and prefill.side.staging.slots.used(Use.PARKED) == 0


# ----------------------------------------------------------------------------------------------- prefill's staging slab


def test_a_registration_whose_blocks_cannot_be_copied_is_told_why() -> None:
    """With its offer larger than the slab, each of its ranges is copied when decode has registered."""
    prefill = Prefill(slots=Slots(8, 4))
    remote = prefill.remote()
    prefill.offer(is_finished=True)
    prefill.register(remote)
    prefill.deliver()
    assert prefill.copies.blocks == [[7]]
    prefill.copies.end("no room")
    prefill.deliver()
    assert said(remote) == [Stopped(1, 0, FailureCause.DEFECT, "no room")]
    assert prefill.done == ["p-1"] and prefill.is_clean()


def test_an_offer_that_is_larger_than_the_slab_is_written_window_by_window() -> None:
    prefill = Prefill(slots=Slots(8, 4))
    remote = prefill.remote()
    prefill.offer(is_finished=True)
    prefill.register(remote)
    prefill.deliver()
    slots = []
    while prefill.copies.asked:
        slots += prefill.copies.slots[0]
        prefill.copies.end()
        prefill.deliver()
    assert said(remote) == [written(end_token=4), written(index=1, end_token=8), written(LAST, 2)]
    assert is_written(prefill, remote, tuple(slots)) and prefill.done == ["p-1"]
    assert prefill.side.staging is not None and prefill.side.staging.slots.used(Use.SENDING) == 0
    assert prefill.is_clean()


def test_windows_of_which_another_rank_writes_everything_make_room_for_the_next() -> None:
    """Beside states every rank is asked, and of those with copies of the same heads the first one moves them."""
    memory = Memory()
    memory.planes = msgspec.structs.replace(memory.planes, copies=2, copy=1)
    prefill = Prefill(slots=Slots(8, 4), tp_size=2, tp_rank=1, memory=memory)
    remote = prefill.remote()
    prefill.offer(is_finished=True)
    prefill.register(remote)
    prefill.deliver()
    while prefill.copies.asked:
        prefill.copies.end()
        prefill.deliver()
    assert said(remote) == [msgspec.structs.replace(written(LAST), tp_rank=1)] and not prefill.transport.posted
    assert prefill.side.staging is not None and prefill.side.staging.slots.used(Use.SENDING) == 0
    assert prefill.done == ["p-1"] and prefill.is_clean()


def test_a_withdrawn_registration_is_answered_when_nothing_is_in_flight(prefill: Prefill, remote: Remote) -> None:
    """Rule R2 (nixl#2067)."""
    prefill.register(remote)
    prefill.offer(8, blocks=([7, 3],))
    prefill.turn()
    hear(prefill.registry, "remote-0", Withdrawal(1, remote.address))
    prefill.turn()
    assert len(prefill.in_flight) == 1 and prefill.registry.registrations.is_used("remote-0")
    prefill.network.deliver(prefill.in_flight[0])
    prefill.clock.advance(1)
    prefill.deliver()
    assert said(remote)[-1] == Stopped(1, 0, FailureCause.STOPPED, "withdrawn")
    prefill.offer(TOKENS, is_finished=True)
    prefill.deliver()
    assert len(prefill.transport.posted) == 1, "nothing more"
    assert prefill.done == ["p-1"] and prefill.is_clean()


def test_a_withdrawal_before_its_registration_is_answered_and_counts(prefill: Prefill, remote: Remote) -> None:
    """Messages may be reordered: the registration that comes after its withdrawal is dropped."""
    hear(prefill.registry, "remote-0", Withdrawal(1, remote.address))
    prefill.offer(is_finished=True)
    prefill.register(remote)
    prefill.deliver()
    assert said(remote) == [Stopped(1, 0, FailureCause.STOPPED, "withdrawn")]
    assert prefill.transport.posted == []
    assert prefill.side.dropped == {"doubled or late registration": 1}
    prefill.register(remote, 2)
    prefill.deliver()
    assert said(remote) == [written(LAST, attempt=2)], "another attempt of it is served"


def test_a_withdrawal_that_is_asked_again_is_answered_again(prefill: Prefill, remote: Remote) -> None:
    """The first answer may get lost."""
    prefill.register(remote)
    for _ in range(3):
        hear(prefill.registry, "remote-0", Withdrawal(1, remote.address))
    prefill.deliver()
    assert said(remote) == [Stopped(1, 0, FailureCause.STOPPED, "withdrawn")] * 3


# ------------------------------------------------------------------------------------------------ withdrawn, dead peers


def test_a_decode_that_is_gone_is_written_no_more(prefill: Prefill, remote: Remote) -> None:
    prefill.register(remote)
    prefill.register(remote, 2, name="transfer:waiting")
    prefill.offer(4, blocks=([7],))
    prefill.turn()
    prefill.registry.registrations.dead("remote-0")
    prefill.registry.registrations.dead("nobody")
    prefill.deliver()
    assert not [one for one in said(remote) if isinstance(one, Stopped) and one.attempt == 2], "nobody is answered"
    prefill.clock.advance(1)
    prefill.deliver()
    assert len(prefill.transport.posted) == 1
    prefill.offer(TOKENS, is_finished=True)
    prefill.deliver()
    assert prefill.done == ["p-1"] and prefill.is_clean()


def test_a_defect_fails_the_registration_that_it_met(prefill: Prefill, remote: Remote) -> None:
    prefill.register(remote)
    prefill.registry.registrations.fail(("remote-0", 1), HandOverFailed(FailureCause.DEFECT, "IndexError: of ours"))
    prefill.registry.registrations.fail(("remote-0", 2), HandOverFailed(FailureCause.DEFECT, "unknown"))
    prefill.deliver()
    assert said(remote) == [Stopped(1, 0, FailureCause.DEFECT, "IndexError: of ours")]
    assert prefill.is_clean()


def test_a_defect_while_a_write_is_made_fails_its_registration(
    prefill: Prefill, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise IndexError("of ours")

    monkeypatch.setattr(prefill.side.routes, "ranges", fail)
    prefill.offer(is_finished=True)
    prefill.register(remote)
    prefill.deliver()
    assert said(remote) == [Stopped(1, 0, FailureCause.DEFECT, "IndexError: of ours")]
    assert prefill.done == ["p-1"] and prefill.is_clean()


# ----------------------------------------------------------------------------------------------- prefill's request ends


def test_one_that_finishes_short_lets_decode_down(prefill: Prefill, remote: Remote) -> None:
    prefill.register(remote)
    prefill.offer(4, blocks=([7],), is_finished=True)
    prefill.clock.advance(1)
    prefill.deliver()
    assert said(remote)[-1] == Stopped(1, 0, FailureCause.STOPPED, "prefill computed 4 of 10 tokens")


@pytest.mark.parametrize("cause", [RevocationCause.WEIGHTS, RevocationCause.LIMIT], ids=lambda cause: cause.label)
@pytest.mark.parametrize("by", ["nobody", "a reader", "a reader of another", "a registration"])
def test_an_offer_that_is_fetched_does_not_give_way(by: str, cause: RevocationCause) -> None:
    """But it is taken back in any case where its bytes are out of date."""
    prefill = Prefill(is_push=by == "a registration")
    remote = prefill.remote()
    prefill.offer(is_finished=True)
    if by == "a registration":
        prefill.register(remote)
    elif by != "nobody":
        hear(prefill.registry, remote.transport.name, Reading(P1 if by == "a reader" else P2, 0))
    revocation = Revocation(cause, "why", number=7)
    stays = by in ("a reader", "a registration") and cause is RevocationCause.LIMIT
    assert prefill.registry.outlasts(P1, revocation) == stays
    if not stays:
        prefill.registry.revoke(P1, revocation)
        prefill.registry.revoke(P1, revocation)
        prefill.deliver()
        assert prefill.done == [P1] and prefill.revoked == [cause], "it is counted once"
    elif by == "a reader":
        hear(prefill.registry, remote.transport.name, Release(P1, "", DIGEST, 0, 1))
        assert prefill.done == [P1] and not prefill.revoked


@pytest.mark.parametrize("is_offered", [True, False])
@pytest.mark.parametrize("how", ["stop", "stop, not kept", "revoke", "close"])
def test_who_may_not_be_fetched_any_more_has_no_ownership_token(prefill: Prefill, how: str, is_offered: bool) -> None:
    """Also without an offer: the token is published before the device has finished the step, the offer made after."""
    if is_offered:
        prefill.offer()
    prefill.table.publish(P1, LAST.ownership_token)
    prefill.table.publish(P2, LAST.ownership_token)
    if how == "revoke":
        prefill.registry.revoke(P1, Revocation(RevocationCause.PAUSED, "paused"))
    elif how == "close":
        prefill.registry.close("the engine ends")
    else:
        prefill.registry.stop(P1, "aborted", is_kept=how == "stop")
    assert set(tokens_of(prefill.table)) == (set() if how == "close" else {P2})
    assert prefill.done == (["p-1"] if how == "stop" else [])


@pytest.mark.parametrize("ends", ["finish", "stop", "preempt"])
def test_a_request_that_nobody_was_told_of_is_done_at_once(prefill: Prefill, ends: str) -> None:
    if ends == "finish":
        prefill.registry.finish(P1)
    elif ends == "stop":
        prefill.registry.stop(P1, "aborted")
    else:
        prefill.registry.preempt(P1, 4)
    assert (prefill.done, prefill.quiet) == (([], [4]) if ends == "preempt" else (["p-1"], []))


# -------------------------------------------------------------------------------------------------------------- release


def test_a_release_by_name_before_its_offer_counts(prefill: Prefill) -> None:
    """A router has asked both sides at once, and decode had the whole prompt in its prefix cache."""
    hear(prefill.registry, "remote-0", Release("", NAME, DIGEST, 0, 1))
    hear(prefill.registry, "remote-0", Release("", NAME, OTHER_DIGEST, 0, 1))
    prefill.offer(is_finished=True)
    assert prefill.done == ["p-1"]
    prefill.offer(request_id=P2, is_finished=True)
    assert prefill.done == ["p-1"], "once"
    prefill.clock.advance(LEASE)
    prefill.registry.turn()
    prefill.registry.turn()
    assert prefill.is_clean()


def test_a_release_by_id_before_its_offer_is_dropped(prefill: Prefill) -> None:
    """A peer learns the id from parameters that prefill returns when it finishes, so an earlier release is forged."""
    hear(prefill.registry, "remote-0", Release("p-1", NAME, DIGEST, 0, 1))
    prefill.offer(is_finished=True)
    assert prefill.done == []


def test_a_release_by_id_for_another_prompt_is_dropped(prefill: Prefill) -> None:
    """A client's parameters may name the offer of another client's request."""
    prefill.offer(is_finished=True)
    hear(prefill.registry, "remote-0", Release("p-1", NAME, OTHER_DIGEST, 0, 1))
    assert prefill.done == []
    hear(prefill.registry, "remote-0", Release("p-1", NAME, DIGEST, 0, 1))
    assert prefill.done == ["p-1"]


def test_a_release_by_name_means_that_prompt_and_one_that_is_not_settled(prefill: Prefill) -> None:
    for request_id in (P1, P2):
        prefill.offer(request_id=request_id, is_finished=True)
    hear(prefill.registry, "remote-0", Release("", NAME, OTHER_DIGEST, 0, 1))
    assert prefill.done == []
    for expected in (["p-1"], ["p-1", "p-2"]):
        hear(prefill.registry, "remote-0", Release("", NAME, DIGEST, 0, 1))
        assert prefill.done == expected


WAIVED = Release("", NAME, "", 0, 1)
"""A release of a request that decode's server has rejected: it has no digest, as its prompt is not known there."""


def test_a_name_alone_gives_up_the_offer_that_has_it(prefill: Prefill) -> None:
    """A release by name only frees the offer of that name, and no other."""
    prefill.offer(is_finished=True)
    prefill.offer(request_id=P2, name="transfer:another", is_finished=True)
    hear(prefill.registry, "remote-0", WAIVED)
    assert prefill.done == ["p-1"]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_name_alone_is_remembered_for_a_moment(is_late: bool, prefill: Prefill) -> None:
    """A release by name only may come before its offer. It is forgotten soon: a later request may have its name."""
    hear(prefill.registry, "remote-0", WAIVED)
    if is_late:
        prefill.clock.advance(GRACE_SECONDS)
        prefill.registry.turn()
        assert prefill.is_clean()
    prefill.offer(4, blocks=([7],))
    assert not prefill.done
    prefill.offer(is_finished=True)
    assert prefill.done == ([] if is_late else ["p-1"])


def test_of_several_offers_a_name_alone_gives_up_none(prefill: Prefill) -> None:
    """Rule R7: with several offers of one name, a release by name only does not say which one is meant."""
    prefill.offer(is_finished=True)
    prefill.offer(request_id=P2, digest=OTHER_DIGEST, is_finished=True)
    hear(prefill.registry, "remote-0", WAIVED)
    assert not prefill.done


def test_a_name_alone_gives_up_the_first_offer_that_comes(prefill: Prefill) -> None:
    prefill.offer(is_finished=True)
    hear(prefill.registry, "remote-0", WAIVED)
    prefill.offer(request_id=P2, is_finished=True)
    assert prefill.done == ["p-1"]


def test_a_name_alone_gives_up_nothing_that_is_being_written(prefill: Prefill, remote: Remote) -> None:
    """A router has retried with another decode server, which has registered."""
    prefill.offer(4, blocks=([7],))
    prefill.register(remote)
    hear(prefill.registry, "another", WAIVED)
    prefill.offer(is_finished=True)
    assert not prefill.done
    prefill.deliver()
    assert is_written(prefill, remote) and prefill.done == ["p-1"]


@pytest.mark.parametrize("when", ["before its offer", "behind its offer"])
def test_who_wants_the_prompt_has_it_whatever_a_name_gave_up(when: str, prefill: Prefill, remote: Remote) -> None:
    """Rule R7: a registration with the offer's digest is written, although the offer was released by name only."""
    if when == "behind its offer":
        prefill.offer(4, blocks=([7],))
    hear(prefill.registry, "another", WAIVED)
    prefill.register(remote)
    prefill.offer(is_finished=True)
    assert not prefill.done
    prefill.deliver()
    assert is_written(prefill, remote) and prefill.done == ["p-1"] and prefill.expired == []


def test_who_wants_another_prompt_does_not_have_what_a_name_gave_up(prefill: Prefill, remote: Remote) -> None:
    prefill.offer(4, blocks=([7],))
    hear(prefill.registry, "another", WAIVED)
    prefill.register(remote, digest=OTHER_DIGEST)
    prefill.offer(is_finished=True)
    assert prefill.done == ["p-1"]


def test_a_name_alone_counts_rank_by_rank() -> None:
    prefill = Prefill()
    hear(prefill.registry, "a", Release("", NAME, "", 0, 2))
    prefill.offer(is_finished=True)
    assert not prefill.done
    hear(prefill.registry, "b", Release("", NAME, "", 1, 2))
    assert prefill.done == ["p-1"]


@pytest.mark.parametrize("digest", [DIGEST, ""])
def test_ranks_that_have_released_it_before_its_offer_are_counted_one_by_one(prefill: Prefill, digest: str) -> None:
    for rank in (0, 1):
        hear(prefill.registry, "a", Release("", NAME, digest, rank, 2))
    prefill.offer(is_finished=True)
    assert prefill.done == ["p-1"]


# ---------------------------------------------------------------------------------------------- preemption and rollback


def test_tokens_that_were_written_and_are_computed_anew_end_the_hand_over(prefill: Prefill, remote: Remote) -> None:
    """Decode already has tokens that prefill computes again, so the registration is stopped."""
    prefill.register(remote)
    prefill.offer(8, blocks=([7, 3],))
    prefill.deliver()
    assert said(remote) == [written(end_token=8)]
    prefill.offer(4, blocks=([7, 3],))
    prefill.offer(TOKENS, is_finished=True)
    prefill.deliver()
    (stopped,) = said(remote)
    assert (
        isinstance(stopped, Stopped)
        and stopped.cause == FailureCause.STOPPED
        and "computes some of its tokens again" in stopped.reason
    )
    assert prefill.done == ["p-1"]


def test_tokens_that_were_not_written_yet_may_be_computed_anew(prefill: Prefill, remote: Remote) -> None:
    """No registration has got these tokens yet, or only one that begins after them."""
    prefill.offer(8, blocks=([7, 3],))
    prefill.offer(4, blocks=([7, 3],))
    prefill.register(remote)
    prefill.deliver()
    prefill.offer(3, blocks=([7, 3],))
    prefill.deliver()
    assert [type(one) for one in said(remote)] == [Written, Stopped]
    prefill.register(remote, 2, request_id="p-1", first_token=8, block_ids=((19,),))
    prefill.offer(TOKENS, is_finished=True)
    prefill.deliver()
    assert is_written(prefill, remote, (9,), (19,))


# ----------------------------------------------------------------------------------------------------------- in general


def test_a_turn_costs_what_is_due() -> None:
    """A turn does not visit the offers and registrations that only wait."""
    prefill = Prefill()
    remote = prefill.remote()
    for number in range(2000):
        prefill.register(remote, number, name=f"transfer:{number}")
        prefill.offer(request_id=PrefillRequestId(f"p{number}"), name=f"transfer:x{number}", is_finished=True)
    forbid_scans(registrations_of(prefill.registry), matcher_of(prefill.registry))
    for _ in range(3):
        prefill.registry.turn()


def test_what_is_remembered_has_an_end() -> None:
    remembered = RecentSet[int]()
    for number in range(CAPACITY + 10):
        remembered.add(number)
    assert [number for number in range(CAPACITY + 10) if number not in remembered] == list(range(10))


def test_an_offer_of_another_prompt_under_its_id_takes_it_back(prefill: Prefill, remote: Remote) -> None:
    """Decode was told of the first prompt's blocks, so the offer is revoked. The request's end is reported once."""
    prefill.offer(0, blocks=())
    prefill.register(remote, 1)
    prefill.offer(TOKENS, name="transfer:other", digest=OTHER_DIGEST, blocks=([1, 2, 4],), is_finished=True)
    prefill.deliver()
    (answer,) = said(remote)
    assert isinstance(answer, Stopped) and answer.cause == FailureCause.REVOKED
    assert prefill.done == ["p-1"] and prefill.is_clean()


# ------------------------------------------------------------------------------------------------ before prefill begins


@pytest.mark.parametrize("why", ["registered", "not known", "ended", "asked after prefill's answer"])
def test_prefill_is_told_at_once_where_nobody_would_register(prefill: Prefill, remote: Remote, why: str) -> None:
    request_id = "p-0" if why == "asked after prefill's answer" else ""
    prefill.register(remote, name="another", **({"request_id": request_id} if request_id else {}))
    if why != "not known":
        prefill.offer(0, blocks=())
    if why == "registered":
        prefill.register(remote, attempt=2)
    if why == "ended":
        prefill.registry.stop(P1, "aborted")
    prefill.registry.await_claim(P1, 5)
    assert prefill.claimed == [5]
