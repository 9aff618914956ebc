# SPDX-License-Identifier: Apache-2.0
"""Faults to plant into kvcached_nixl, one attribute or method each. `test_planted_faults` shows that each is caught."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import msgspec
import pytest

from kvcached_nixl.deadlines import Deadlines
from kvcached_nixl.scheduler import fetch_request
from kvcached_nixl.scheduler.asking.local import LocalPrefills
from kvcached_nixl.scheduler.asking.questions import Questions
from kvcached_nixl.scheduler.asking.wanted import Queue, Window
from kvcached_nixl.scheduler.context import EngineContext, Holds
from kvcached_nixl.scheduler.decode_fetches import DecodeFetches
from kvcached_nixl.scheduler.facade import SchedulerFacade
from kvcached_nixl.scheduler.fetch_request import FetchAttempts, FetchRequest
from kvcached_nixl.scheduler.giving_way import GivingWay, MemoryPressure
from kvcached_nixl.scheduler.kept_offers import KeptOffers, StartGate
from kvcached_nixl.scheduler.prefill_offers import PrefillOffers
from kvcached_nixl.transport.agent import TransferState
from kvcached_nixl.wire.causes import FailureCause
from kvcached_nixl.wire.manifest import Manifest
from kvcached_nixl.wire.messages import KernelBlockRange, Written
from kvcached_nixl.wire.step import EndRenewal, LeaseRenewal, OfferUpdate, Withdraw
from kvcached_nixl.worker import facade
from kvcached_nixl.worker.decode.attempt import Attempt, ReadPart
from kvcached_nixl.worker.decode.fencing import GateUse
from kvcached_nixl.worker.decode.receiver import Receiver
from kvcached_nixl.worker.decode.write_part import ArrivedWrites, Stage, WritePart
from kvcached_nixl.worker.facade import WorkerFacade
from kvcached_nixl.worker.geometry.descriptors import Route
from kvcached_nixl.worker.outcomes import OutcomeQueue
from kvcached_nixl.worker.prefill import registry
from kvcached_nixl.worker.prefill.offers import Offer, OfferMatcher
from kvcached_nixl.worker.prefill.registry import Leases, OfferRegistry
from kvcached_nixl.worker.prefill.source import Staged
from kvcached_nixl.worker.prefill.writer import Writer
from kvcached_nixl.worker.transfer import peers, topology
from kvcached_nixl.worker.transfer.checksums import Checksums, Content
from kvcached_nixl.worker.transfer.context import RecentSet, WorkerContext
from kvcached_nixl.worker.transfer.ownership_tokens import TokenBuffers, TokenTable
from kvcached_nixl.worker.transfer.peers import Peers
from kvcached_nixl.worker.transfer.slab import Slots
from kvcached_nixl.worker.transfer.staging import Staging, StagingWindow
from kvcached_nixl.worker.transfer.topology import LocalRank
from kvcached_nixl.worker.transfer.transfer_queue import TransferQueue
from support.flow_engine import FlowHost
from support.flow_memory import Pool
from support.memory_transport import MemoryGate, MemoryTransport

Patcher = pytest.MonkeyPatch
Fault = Callable[[Patcher], None]


def nothing(*_: Any, **__: Any) -> None:
    return None


def always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def then(patch: Patcher, owner: Any, name: str, action: Callable[..., None]) -> None:
    """Calls ``action`` with the same arguments after each call of a method."""
    method = getattr(owner, name)

    def both(*arguments: Any, **named: Any) -> Any:
        found = method(*arguments, **named)
        action(*arguments, **named)
        return found

    patch.setattr(owner, name, both)


def around(patch: Patcher, owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Calls ``instead`` with a function or method and its arguments in place of it."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **named: instead(real, *arguments, **named))


def _takes_for_dead(self: Receiver, agent: str) -> None:
    for attempt in list(self._attempts.values()):
        for share in attempt.parts:
            if isinstance(share, WritePart) and share.agent == agent:
                share.end_without("is dead")


REPLACED: Mapping[str, tuple[Any, str, Any]] = MappingProxyType(
    {
        # Manifests, digests, ownership tokens.
        "decode_believes_the_last_write": (WritePart, "_misfit", nothing),
        "the_token_is_not_looked_for": (TokenBuffers, "holds", always(True)),
        "the_token_stands_for_the_request_alone": (
            Manifest,
            "ownership_token",
            property(lambda self: 1 + sum(self.request_id.encode()) * 2**20),
        ),
        "stages_need_not_have_every_layer": (Attempt, "lacks_layers", always(False)),
        # The ownership token is published too late: when the transfer thread is told that the request has finished.
        "the_token_is_published_with_the_lease_only": (WorkerFacade, "_publish", nothing),
        "the_token_is_never_removed": (TokenTable, "remove", nothing),
        # When blocks become free.
        "blocks_are_given_back_at_the_failure": (FetchAttempts, "hold", nothing),
        "held_blocks_are_never_given_back": (Holds, "give_back", nothing),
        "preempted_blocks_are_not_held": (PrefillOffers, "is_read", always(False)),
        "blocks_that_may_be_lost_are_copied": (Offer, "may_be_read", property(lambda self: bool(self.blocks))),
        "what_was_copied_before_a_preemption_is_used": (Staged, "forget", nothing),
        # Prefill then accepts the registration that the withdrawal has overtaken.
        "a_withdrawal_is_forgotten": (RecentSet, "add", nothing),
        "another_engine_in_its_place_is_taken_for_the_end": (Receiver, "dead", _takes_for_dead),
        "nobody_listens_is_taken_for_the_end": (Receiver, "unreachable", _takes_for_dead),
        "who_is_not_heard_of_is_not_fenced": (GateUse, "fence", nothing),
        "a_gate_is_not_closed_and_counts_as_closed": (MemoryGate, "close", lambda self: True),
        "who_could_write_past_a_gate_is_fenced_by_it": (FlowHost, "is_behind_network", lambda self, process: True),
        "the_end_of_a_process_is_not_seen": (FlowHost, "sees", lambda self, process: False),
        "handles_are_kept": (MemoryTransport, "release", nothing),
        # Messages and time.
        "leases_never_expire": (Leases, "take_due", always([])),
        "leases_are_not_renewed": (Leases, "renew", nothing),
        "a_peer_is_asked_once": (peers, "HANDSHAKE_TRIES", 1),
        # vllm#45168: nothing wakes an idle engine when the blocks that it keeps become free.
        "a_sleeping_engine_is_not_woken": (EngineContext, "woken", nothing),
        # Staging.
        "slots_are_never_free_again": (Slots, "give_back", nothing),
        "who_waits_for_slots_is_forgotten": (Staging, "wait", nothing),
        # What is cached is offered without a step.
        "what_else_was_offered_is_not_released": (Questions, "take_unneeded", always([])),
        # Verified hand-overs.
        "what_has_come_is_not_compared": (Checksums, "compare", lambda *arguments: arguments[-1](None)),
        "an_engine_that_lied_is_believed_again": (WorkerContext, "distrust_of", nothing),
        # Want of memory.
        "offers_never_give_way": (MemoryPressure, "turn", always({})),
        "what_is_fetched_gives_way": (OfferRegistry, "outlasts", always(False)),
        # An idle engine would not step again, and the pages of its last offer would not be given back.
        "what_is_owed_waits_for_the_next_request": (GivingWay, "owes", False),
        # What its prefix cache keeps would come back with its next request only.
        "an_idle_engine_does_not_look": (
            GivingWay,
            "watches",
            property(lambda self: bool(self._offering.kept.num_kept)),
        ),
        "decode_never_yields": (GivingWay, "_hear", nothing),
        "every_prompt_begins_at_once": (StartGate, "may_start", always(True)),
        "nobody_says_that_decode_has_registered": (OutcomeQueue, "claimed", nothing),
        # Decode asks prefill.
        "who_waits_for_an_equal_prompt_is_forgotten": (Queue, "land", nothing),
        "what_was_promised_stays_promised": (Window, "settle", nothing),
        "a_client_that_left_is_still_computed_for": (LocalPrefills, "gone", nothing),
    }
)
"""Faults that replace one attribute: whose, which, and by what. The others are the functions below."""


# ------------------------------------------------------------------------------- manifests, digests, ownership tokens


def decode_compares_no_digest(patch: Patcher) -> None:
    def accept(wish: Any, *_: Any) -> None:
        if wish.refused is not None and wish.refused.cause is FailureCause.DIGEST:
            wish.refused = None

    then(patch, FetchRequest, "check", accept)


def prefill_pairs_by_name_alone(patch: Patcher) -> None:
    def wanted_by(self: Any, registration: Any) -> Any:
        return next(iter(self._named.get(registration.name, {}).values()), None)

    patch.setattr(OfferMatcher, "wanted_by", wanted_by)


def a_request_that_stops_early_keeps_its_token(patch: Patcher) -> None:
    def stop(real: Any, self: Any, request_id: Any, *arguments: Any, **named: Any) -> None:
        if request_id not in self._matcher.offers:
            remove, self._tokens.remove = self._tokens.remove, nothing
            real(self, request_id, *arguments, **named)
            self._tokens.remove = remove
        else:
            real(self, request_id, *arguments, **named)

    around(patch, OfferRegistry, "stop", stop)


def the_start_is_not_compared(patch: Patcher) -> None:
    def need(real: Any, self: Any, address: Any, _: str, known: Any, failed: Any, **named: Any) -> None:
        real(self, address, "", known, failed, **named)

    around(patch, Peers, "need", need)


# ------------------------------------------------------------------------------------------------------ device streams


def decode_s_blocks_are_not_fenced(patch: Patcher) -> None:
    at_once(patch, facade.BlocksWritable)


def prefill_offers_what_its_device_has_not_ended(patch: Patcher) -> None:
    at_once(patch, OfferUpdate)


def at_once(patch: Patcher, kind: type) -> None:
    """Commands of a kind are taken in whether the device has got there or not."""
    reached = facade.Reached
    patch.setattr(
        facade,
        "Reached",
        lambda command, is_reached: reached(command, always(True) if isinstance(command, kind) else is_reached),
    )


# --------------------------------------------------------------------------------------------- when blocks become free


def stopped_is_said_before_it_is_idle(patch: Patcher) -> None:
    def stop(real: Any, self: Any, writing: Any, cause: Any, *, is_answered: bool = True) -> None:
        if writing.stopping is None and is_answered:
            decode, attempt = writing.registration.decode, writing.registration.attempt
            self._answer(writing.agent, decode, attempt, cause, has_failed=False)
        real(self, writing, cause, is_answered=is_answered)

    around(patch, Writer, "stop", stop)


def a_failed_transfer_is_taken_for_idle(patch: Patcher) -> None:
    def fail(self: Any, job: Any, reason: str, *_: Any) -> None:
        job.failed = job.failed or reason

    patch.setattr(TransferQueue, "_fail", fail)


def each_handshake_is_a_connection_of_its_own(patch: Patcher) -> None:
    """Transfers in flight would count as those of an earlier connection."""

    def add_peer(real: Any, self: Any, metadata: bytes, *where: Any) -> Any:
        self._connections.pop(metadata.decode(errors="replace"), None)
        return real(self, metadata, *where)

    around(patch, MemoryTransport, "add_peer", add_peer)


def what_is_given_up_is_taken_for_idle(patch: Patcher) -> None:
    def settle(self: Any, job: Any) -> None:
        self._settle(job)

    then(patch, TransferQueue, "drop", settle)


def a_read_that_is_stopped_is_taken_for_idle(patch: Patcher) -> None:
    def stop(self: Any) -> None:
        self._is_idle = True

    patch.setattr(ReadPart, "stop", stop)


def a_write_that_is_stopped_is_taken_for_idle(patch: Patcher) -> None:
    def stop(self: Any) -> None:
        self.stage = Stage.ENDED

    then(patch, WritePart, "stop", stop)


def blocks_that_are_copied_early_are_not_held(patch: Patcher) -> None:
    real = PrefillOffers.is_read
    patch.setattr(PrefillOffers, "is_read", lambda self, request_id: self._engine.is_push and real(self, request_id))


def preempted_blocks_are_idle_at_once(patch: Patcher) -> None:
    def preempt(self: Any, _: Any, hold: int) -> None:
        self._outcomes.hold_idle(hold)

    then(patch, OfferRegistry, "preempt", preempt)


def draining_holds_are_forgotten(patch: Patcher) -> None:
    def preempt(self: Any, request_id: Any, _: int) -> None:
        offer = self._matcher.offers.get(request_id)
        if offer is not None:
            offer.lose_blocks()

    patch.setattr(OfferRegistry, "preempt", preempt)


def prefill_s_blocks_are_free_when_its_request_ends(patch: Patcher) -> None:
    def finished(real: Any, self: Any, request: Any, *arguments: Any) -> Any:
        _, params = real(self, request, *arguments)
        return False, params

    around(patch, PrefillOffers, "finished", finished)
    patch.setattr(KeptOffers, "keep", nothing)


def an_unneeded_offer_is_given_back_while_it_is_read(patch: Patcher) -> None:
    def release(real: Any, self: Any, released: Any) -> None:
        real(self, msgspec.structs.replace(released, attempt=None))

    around(patch, Receiver, "release", release)


def an_aborted_requests_offer_waits_for_its_lease(patch: Patcher) -> None:
    def release(real: Any, self: Any, released: Any) -> None:
        if released.attempt is None:
            real(self, released)

    around(patch, Receiver, "release", release)


def nobody_is_told_of_a_request_that_was_aborted(patch: Patcher) -> None:
    def forget(self: Any, _: Any) -> None:
        step = self._engine.step
        step.commands = [one for one in step.commands if not isinstance(one, Withdraw)]

    then(patch, DecodeFetches, "finished", forget)


def other_ranks_are_not_told_of_a_failure(patch: Patcher) -> None:
    def forget(self: Any, _: Any, __: Any) -> None:
        step = self._engine.step
        step.commands = [one for one in step.commands if not isinstance(one, Withdraw) or "within" in one.reason]

    then(patch, DecodeFetches, "collect", forget)


# ----------------------------------------------------------------------------------------------------- tokens and ranks


def a_token_too_few(patch: Patcher) -> None:
    ranges = topology.ranges
    patch.setattr(topology, "ranges", lambda routes, groups, end: ranges(routes, groups, max(1, end - 1)))


def blocks_are_paired_from_the_first(patch: Patcher) -> None:
    """Blocks are not paired by the positions of their tokens."""

    def descriptors(real: Any, self: Any, here: Any, there: Any, first: int, end: int) -> Any:
        moved = type(there)(here.first_token, there.block_ids) if not there.first_token else there
        return real(self, here, moved, first, end)

    around(patch, Route, "descriptors", descriptors)


def decode_s_prefix_is_fetched_again(patch: Patcher) -> None:
    def groups(real: Any, self: Any, block_ids: Any, _: int) -> Any:
        return real(self, block_ids, 0)

    around(patch, FetchRequest, "groups", groups)


def prefill_offers_more_than_it_has_computed(patch: Patcher) -> None:
    """Prefill offers one block more than it has computed."""

    def advance(real: Any, self: Any, writing: Any) -> None:
        offer = writing.offer
        if offer is None or not offer.update.ready_tokens:
            real(self, writing)
            return
        update, ready = offer.update, min(offer.update.ready_tokens + 4, offer.update.num_tokens - 1)
        offer.update = msgspec.structs.replace(update, ready_tokens=max(update.ready_tokens, ready))
        real(self, writing)
        offer.update = update

    around(patch, Writer, "advance", advance)


def another_rank_contributes(patch: Patcher) -> None:
    def contributors(real: Any, self: Any, prefill: Any) -> Any:
        ranks, others = real(self, prefill)
        return tuple(msgspec.structs.replace(one, tp_rank=(one.tp_rank + 1) % one.tp_size) for one in ranks), others

    around(patch, LocalRank, "contributors", contributors)


def one_rank_of_several_contributes(patch: Patcher) -> None:
    def contributors(real: Any, *arguments: Any, **named: Any) -> Any:
        ranks, others = real(*arguments, **named)
        return ranks[:1], (*ranks[1:], *others)

    around(patch, LocalRank, "contributors", contributors)


def blocks_of_the_kernel_are_not_counted(patch: Patcher) -> None:
    def uncounted(ranges: Any, groups: Any) -> Any:
        return tuple(KernelBlockRange(one.first_token, one.block_ids) for one in ranges)

    patch.setattr(registry, "kernel_blocks_of", uncounted)


def heads_are_not_told_apart(patch: Patcher) -> None:
    """Every rank writes the first heads of its peer, whichever heads it has."""

    def init(real: Any, self: Any, local: Any, remote: Any) -> None:
        first = max(local.first_head, remote.first_head)
        heads = min(local.last_head, remote.last_head) - first
        changes = {"first_head": 0, "num_heads": heads}
        real(self, msgspec.structs.replace(local, **changes), msgspec.structs.replace(remote, **changes))

    around(patch, Route, "__init__", init)


# ---------------------------------------------------------------------------------------------------- messages and time


def the_last_write_is_taken_for_all_of_them(patch: Patcher) -> None:
    def take(real: Any, self: Any, message: Any) -> None:
        if isinstance(message, Written) and message.manifest is not None:
            self._arrived._following = message.index
        real(self, message)

    around(patch, WritePart, "take", take)


def writes_are_counted_and_not_told_apart(patch: Patcher) -> None:
    """A `Written` message that arrives twice counts as two WRITEs."""

    def take(real: Any, self: Any, message: Any) -> Any:
        self._following += message.index < self._following or message.index in self._waiting
        return real(self, message)

    around(patch, ArrivedWrites, "take", take)


def anybody_is_believed(patch: Patcher) -> None:
    def handle(real: Any, self: Any, agent: str, message: Any) -> None:
        attempt = self._attempts.get(message.attempt)
        shares = attempt.parts if attempt is not None else []
        real(self, shares[0].agent if shares else agent, message)

    around(patch, Receiver, "handle", handle)


def a_lease_that_ends_lets_go_of_what_is_written(patch: Patcher) -> None:
    def turn(real: Any, self: Any, **named: bool) -> None:
        for request_id, at in list(self._leases.items()):
            if at <= self._clock.now_seconds():
                self._outcomes.done(request_id)
        return real(self, **named)  # type: ignore[no-any-return]

    around(patch, OfferRegistry, "turn", turn)


def nothing_has_a_deadline(patch: Patcher) -> None:
    class Endless(Deadlines[Any]):
        def take_due(self, now_seconds: float, at_most: int | None = None) -> list[Any]:
            return []

    patch.setattr(fetch_request, "Deadlines", Endless)


def prefill_does_not_hear_that_it_was_read(patch: Patcher) -> None:
    def release(_: Any, message: Any) -> None:
        return None

    patch.setattr(OfferRegistry, "release", release)


def a_renewal_outlives_its_request(patch: Patcher) -> None:
    """A request that arrives and ends in one step: the end is handled first, so its lease is renewed for ever."""

    def begin_step(real: Any, self: Any, step: Any) -> None:
        begun = {one.request_id for one in step.of(LeaseRenewal)}
        told = [one for one in step.commands if not isinstance(one, EndRenewal) or one.request_id not in begun]
        real(self, msgspec.structs.replace(step, commands=told))

    around(patch, WorkerFacade, "begin_step", begin_step)


# ------------------------------------------------------------------------------------------------------------- staging


def blocks_are_free_while_they_are_copied(patch: Patcher) -> None:
    class Uncounted:
        """Copies are under way, and nobody knows of them."""

        def __get__(self, *_: Any) -> int:
            return 0

        def __set__(self, *_: Any) -> None:
            return None

    patch.setattr(Offer, "copies", Uncounted(), raising=False)
    patch.setattr(Offer, "is_free_of_blocks", property(lambda self: self.parked is not None))


def what_is_copied_is_told_before(patch: Patcher) -> None:
    gather = Staging.gather

    def early(self: Any, held: Any, blocks: Any, to_token: int, ended: Callable[[str], None]) -> None:
        gather(self, held, blocks, to_token, ended)
        held.staged_token = to_token

    patch.setattr(Staging, "gather", early)


def a_copy_that_failed_counts(patch: Patcher) -> None:
    copy: Any = Staging._copy

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
        if found is not None and found[1] in writing.windows:
            writing.windows.remove(found[1])
            self._let_go(found[1])
        return found

    real = Staged.find
    patch.setattr(Staged, "find", find)


def slots_are_free_while_they_may_be_written(patch: Patcher) -> None:
    """Slots of a withdrawn request are free while prefill may still write them."""

    def stop(self: Any) -> None:
        if self._staging_window is not None:
            for writer in self._staging_window._writers.values():
                writer.may_write = False
            self._staging_window.close(self.address.tp_rank)

    then(patch, WritePart, "stop", stop)


def slots_are_copied_when_one_rank_has_written(patch: Patcher) -> None:
    def written(self: Any, rank: int, end_token: int) -> None:
        for writer in self._writers.values():
            writer.written_token = max(writer.written_token, end_token)
        real(self, rank, end_token)

    real = StagingWindow.written
    patch.setattr(StagingWindow, "written", written)


def no_slot_is_kept_for_what_moves(patch: Patcher) -> None:

    def available(self: Any, _: Any) -> int:
        return int(self.count - sum(self._used.values()))

    patch.setattr(Slots, "available", available)


# ------------------------------------------------------------------------------------------- verified hand-overs


def decode_s_blocks_are_free_while_they_are_compared(patch: Patcher) -> None:
    def end(self: Any, _: Any) -> None:
        self.stage = Stage.ENDED

    then(patch, WritePart, "_end", end)


def prefill_s_blocks_are_free_while_their_digest_is_found(patch: Patcher) -> None:
    def stop(self: Any, writing: Any, *_: Any, **__: Any) -> None:
        for job in list(writing.jobs):
            self._context.transfer_queue.drop(job)

    then(patch, Writer, "stop", stop)


def a_digest_is_of_all_heads(patch: Patcher) -> None:
    digest = Content.digest

    def of_all(self: Any, groups: Any, end_token: int, _: Any, **side: Any) -> str:
        return digest(self, groups, end_token, self._memory, **side)

    patch.setattr(Content, "digest", of_all)


# ------------------------------------------------------------------------------------------------------ want of memory


def what_is_revoked_keeps_its_token(patch: Patcher) -> None:
    """Decode would read blocks that belong to another request by then."""

    def revoke(real: Any, self: Any, *arguments: Any) -> None:
        with mock.patch.object(TokenTable, "remove", nothing):
            real(self, *arguments)

    around(patch, OfferRegistry, "revoke", revoke)


def what_is_cached_is_offered_before_the_workers_know_of_it(patch: Patcher) -> None:
    def offer(real: Any, self: Any, *arguments: Any) -> Any:
        is_offered = real(self, *arguments)
        while self._telling:
            self._telling.pop()()
        return is_offered

    around(patch, SchedulerFacade, "offer_cached", offer)


def transfers_to_a_removed_peer_count_as_ended(patch: Patcher) -> None:
    """As NIXL says it; their bytes are moved all the same."""

    def state(real: Any, self: Any, handle: Any) -> TransferState:
        found: TransferState = real(self, handle)
        return found if handle.receiver in self.peers else TransferState.FAILED

    around(patch, MemoryTransport, "state", state)
    patch.setattr(MemoryTransport, "release", nothing)


def what_is_freed_for_others_stays_in_the_cache(patch: Patcher) -> None:
    original = KeptOffers.ended
    patch.setattr(KeptOffers, "ended", lambda *arguments: (original(*arguments)[0], 0))
    patch.setattr(Pool, "drop_cached", always(0))


def every() -> dict[str, Fault]:
    """Returns every fault, by its name."""
    functions = [
        one
        for one in globals().values()
        if callable(one) and [*getattr(one, "__annotations__", ())] == ["patch", "return"]
    ]
    replaced: dict[str, Fault] = {name: functools.partial(_replace, of=of) for name, of in REPLACED.items()}
    return replaced | {one.__name__: one for one in functions}


def _replace(patch: Patcher, of: tuple[Any, str, Any]) -> None:
    patch.setattr(*of)
