# SPDX-License-Identifier: Apache-2.0
"""worker/prefill/{registry,offers,writer}.py: what is written for whom, and when blocks are free."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from support.engine_fakes import grown
from support.internals import leftovers, matcher_of, tokens_of
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

from kvcached_nixl.deadlines import STILL_SECONDS
from kvcached_nixl.ids import KernelBlock, PrefillRequestId
from kvcached_nixl.settings import TransferMode
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed, RevocationCause
from kvcached_nixl.wire.manifest import Manifest
from kvcached_nixl.wire.messages import (
    INTERVAL,
    KernelBlockRange,
    Message,
    Reading,
    Registration,
    Release,
    StagingGrant,
    StagingRequest,
    Stopped,
    Written,
    decode,
)
from kvcached_nixl.wire.step import OfferUpdate, Revocation
from kvcached_nixl.worker.prefill.offers import WriteTask
from kvcached_nixl.worker.prefill.registry import SPARED_SECONDS, WANTED_INTERVALS, OfferRegistry
from kvcached_nixl.worker.transfer.context import CAPACITY, RecentSet
from kvcached_nixl.worker.transfer.slab import Slots, Use
from kvcached_nixl.worker.transfer.topology import ConnectedPeer

P1, P2, P3 = map(PrefillRequestId, ("p-1", "p-2", "p-3"))
BLOCKS = ([7, 3, 9],)
NAME = "transfer:t"


class Prefill(Local):
    """`OfferRegistry` of a push, and what it has reported. ``slots``: where prefill stages, those of its slab."""

    def __init__(self, *, slots: Slots | None = None, **more: Any) -> None:
        super().__init__(mode=TransferMode.PUSH, **more)
        self.copies = HeldCopies()
        if slots is not None:
            self.side.staging = staging_over(slots, self.copies, (BLOCK_SIZE,))
        self.done: list[str] = []
        self.quiet: list[int] = []
        self.num_fetched = 0
        self.expired: list[str] = []
        self.claimed: list[int] = []
        self.table = self.side.token_table
        outcomes: Any = SimpleNamespace(
            done=self._done,
            hold_idle=self.quiet.append,
            fetched=self._fetched,
            expired=self.expired.append,
            moved=lambda tally: None,
            revoked=lambda cause: None,
            claimed=self.claimed.append,
            timed=lambda reported: None,
        )
        self.side.outcomes = outcomes
        self.registry = OfferRegistry(self.side)
        self.listener.role = self.registry.writer
        self.memory.cells[:] = np.arange(self.memory.cells.size).reshape(self.memory.cells.shape) + 1

    def _fetched(self) -> None:
        self.num_fetched += 1

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
        self.registry.writer.register(remote.transport.name, made)
        return made

    def is_clean(self) -> bool:
        """Whether no offer, registration, deadline, transfer or slot is left. Finished offers' names are remembered."""
        writer, matcher = self.registry.writer, matcher_of(self.registry)
        left = [
            *leftovers(self.registry, writer),
            *leftovers(matcher, but=("_recent",)),
        ]
        staging = self.side.staging
        has_slots = staging is not None and any(staging.slots.used(use) for use in Use)
        return not (left or has_slots or self.unreleased() or writer.num_final)


@pytest.fixture
def prefill() -> Prefill:
    return Prefill()


@pytest.fixture
def remote(prefill: Prefill) -> Remote:
    return prefill.remote()


def said(remote: Remote) -> list[Message]:
    return [decode(one) for _, one in remote.transport.received()]


def written(manifest_: Manifest | None = None, end_token: int = TOKENS) -> Written:
    return Written(1, 0, 0, manifest_, end_token)


LAST = manifest()


def is_written(
    prefill: Prefill, remote: Remote, blocks: tuple[int, ...] = (7, 3, 9), theirs: tuple[int, ...] = (17, 13, 19)
) -> bool:
    return all(
        np.array_equal(prefill.memory.cells[:, here], remote.memory.cells[:, there])
        for here, there in zip(blocks, theirs, strict=True)
    )


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
    prefill.register(remote, **changed)
    prefill.offer(is_finished=True)
    prefill.deliver()
    (stopped,) = said(remote)
    assert isinstance(stopped, Stopped) and stopped.cause == FailureCause.RANGE
    assert not remote.memory.cells.any() and prefill.transport.connection("remote-0")
    assert prefill.done == ["p-1"] and prefill.is_clean()


def test_what_was_refused_is_freed_without_a_search_for_garbage(prefill: Prefill, remote: Remote) -> None:
    """Frames that a reason keeps keep the engine, and its NIXL agent, too."""
    gc.collect()
    gc.disable()
    try:
        prefill.offer(is_finished=True)
        prefill.register(remote, digest=OTHER_DIGEST, request_id="p-1")
        prefill.deliver()
        (stopped,) = said(remote)
        assert isinstance(stopped, Stopped) and stopped.cause == FailureCause.DIGEST
        assert not [one for one in gc.get_objects() if type(one) is WriteTask]
    finally:
        gc.enable()


def test_who_registers_for_another_is_refused(prefill: Prefill, remote: Remote) -> None:
    """Another agent answers at the registration's address than the one that sent it: nothing is written to either."""
    prefill.offer(is_finished=True)
    prefill.registry.writer.register("stranger-0", registration(1, remote.address))
    prefill.deliver()
    assert prefill.transport.posted == [] and said(remote) == []
    assert prefill.done == ["p-1"] and prefill.is_clean()
    assert len(prefill.asking.asked) == 2 and not prefill.peers.dropped, "nobody is answered"
    prefill.register(remote, 2)
    prefill.deliver()
    assert said(remote) == [], "it counts as a rank that needs no more; another offer will be its own"
    assert prefill.done == ["p-1"]


# ----------------------------------------------------------------------------------------------- decode's staging slab


def grant(remote: Remote, first_token: int, end_token: int, *blocks: int, attempt: int = 1) -> StagingGrant:
    slots = tuple(map(KernelBlock, blocks))
    return StagingGrant(attempt, remote.address, first_token, end_token, (KernelBlockRange(first_token, slots),))


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
    prefill.registry.writer.take_grant(agent, grant(remote, first_token, end_token, 20, 21, 22, attempt=attempt))
    prefill.deliver()
    assert said(remote) == [StagingRequest(1, 0, 0, 8)] and not prefill.transport.posted
    prefill.registry.writer.take_grant("remote-0", grant(remote, 0, 8, 20, 21))
    prefill.registry.writer.take_grant("remote-0", grant(remote, 0, 8, 22, 23))
    prefill.deliver()
    assert said(remote) == [written(end_token=8)]
    assert is_written(prefill, remote, (7, 3), (20, 21)) and not remote.memory.cells[:, 22].any()


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
    assert said(remote) == [Stopped(1, 0, FailureCause.DEFECT, "no room", False)]
    assert prefill.done == ["p-1"] and prefill.is_clean()


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


# ------------------------------------------------------------------------------------------------ withdrawn, dead peers


def test_a_defect_fails_the_registration_that_it_met(prefill: Prefill, remote: Remote) -> None:
    prefill.register(remote)
    prefill.registry.writer.fail(("remote-0", 1), HandOverFailed(FailureCause.DEFECT, "IndexError: of ours"))
    prefill.registry.writer.fail(("remote-0", 2), HandOverFailed(FailureCause.DEFECT, "unknown"))
    prefill.deliver()
    assert said(remote) == [Stopped(1, 0, FailureCause.DEFECT, "IndexError: of ours", False)]
    assert prefill.is_clean()


def test_a_defect_while_a_write_is_made_fails_its_registration(
    prefill: Prefill, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise IndexError("of ours")

    monkeypatch.setattr(ConnectedPeer, "routes", fail)
    prefill.offer(is_finished=True)
    prefill.register(remote)
    prefill.deliver()
    assert said(remote) == [Stopped(1, 0, FailureCause.DEFECT, "IndexError: of ours", False)]
    assert prefill.done == ["p-1"] and prefill.is_clean()


# ----------------------------------------------------------------------------------------------- prefill's request ends


def test_one_that_finishes_short_lets_decode_down(prefill: Prefill, remote: Remote) -> None:
    prefill.register(remote)
    prefill.offer(4, blocks=([7],), is_finished=True)
    prefill.clock.advance(1)
    prefill.deliver()
    assert said(remote)[-1] == Stopped(1, 0, FailureCause.STOPPED, "prefill computed 4 of 10 tokens", False)


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


@pytest.mark.parametrize(
    ("who", "computing", "is_spared", "is_spared_long"),
    [
        ("nobody", (), True, True),
        ("another", (), True, False),
        ("of a copy", (), True, False),
        ("itself", (), False, False),
        ("itself", (P2,), True, True),
    ],
)
def test_decode_waits_in_vain_only_for_a_prompt_that_it_has_given_its_room_to(
    prefill: Prefill,
    remote: Remote,
    who: str,
    computing: tuple[PrefillRequestId, ...],
    is_spared: bool,
    is_spared_long: bool,
) -> None:
    """Which it has registered for, or released where it takes the heads of a copy, and which has no blocks on
    prefill."""
    seconds = WANTED_INTERVALS * INTERVAL * prefill.side.settings.kv_lease_duration_seconds
    revocation = Revocation(RevocationCause.BLOCKS, "", spares_wanted=True, computing=frozenset(computing))
    prefill.registry.renew("another", [NAME])
    prefill.offer(is_finished=True)
    prefill.clock.advance(seconds - 0.1)
    assert prefill.registry.outlasts(P1, revocation), "a heartbeat has come before the offer"
    prefill.clock.advance(0.2)
    assert not prefill.registry.outlasts(P1, revocation)
    prefill.registry.renew(remote.transport.name if who == "itself" else "another", [NAME])
    prefill.offer(0, P2, name="transfer:2", blocks=())
    if who == "of a copy":
        prefill.registry.release(Release("p-2", "transfer:2", DIGEST, 0, 1))
    elif who != "nobody":
        prefill.register(remote, name="transfer:2")
    assert prefill.registry.outlasts(P1, revocation) == is_spared
    prefill.clock.advance(SPARED_SECONDS)
    prefill.registry.renew("another", [NAME])
    assert prefill.registry.outlasts(P1, revocation) == is_spared_long


def test_short_waits_of_others_do_not_add_up(prefill: Prefill, remote: Remote) -> None:
    """Between them, prefill may not have lacked blocks at all, and so not have asked."""
    revocation = Revocation(RevocationCause.BLOCKS, "", spares_wanted=True)
    prefill.offer(is_finished=True)
    for number, request_id in enumerate((P2, P3)):
        name = f"transfer:{request_id}"
        prefill.offer(0, request_id, name=name, blocks=())
        prefill.register(remote, 1 + number, name=name)
        for _ in range(2):
            prefill.registry.renew("another", [NAME])
            assert prefill.registry.outlasts(P1, revocation), request_id
            prefill.clock.advance(SPARED_SECONDS / 2)
        prefill.registry.stop(request_id, "aborted")


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


@pytest.mark.parametrize(
    ("how", "num_fetched"), [("written", 1), ("read", 1), ("stopped", 0), ("released", 0), ("expired", 0)]
)
def test_only_what_decode_has_had_counts_as_fetched(
    prefill: Prefill, remote: Remote, how: str, num_fetched: int
) -> None:
    prefill.offer(is_finished=True)
    if how in ("written", "stopped"):
        prefill.register(remote)
    if how == "stopped":
        prefill.registry.writer.fail((remote.transport.name, 1), HandOverFailed(FailureCause.DEFECT, "of ours"))
    if how == "read":
        prefill.registry.read(Reading("p-1", 0))
    if how in ("read", "released"):
        prefill.registry.release(Release("p-1", NAME, DIGEST, 0, 1))
    prefill.deliver()
    for _ in range(2):
        prefill.clock.advance(prefill.side.settings.kv_lease_duration_seconds)
        prefill.registry.turn()
    assert prefill.done == ["p-1"] and prefill.num_fetched == num_fetched
    assert prefill.expired == (["p-1"] if how == "expired" else [])


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_lease_outlasts_a_stop_of_the_process_if_decode_has_sent_heartbeats(
    prefill: Prefill, is_wanted: bool
) -> None:
    """NIXL's thread is stopped, too, and hands over what has arrived only after the first turn. Each stop counts once,
    however slow the turns after it are."""
    prefill.offer(is_finished=True)
    for _ in range(2 if is_wanted else 1):
        prefill.clock.advance(2 * prefill.side.settings.kv_lease_duration_seconds)
        prefill.registry.turn()
        assert not prefill.done
        if is_wanted:
            prefill.registry.renew("decode-0", [NAME])
        for _ in range(2):
            prefill.clock.advance(1.5 * STILL_SECONDS)
            prefill.registry.turn()
    assert prefill.expired == prefill.done == ([] if is_wanted else ["p-1"])


def test_a_release_by_id_for_another_prompt_is_dropped(prefill: Prefill) -> None:
    """A client's parameters may name the offer of another client's request."""
    prefill.offer(is_finished=True)
    prefill.registry.release(Release("p-1", NAME, OTHER_DIGEST, 0, 1))
    assert prefill.done == []
    prefill.registry.release(Release("p-1", NAME, DIGEST, 0, 1))
    assert prefill.done == ["p-1"]


def test_a_release_by_name_means_that_prompt_and_one_that_is_not_settled(prefill: Prefill) -> None:
    for request_id in (P1, P2):
        prefill.offer(request_id=request_id, is_finished=True)
    prefill.registry.release(Release("", NAME, OTHER_DIGEST, 0, 1))
    assert prefill.done == []
    for rank, expected in ((0, []), (0, []), (1, ["p-1"]), (1, ["p-1", "p-2"])):
        prefill.registry.release(Release("", NAME, DIGEST, rank, 2))
        assert prefill.done == expected


WAIVED = Release("", NAME, "", 0, 1)
"""A release of a request that decode's server has rejected: it has no digest, as its prompt is not known there."""


def test_of_several_offers_a_name_alone_gives_up_none(prefill: Prefill) -> None:
    """Rule R7: with several offers of one name, a release by name only does not say which one is meant."""
    prefill.offer(is_finished=True)
    prefill.offer(request_id=P2, digest=OTHER_DIGEST, is_finished=True)
    prefill.registry.release(WAIVED)
    assert not prefill.done


@pytest.mark.parametrize("when", ["before its offer", "behind its offer", "while it is written"])
def test_who_wants_the_prompt_has_it_whatever_a_name_gave_up(when: str, prefill: Prefill, remote: Remote) -> None:
    """Rule R7: a registration with the offer's digest is written, although the offer was released by name only: a
    router has retried with another decode server."""
    if when != "before its offer":
        prefill.offer(4, blocks=([7],))
    told: list[Callable[[], object]] = [lambda: prefill.registry.release(WAIVED), lambda: prefill.register(remote)]
    for tell in reversed(told) if when == "while it is written" else told:
        tell()
    prefill.offer(is_finished=True)
    assert not prefill.done
    prefill.deliver()
    assert is_written(prefill, remote) and prefill.done == ["p-1"] and prefill.expired == []


def test_who_wants_another_prompt_does_not_have_what_a_name_gave_up(prefill: Prefill, remote: Remote) -> None:
    prefill.offer(4, blocks=([7],))
    prefill.registry.release(WAIVED)
    prefill.register(remote, digest=OTHER_DIGEST)
    prefill.offer(is_finished=True)
    assert prefill.done == ["p-1"]


def test_a_name_alone_counts_rank_by_rank(prefill: Prefill) -> None:
    prefill.registry.release(Release("", NAME, "", 0, 2))
    prefill.offer(is_finished=True)
    assert not prefill.done
    prefill.registry.release(Release("", NAME, "", 1, 2))
    assert prefill.done == ["p-1"]


# ---------------------------------------------------------------------------------------------- preemption and rollback


def test_tokens_that_were_written_and_are_computed_anew_end_the_hand_over(prefill: Prefill, remote: Remote) -> None:
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
