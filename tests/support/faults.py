# SPDX-License-Identifier: Apache-2.0
"""Faults to plant into kvcached_nixl, one attribute or method each. `test_planted_faults` shows that each is caught."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import msgspec

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
from kvcached_nixl.wire.step import LeaseRenewal, OfferUpdate, Withdraw
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
from support.planting import Faults, Patcher, always, nothing

FAULTS = Faults()


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


for _name, _of in REPLACED.items():
    FAULTS.replace(_name, *_of)


# ------------------------------------------------------------------------------- manifests, digests, ownership tokens


@FAULTS.then(FetchRequest, "check")
def decode_compares_no_digest(wish: Any, *_: Any) -> None:
    if wish.refused is not None and wish.refused.cause is FailureCause.DIGEST:
        wish.refused = None


@FAULTS.instead(OfferMatcher, "wanted_by")
def prefill_pairs_by_name_alone(self: Any, registration: Any) -> Any:
    return next(iter(self._named.get(registration.name, {}).values()), None)


@FAULTS.around(OfferRegistry, "stop")
def a_request_that_stops_early_keeps_its_token(real: Any, self: Any, request_id: Any, *more: Any, **named: Any) -> None:
    with contextlib.ExitStack() as stack:
        if request_id not in self._matcher.offers:
            stack.enter_context(mock.patch.object(self._tokens, "remove", nothing))
        real(self, request_id, *more, **named)


@FAULTS.around(Peers, "need")
def the_start_is_not_compared(real: Any, self: Any, address: Any, _: str, *more: Any, **named: Any) -> None:
    real(self, address, "", *more, **named)


# ------------------------------------------------------------------------------------------------------ device streams


@FAULTS.planted
def decode_s_blocks_are_not_fenced(patch: Patcher) -> None:
    at_once(patch, facade.BlocksWritable)


@FAULTS.planted
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


@FAULTS.around(Writer, "stop")
def stopped_is_said_before_it_is_idle(
    real: Any, self: Any, writing: Any, cause: Any, *, is_answered: bool = True
) -> None:
    if writing.stopping is None and is_answered:
        decode, attempt = writing.registration.decode, writing.registration.attempt
        self._answer(writing.agent, decode, attempt, cause, has_failed=False)
    real(self, writing, cause, is_answered=is_answered)


@FAULTS.instead(TransferQueue, "_fail")
def a_failed_transfer_is_taken_for_idle(self: Any, job: Any, reason: str, *_: Any) -> None:
    job.failed = job.failed or reason


@FAULTS.around(MemoryTransport, "add_peer")
def each_handshake_is_a_connection_of_its_own(real: Any, self: Any, metadata: bytes, *where: Any) -> Any:
    """Transfers in flight would count as those of an earlier connection."""
    self._connections.pop(metadata.decode(errors="replace"), None)
    return real(self, metadata, *where)


@FAULTS.then(TransferQueue, "drop")
def what_is_given_up_is_taken_for_idle(self: Any, job: Any) -> None:
    self._settle(job)


@FAULTS.instead(ReadPart, "stop")
def a_read_that_is_stopped_is_taken_for_idle(self: Any) -> None:
    self._is_idle = True


@FAULTS.then(WritePart, "stop")
def a_write_that_is_stopped_is_taken_for_idle(self: Any) -> None:
    self.stage = Stage.ENDED


@FAULTS.around(PrefillOffers, "is_read")
def blocks_that_are_copied_early_are_not_held(real: Any, self: Any, request_id: Any) -> bool:
    return self._engine.is_push and real(self, request_id)  # type: ignore[no-any-return]


@FAULTS.then(OfferRegistry, "preempt")
def preempted_blocks_are_idle_at_once(self: Any, _: Any, hold: int) -> None:
    self._outcomes.hold_idle(hold)


@FAULTS.instead(OfferRegistry, "preempt")
def draining_holds_are_forgotten(self: Any, request_id: Any, _: int) -> None:
    offer = self._matcher.offers.get(request_id)
    if offer is not None:
        offer.lose_blocks()


@FAULTS.planted
def prefill_s_blocks_are_free_when_its_request_ends(patch: Patcher) -> None:
    finished = PrefillOffers.finished
    patch.setattr(PrefillOffers, "finished", lambda *arguments: (False, finished(*arguments)[1]))
    patch.setattr(KeptOffers, "keep", nothing)


@FAULTS.around(Receiver, "release")
def an_unneeded_offer_is_given_back_while_it_is_read(real: Any, self: Any, released: Any) -> None:
    real(self, msgspec.structs.replace(released, attempt=None))


@FAULTS.around(Receiver, "release")
def an_aborted_requests_offer_waits_for_its_lease(real: Any, self: Any, released: Any) -> None:
    if released.attempt is None:
        real(self, released)


@FAULTS.then(DecodeFetches, "finished")
def nobody_is_told_of_a_request_that_was_aborted(self: Any, _: Any) -> None:
    step = self._engine.step
    step.commands = [one for one in step.commands if not isinstance(one, Withdraw)]


@FAULTS.then(DecodeFetches, "collect")
def other_ranks_are_not_told_of_a_failure(self: Any, *_: Any) -> None:
    step = self._engine.step
    step.commands = [one for one in step.commands if not isinstance(one, Withdraw) or "within" in one.reason]


# ----------------------------------------------------------------------------------------------------- tokens and ranks


@FAULTS.around(topology, "ranges")
def a_token_too_few(real: Any, routes: Any, groups: Any, end: int) -> Any:
    return real(routes, groups, max(1, end - 1))


@FAULTS.around(Route, "descriptors")
def blocks_are_paired_from_the_first(real: Any, self: Any, here: Any, there: Any, first: int, end: int) -> Any:
    """Blocks are not paired by the positions of their tokens."""
    moved = type(there)(here.first_token, there.block_ids) if not there.first_token else there
    return real(self, here, moved, first, end)


@FAULTS.around(FetchRequest, "groups")
def decode_s_prefix_is_fetched_again(real: Any, self: Any, block_ids: Any, _: int) -> Any:
    return real(self, block_ids, 0)


@FAULTS.around(Writer, "advance")
def prefill_offers_more_than_it_has_computed(real: Any, self: Any, writing: Any) -> None:
    """Prefill offers one block more than it has computed."""
    offer = writing.offer
    if offer is None or not offer.update.ready_tokens:
        real(self, writing)
        return
    update, ready = offer.update, min(offer.update.ready_tokens + 4, offer.update.num_tokens - 1)
    offer.update = msgspec.structs.replace(update, ready_tokens=max(update.ready_tokens, ready))
    real(self, writing)
    offer.update = update


@FAULTS.around(LocalRank, "contributors")
def another_rank_contributes(real: Any, self: Any, prefill: Any) -> Any:
    ranks, others = real(self, prefill)
    return tuple(msgspec.structs.replace(one, tp_rank=(one.tp_rank + 1) % one.tp_size) for one in ranks), others


@FAULTS.around(LocalRank, "contributors")
def one_rank_of_several_contributes(real: Any, *arguments: Any, **named: Any) -> Any:
    ranks, others = real(*arguments, **named)
    return ranks[:1], (*ranks[1:], *others)


@FAULTS.instead(registry, "kernel_blocks_of")
def blocks_of_the_kernel_are_not_counted(ranges: Any, _: Any) -> Any:
    return tuple(KernelBlockRange(one.first_token, one.block_ids) for one in ranges)


@FAULTS.around(Route, "__init__")
def heads_are_not_told_apart(real: Any, self: Any, local: Any, remote: Any) -> None:
    """Every rank writes the first heads of its peer, whichever heads it has."""
    first = max(local.first_head, remote.first_head)
    heads = min(local.last_head, remote.last_head) - first
    changes = {"first_head": 0, "num_heads": heads}
    real(self, msgspec.structs.replace(local, **changes), msgspec.structs.replace(remote, **changes))


# ---------------------------------------------------------------------------------------------------- messages and time


@FAULTS.around(WritePart, "take")
def the_last_write_is_taken_for_all_of_them(real: Any, self: Any, message: Any) -> None:
    if isinstance(message, Written) and message.manifest is not None:
        self._arrived._following = message.index
    real(self, message)


@FAULTS.around(ArrivedWrites, "take")
def writes_are_counted_and_not_told_apart(real: Any, self: Any, message: Any) -> Any:
    """A `Written` message that arrives twice counts as two WRITEs."""
    self._following += message.index < self._following or message.index in self._waiting
    return real(self, message)


@FAULTS.around(Receiver, "handle")
def anybody_is_believed(real: Any, self: Any, agent: str, message: Any) -> None:
    attempt = self._attempts.get(message.attempt)
    shares = attempt.parts if attempt is not None else []
    real(self, shares[0].agent if shares else agent, message)


@FAULTS.around(OfferRegistry, "turn")
def a_lease_that_ends_lets_go_of_what_is_written(real: Any, self: Any, **named: bool) -> Any:
    for request_id, at in list(self._leases.items()):
        if at <= self._clock.now_seconds():
            self._outcomes.done(request_id)
    return real(self, **named)


@FAULTS.planted
def nothing_has_a_deadline(patch: Patcher) -> None:
    class Endless(Deadlines[Any]):
        def take_due(self, now_seconds: float, at_most: int | None = None) -> list[Any]:
            return []

    patch.setattr(fetch_request, "Deadlines", Endless)


@FAULTS.instead(OfferRegistry, "release")
def prefill_does_not_hear_that_it_was_read(_: Any, __: Any) -> None:
    """It waits for the end of the lease."""


@FAULTS.around(WorkerFacade, "begin_step")
def a_renewal_outlives_its_request(real: Any, self: Any, step: Any) -> None:
    """A request that arrives and ends in one step: the end is handled first, so its lease is renewed for ever."""
    renewals = step.of(LeaseRenewal)
    begun = {one.request_id for one in renewals if one.prefill is not None}
    ends = [one for one in renewals if one.prefill is None and one.request_id in begun]
    told = [one for one in step.commands if one not in ends]
    real(self, msgspec.structs.replace(step, commands=told))


# ------------------------------------------------------------------------------------------------------------- staging


@FAULTS.planted
def blocks_are_free_while_they_are_copied(patch: Patcher) -> None:
    """Copies are under way, and nobody knows of them."""
    patch.setattr(Offer, "copies", property(always(0), nothing), raising=False)
    patch.setattr(Offer, "is_free_of_blocks", property(lambda self: self.parked is not None))


@FAULTS.around(Staging, "gather")
def what_is_copied_is_told_before(real: Any, self: Any, held: Any, blocks: Any, to_token: int, ended: Any) -> None:
    real(self, held, blocks, to_token, ended)
    held.staged_token = to_token


@FAULTS.around(Staging, "_copy")
def a_copy_that_failed_counts(real: Any, self: Any, *arguments: Any) -> None:
    real(self, *arguments[:-1], lambda _: arguments[-1](""))


@FAULTS.planted
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


@FAULTS.then(WritePart, "stop")
def slots_are_free_while_they_may_be_written(self: Any) -> None:
    """Slots of a withdrawn request are free while prefill may still write them."""
    if self._staging_window is not None:
        for writer in self._staging_window._writers.values():
            writer.may_write = False
        self._staging_window.close(self.address.tp_rank)


@FAULTS.around(StagingWindow, "written")
def slots_are_copied_when_one_rank_has_written(real: Any, self: Any, rank: int, end_token: int) -> None:
    for writer in self._writers.values():
        writer.written_token = max(writer.written_token, end_token)
    real(self, rank, end_token)


@FAULTS.instead(Slots, "available")
def no_slot_is_kept_for_what_moves(self: Any, _: Any) -> int:
    return int(self.count - sum(self._used.values()))


# ------------------------------------------------------------------------------------------- verified hand-overs


@FAULTS.then(WritePart, "_end")
def decode_s_blocks_are_free_while_they_are_compared(self: Any, _: Any) -> None:
    self.stage = Stage.ENDED


@FAULTS.then(Writer, "stop")
def prefill_s_blocks_are_free_while_their_digest_is_found(self: Any, writing: Any, *_: Any, **__: Any) -> None:
    for job in list(writing.jobs):
        self._context.transfer_queue.drop(job)


@FAULTS.around(Content, "digest")
def a_digest_is_of_all_heads(real: Any, self: Any, groups: Any, end_token: int, _: Any, **side: Any) -> str:
    return real(self, groups, end_token, self._memory, **side)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------ want of memory


@FAULTS.around(OfferRegistry, "revoke")
def what_is_revoked_keeps_its_token(real: Any, self: Any, *arguments: Any) -> None:
    """Decode would read blocks that belong to another request by then."""
    with mock.patch.object(TokenTable, "remove", nothing):
        real(self, *arguments)


@FAULTS.around(SchedulerFacade, "offer_cached")
def what_is_cached_is_offered_before_the_workers_know_of_it(real: Any, self: Any, *arguments: Any) -> Any:
    is_offered = real(self, *arguments)
    while self._telling:
        self._telling.pop()()
    return is_offered


@FAULTS.planted
def transfers_to_a_removed_peer_count_as_ended(patch: Patcher) -> None:
    """As NIXL says it; their bytes are moved all the same."""
    real = MemoryTransport.state

    def state(self: Any, handle: Any) -> TransferState:
        found = real(self, handle)
        return found if handle.receiver in self.peers else TransferState.FAILED

    patch.setattr(MemoryTransport, "state", state)
    patch.setattr(MemoryTransport, "release", nothing)


@FAULTS.planted
def what_is_freed_for_others_stays_in_the_cache(patch: Patcher) -> None:
    ended = KeptOffers.ended
    patch.setattr(KeptOffers, "ended", lambda *arguments: ended(*arguments) * 0)
    patch.setattr(Pool, "drop_cached", always(0))
