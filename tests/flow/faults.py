# SPDX-License-Identifier: Apache-2.0
"""Faults to plant into kvcached_nixl, one line or one method each. `test_planted_faults` shows that each is caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from flow_engine import FlowHost

from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.scheduler import fetching
from kvcached_nixl.scheduler.fetching import Fetching
from kvcached_nixl.scheduler.handover import HandOver
from kvcached_nixl.scheduler.holds import Holds
from kvcached_nixl.scheduler.offering import Offering
from kvcached_nixl.scheduler.wish import Wish
from kvcached_nixl.transport.memory import MemoryGate, MemoryTransport
from kvcached_nixl.wire.causes import Cause
from kvcached_nixl.wire.manifest import Manifest
from kvcached_nixl.wire.messages import Written
from kvcached_nixl.worker.content import Content
from kvcached_nixl.worker.descriptors import Route
from kvcached_nixl.worker.handover import engine_side, peers, receiving, registering
from kvcached_nixl.worker.handover.attempt import Side
from kvcached_nixl.worker.handover.engine_side import EngineSide
from kvcached_nixl.worker.handover.gates import Gates
from kvcached_nixl.worker.handover.lease import Leases
from kvcached_nixl.worker.handover.local import Routes
from kvcached_nixl.worker.handover.offer import Memory, Offer
from kvcached_nixl.worker.handover.pairing import Pairing
from kvcached_nixl.worker.handover.peers import Peers
from kvcached_nixl.worker.handover.posting import Posting
from kvcached_nixl.worker.handover.reading import ReadShare
from kvcached_nixl.worker.handover.receiving import Receiving
from kvcached_nixl.worker.handover.registering import WriteShare
from kvcached_nixl.worker.handover.rooms import Rooms
from kvcached_nixl.worker.handover.serving import Serving
from kvcached_nixl.worker.handover.source import Staged
from kvcached_nixl.worker.handover.verification import Landings, WordTable
from kvcached_nixl.worker.handover.writing import Writer
from kvcached_nixl.worker.staging.slots import Slots
from kvcached_nixl.worker.staging.staging import Staging

Patcher = pytest.MonkeyPatch
Fault = Callable[[Patcher], None]


def nothing(*_: Any, **__: Any) -> None:
    return None


def always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def then(patch: Patcher, owner: Any, name: str, action: Callable[..., None]) -> None:
    """``action``, with the same arguments, behind a method."""
    method = getattr(owner, name)

    def both(*arguments: Any, **named: Any) -> Any:
        found = method(*arguments, **named)
        action(*arguments, **named)
        return found

    patch.setattr(owner, name, both)


# -------------------------------------------------------------------------------------- what a hand-over says of itself


def decode_compares_no_digest(patch: Patcher) -> None:
    def accept(wish: Any, *_: Any) -> None:
        if wish.refused is not None and wish.refused.cause is Cause.DIGEST:
            wish.refused = None

    then(patch, Wish, "check", accept)


def prefill_pairs_by_name_alone(patch: Patcher) -> None:
    def wanted_by(self: Any, registration: Any) -> Any:
        return next(iter(self._named.get(registration.name, {}).values()), None)

    patch.setattr(Pairing, "wanted_by", wanted_by)


def decode_believes_the_last_write(patch: Patcher) -> None:
    patch.setattr(WriteShare, "_misfit", nothing)


def the_word_is_not_looked_for(patch: Patcher) -> None:
    patch.setattr(Landings, "holds", always(True))


def the_word_stands_for_the_request_alone(patch: Patcher) -> None:
    patch.setattr(Manifest, "word", property(lambda self: 1 + sum(self.request_id.encode()) * 2**20))


def the_word_is_published_with_the_lease_only(patch: Patcher) -> None:
    """Late: when the transfer thread hears that the request has ended."""
    patch.setattr(EngineSide, "_publish", nothing)


def the_word_is_never_removed(patch: Patcher) -> None:
    patch.setattr(WordTable, "remove", nothing)


def a_request_that_stops_early_keeps_its_word(patch: Patcher) -> None:
    def stop(self: Any, request_id: Any, *arguments: Any, **named: Any) -> None:
        if request_id not in self._pairing.offers:
            remove, self._words.remove = self._words.remove, nothing
            original(self, request_id, *arguments, **named)
            self._words.remove = remove
        else:
            original(self, request_id, *arguments, **named)

    original = Serving.stop
    patch.setattr(Serving, "stop", stop)


def the_start_is_not_compared(patch: Patcher) -> None:
    def need(self: Any, address: Any, _: str, known: Any, failed: Any, **named: Any) -> None:
        original(self, address, "", known, failed, **named)

    original = Peers.need
    patch.setattr(Peers, "need", need)


# -------------------------------------------------------------------------------------------------------- the devices


def decode_s_blocks_are_not_fenced(patch: Patcher) -> None:
    begin = engine_side.Begin
    patch.setattr(engine_side, "Begin", lambda attempts, _: begin(attempts, always(True)))


def prefill_offers_what_its_device_has_not_ended(patch: Patcher) -> None:
    offer = engine_side.Offer
    patch.setattr(engine_side, "Offer", lambda *fields: offer(*fields[:-1], always(True)))


# ------------------------------------------------------------------------------------------------ blocks and their ends


def blocks_are_given_back_at_the_failure(patch: Patcher) -> None:
    patch.setattr(Fetching, "_hold", nothing)


def held_blocks_are_never_given_back(patch: Patcher) -> None:
    patch.setattr(Holds, "give_back", always(False))


def stopped_is_said_before_it_is_quiet(patch: Patcher) -> None:
    def stop(self: Any, writing: Any, cause: Any, reason: str, *, is_answered: bool = True) -> None:
        if writing.stopping is None and is_answered:
            self.answer(writing.agent, writing.registration.decode, writing.registration.attempt, cause, reason)
        original(self, writing, cause, reason, is_answered=is_answered)

    original = Writer.stop
    patch.setattr(Writer, "stop", stop)


def a_failed_transfer_is_taken_for_quiet(patch: Patcher) -> None:
    def fail(self: Any, job: Any, reason: str, *_: Any) -> None:
        job.failed = job.failed or reason

    patch.setattr(Posting, "_fail", fail)


def each_handshake_is_a_connection_of_its_own(patch: Patcher) -> None:
    """What is in flight would count as one of an earlier connection."""

    def know(self: Any, link: Any, known: Any) -> None:
        self._connections.pop(known.agent, None)
        original(self, link, known)

    original = Peers._know
    patch.setattr(Peers, "_know", know)


def what_is_given_up_is_taken_for_quiet(patch: Patcher) -> None:
    def settle(self: Any, job: Any) -> None:
        self._settle(job)

    then(patch, Posting, "drop", settle)


def a_read_that_is_stopped_is_taken_for_quiet(patch: Patcher) -> None:
    def stop(self: Any) -> None:
        self._is_stopping = self.is_quiet = True

    patch.setattr(ReadShare, "stop", stop)


def a_write_that_is_stopped_is_taken_for_quiet(patch: Patcher) -> None:
    def stop(self: Any) -> None:
        self.is_quiet = True

    then(patch, WriteShare, "stop", stop)


def preempted_blocks_are_not_held(patch: Patcher) -> None:
    patch.setattr(Offering, "is_read", always(False))


def blocks_that_are_copied_early_are_not_held(patch: Patcher) -> None:
    real = Offering.is_read
    patch.setattr(Offering, "is_read", lambda self, request_id: self._terms.pushes and real(self, request_id))


def blocks_that_may_be_lost_are_copied(patch: Patcher) -> None:
    patch.setattr(Offer, "may_be_read", property(lambda self: bool(self.block_ids)))


def what_was_copied_before_a_preemption_is_used(patch: Patcher) -> None:
    patch.setattr(Staged, "forget", nothing)


def preempted_blocks_are_quiet_at_once(patch: Patcher) -> None:
    def preempt(self: Any, _: Any, hold: int) -> None:
        self._quiet(hold)

    then(patch, Serving, "preempt", preempt)


def draining_holds_are_forgotten(patch: Patcher) -> None:
    def preempt(self: Any, request_id: Any, _: int) -> None:
        offer = self._pairing.offers.get(request_id)
        if offer is not None:
            offer.block_ids, offer.ready_tokens, offer.manifest = (), 0, None

    patch.setattr(Serving, "preempt", preempt)


def prefill_s_blocks_are_free_when_its_request_ends(patch: Patcher) -> None:
    def finished(self: Any, request: Any, *arguments: Any) -> Any:
        _, params = original(self, request, *arguments)
        self._kept.clear()
        return False, params

    original = Offering.finished
    patch.setattr(Offering, "finished", finished)


def nobody_is_told_of_a_request_that_was_aborted(patch: Patcher) -> None:
    def forget(_: Any, __: Any, ___: Any, step: Any) -> None:
        step.withdrawn.clear()

    then(patch, Fetching, "finished", forget)


def other_ranks_are_not_told_of_a_failure(patch: Patcher) -> None:
    def forget(_: Any, __: Any, ___: Any, ____: Any, step: Any) -> None:
        for attempt in [one for one, why in step.withdrawn.items() if "within" not in why]:
            del step.withdrawn[attempt]

    then(patch, Fetching, "collect", forget)


def a_withdrawal_is_forgotten(patch: Patcher) -> None:
    """So that the registration that it has overtaken is taken in."""
    patch.setattr(Memory, "add", nothing)


def _takes_for_dead(self: Receiving, agent: str) -> None:
    for attempt in list(self._attempts.values()):
        for share in attempt.shares:
            if isinstance(share, WriteShare) and share.agent == agent:
                share.gone()


def another_engine_in_its_place_is_taken_for_the_end(patch: Patcher) -> None:
    patch.setattr(Receiving, "gone", _takes_for_dead)


def nobody_listens_is_taken_for_the_end(patch: Patcher) -> None:
    patch.setattr(Receiving, "unreachable", _takes_for_dead)


def who_is_not_heard_of_is_not_fenced(patch: Patcher) -> None:
    patch.setattr(Gates, "fence", staticmethod(nothing))


def a_gate_is_not_closed_and_counts_as_closed(patch: Patcher) -> None:
    patch.setattr(MemoryGate, "close", lambda self: True)


def who_could_write_past_a_gate_is_fenced_by_it(patch: Patcher) -> None:
    patch.setattr(FlowHost, "is_behind_network", lambda self, process: True)


def the_end_of_a_process_is_not_seen(patch: Patcher) -> None:
    patch.setattr(FlowHost, "sees", lambda self, process: False)


def handles_are_kept(patch: Patcher) -> None:
    patch.setattr(MemoryTransport, "release", nothing)


# ----------------------------------------------------------------------------------------------------- tokens and ranks


def a_token_too_few(patch: Patcher) -> None:
    ranges = Routes.ranges
    patch.setattr(Routes, "ranges", staticmethod(lambda routes, groups, end: ranges(routes, groups, max(1, end - 1))))


def blocks_are_paired_from_the_first(patch: Patcher) -> None:
    """Not by the positions of their tokens."""

    def descriptors(self: Any, here: Any, there: Any, first: int, end: int) -> Any:
        moved = type(there)(there.ids, here.first_token) if not there.first_token else there
        return original(self, here, moved, first, end)

    original = Route.descriptors
    patch.setattr(Route, "descriptors", descriptors)


def decode_s_prefix_is_fetched_again(patch: Patcher) -> None:
    def groups(self: Any, block_ids: Any, _: int, terms: Any) -> Any:
        return original(self, block_ids, 0, terms)

    original = Wish.groups
    patch.setattr(Wish, "groups", groups)


def prefill_offers_more_than_it_has_computed(patch: Patcher) -> None:
    """A block ahead."""

    def advance(self: Any, writing: Any) -> None:
        offer = writing.offer
        if offer is None or not offer.ready_tokens:
            original(self, writing)
            return
        ready, offer.ready_tokens = offer.ready_tokens, min(offer.ready_tokens + 4, offer.num_tokens - 1)
        offer.ready_tokens = max(ready, offer.ready_tokens)
        original(self, writing)
        offer.ready_tokens = ready

    original = Writer.advance
    patch.setattr(Writer, "advance", advance)


def another_rank_contributes(patch: Patcher) -> None:
    def contributors(prefill: Any, *, tp_rank: int, tp_size: int, is_latent: bool) -> Any:
        ranks, others = original(prefill, tp_rank=tp_rank, tp_size=tp_size, is_latent=is_latent)
        return tuple((rank + 1) % prefill.tp_size for rank in ranks), others

    original = receiving.contributors
    patch.setattr(receiving, "contributors", contributors)


def one_rank_of_several_contributes(patch: Patcher) -> None:
    def contributors(*arguments: Any, **named: Any) -> Any:
        ranks, others = original(*arguments, **named)
        return ranks[:1], (*ranks[1:], *others)

    original = receiving.contributors
    patch.setattr(receiving, "contributors", contributors)


def blocks_of_the_kernel_are_not_counted(patch: Patcher) -> None:
    patch.setattr(engine_side, "kernel_blocks", lambda blocks, _: blocks)


def heads_are_not_told_apart(patch: Patcher) -> None:
    """Every rank writes the first heads of its peer."""

    def init(self: Any, local: Any, remote: Any) -> None:
        first = max(local.first_head, remote.first_head)
        heads = min(local.last_head, remote.last_head) - first
        changes = {"first_head": 0, "num_heads": heads}
        original(self, msgspec.structs.replace(local, **changes), msgspec.structs.replace(remote, **changes))

    original = Route.__init__
    patch.setattr(Route, "__init__", init)


# ---------------------------------------------------------------------------------------------------- messages and time


def the_last_write_is_taken_for_all_of_them(patch: Patcher) -> None:
    def take(self: Any, message: Any) -> None:
        if isinstance(message, Written) and message.manifest is not None:
            self._arrived.update(range(message.index))
        original(self, message)

    original = WriteShare.take
    patch.setattr(WriteShare, "take", take)


def writes_are_counted_and_not_told_apart(patch: Patcher) -> None:
    """One that is told twice stands for two."""

    def take(self: Any, message: Any) -> None:
        if isinstance(message, Written) and message.index in self._arrived:
            self._arrived.add(max(self._arrived) + 1 if self._last is None else self._last - 1)
        original(self, message)

    original = WriteShare.take
    patch.setattr(WriteShare, "take", take)


def anybody_is_believed(patch: Patcher) -> None:
    def handle(self: Any, agent: str, message: Any) -> None:
        attempt = self._attempts.get(message.attempt)
        shares = attempt.shares if attempt is not None else []
        original(self, shares[0].agent if shares else agent, message)

    original = Receiving.handle
    patch.setattr(Receiving, "handle", handle)


def leases_never_expire(patch: Patcher) -> None:
    patch.setattr(Leases, "take_due", always([]))


def leases_are_not_renewed(patch: Patcher) -> None:
    patch.setattr(Leases, "renew", nothing)


def a_lease_that_ends_lets_go_of_what_is_written(patch: Patcher) -> None:
    def turn(self: Any) -> None:
        for request_id, at in list(self._leases.items()):
            if at <= self._clock.now_seconds():
                self._done(request_id)
        return original(self)  # type: ignore[no-any-return]

    original = Serving.turn
    patch.setattr(Serving, "turn", turn)


def nothing_has_a_deadline(patch: Patcher) -> None:
    class Endless(Deadlines[Any]):
        def take_due(self, now_seconds: float, at_most: int | None = None) -> list[Any]:
            return []

    patch.setattr(fetching, "Deadlines", Endless)


def prefill_does_not_hear_that_it_was_read(patch: Patcher) -> None:
    def release(_: Any, message: Any) -> None:
        return None

    patch.setattr(Serving, "_release", release)


def a_peer_is_asked_once(patch: Patcher) -> None:
    patch.setattr(peers, "HANDSHAKE_TRIES", 1)


def a_renewal_outlives_its_request(patch: Patcher) -> None:
    """Arrival and end in one step: the end is taken in first."""

    def begin_step(self: Any, step: Any) -> None:
        for request_id in step.unrenewed:
            if any(one.request_id == request_id for one in step.renewed):
                step = msgspec.structs.replace(
                    step,
                    unrenewed=[one for one in step.unrenewed if one != request_id],
                    renewed=[msgspec.structs.replace(one, longest_seconds=1e9) for one in step.renewed],
                )
        original(self, step)

    original = EngineSide.begin_step
    patch.setattr(EngineSide, "begin_step", begin_step)


def a_sleeping_engine_is_not_woken(patch: Patcher) -> None:
    """vllm#45168."""
    patch.setattr(HandOver, "woken", nothing)


# --------------------------------------------------------------------------------------------------------------- a slab


def blocks_are_free_while_they_are_copied(patch: Patcher) -> None:
    patch.setattr(Staged, "is_copying", always(False))
    patch.setattr(Staged, "is_free_of_blocks", lambda self, offer: offer in self._parked)


def what_is_copied_is_told_before(patch: Patcher) -> None:
    gather = Staging.gather

    def early(self: Any, held: Any, blocks: Any, to_token: int, ended: Callable[[str], None]) -> None:
        gather(self, held, blocks, to_token, ended)
        held.staged_token = to_token

    patch.setattr(Staging, "gather", early)


def a_copy_that_failed_counts(patch: Patcher) -> None:
    copy = Staging._copy

    def counted(self: Any, *arguments: Any) -> None:
        copy(self, *arguments[:-1], lambda _: arguments[-1](""))

    patch.setattr(Staging, "_copy", counted)


def slots_are_free_while_they_are_written_from(patch: Patcher) -> None:
    def let_go(self: Any, held: Any) -> None:
        if not held.copies and held.slots and held not in self.__dict__.setdefault("_gone", set()):
            self._gone.add(held)
            self._staging.give_back(held)

    patch.setattr(Staged, "_let_go", let_go)

    def find(self: Any, writing: Any, end_token: int) -> Any:
        found = real(self, writing, end_token)
        if found is not None and found.held in self._windows.get(writing, ()):
            self._windows[writing].remove(found.held)
            self._let_go(found.held)
        return found

    real = Staged.find
    patch.setattr(Staged, "find", find)


def slots_are_free_while_they_may_be_written(patch: Patcher) -> None:
    """Those of a request that was withdrawn."""

    def stop(self: Any) -> None:
        if self._rooms is not None:
            for writer in self._rooms._writers.values():
                writer.may_write = False
            self._rooms.close(self.address.tp_rank)

    then(patch, WriteShare, "stop", stop)


def slots_are_copied_when_one_rank_has_written(patch: Patcher) -> None:
    def written(self: Any, rank: int, end_token: int) -> None:
        for writer in self._writers.values():
            writer.written_token = max(writer.written_token, end_token)
        real(self, rank, end_token)

    real = Rooms.written
    patch.setattr(Rooms, "written", written)


def slots_are_never_free_again(patch: Patcher) -> None:
    patch.setattr(Slots, "give_back", nothing)


def who_waits_for_slots_is_forgotten(patch: Patcher) -> None:
    patch.setattr(Staging, "wait", nothing)


def no_slot_is_kept_for_what_moves(patch: Patcher) -> None:

    def available(self: Any, _: Any) -> int:
        return int(self.count - sum(self._used.values()))

    patch.setattr(Slots, "available", available)


# ------------------------------------------------------------------------------------------------- what is verified


def what_has_come_is_not_compared(patch: Patcher) -> None:
    patch.setattr(registering, "compare", lambda *arguments: arguments[-1](None))


def an_engine_that_lied_is_believed_again(patch: Patcher) -> None:
    patch.setattr(Side, "distrust_of", nothing)


def decode_s_blocks_are_free_while_they_are_compared(patch: Patcher) -> None:
    def end(self: Any) -> None:
        self.is_quiet = self._rooms is None or not self._rooms.is_copying

    then(patch, WriteShare, "_end", end)


def prefill_s_blocks_are_free_while_their_digest_is_found(patch: Patcher) -> None:
    def stop(self: Any, writing: Any, *_: Any, **__: Any) -> None:
        for job in list(writing.jobs):
            self._side.posting.drop(job)

    then(patch, Writer, "stop", stop)


def a_digest_is_of_all_heads(patch: Patcher) -> None:
    digest = Content.digest

    def of_all(self: Any, groups: Any, end_token: int, _: Any) -> str:
        return digest(self, groups, end_token, self._planes)

    patch.setattr(Content, "digest", of_all)
