# SPDX-License-Identifier: Apache-2.0
"""worker/prefill/source.py: what an offer is written from, when it is copied into slots, and when these are free."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.engine_fakes import grown
from support.internals import leftovers
from support.worker_fakes import BLOCK_SIZE, DIGEST, TOKENS, HeldCopies, manifest, registration, staging_over

from kvcached_nixl.ids import KernelBlock, PrefillRequestId
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.manifest import BlockRange
from kvcached_nixl.wire.messages import KernelBlockRange
from kvcached_nixl.wire.step import OfferUpdate
from kvcached_nixl.worker.geometry.descriptors import KernelBlocks
from kvcached_nixl.worker.prefill.offers import Offer, WriteTask
from kvcached_nixl.worker.prefill.source import WINDOWS, FromBlocks, Source, Staged
from kvcached_nixl.worker.transfer.slab import Slots, Use
from kvcached_nixl.worker.transfer.staging import Held

BLOCKS = (7, 3, 9)


def update(offer: Offer, ready_tokens: int, blocks: tuple[tuple[int, ...], ...] = (BLOCKS,)) -> Offer:
    """Prefill has computed so many tokens of an offer, in these kernel blocks per group."""
    offer.update = msgspec.structs.replace(offer.update, ready_tokens=ready_tokens, groups=grown(*blocks))
    offer.blocks = tuple(KernelBlocks([KernelBlock(block) for block in group]) for group in blocks)
    return offer


def windowed(offer: Offer, first_tokens: tuple[int, ...], block_sizes: tuple[int, ...]) -> Offer:
    """The offer keeps no blocks before these tokens."""
    kept = zip(offer.blocks, first_tokens, block_sizes, strict=True)
    offer.blocks = tuple(KernelBlocks(one.ids[first // size :], first) for one, first, size in kept)
    return offer


def offer_of(
    ready_tokens: int = TOKENS,
    blocks: tuple[tuple[int, ...], ...] = (BLOCKS,),
    *,
    num_tokens: int = TOKENS,
    is_held: bool = True,
    first_tokens: tuple[int, ...] = (),
    block_sizes: tuple[int, ...] = (BLOCK_SIZE,),
) -> Offer:
    """An offer; ``first_tokens``: those of its manifest's groups, if it has one."""
    made = None
    if first_tokens:
        sizes = list(zip(first_tokens, block_sizes, strict=True))
        groups = tuple(BlockRange(first, tuple(range(-(-(num_tokens - first) // size)))) for first, size in sizes)
        made = manifest(num_tokens=num_tokens, groups=groups, block_sizes=block_sizes)
    told = OfferUpdate(PrefillRequestId("p-1"), "transfer:t", DIGEST, num_tokens, (), 0, made, is_held)
    offer = update(Offer(told), ready_tokens, blocks)
    return windowed(offer, first_tokens, block_sizes) if first_tokens else offer


def task_of(offer: Offer | None, attempt: int = 1, next_token: int = 0, **changed: Any) -> WriteTask:
    task = WriteTask("remote-0", registration(attempt, **changed), offer=offer, next_token=next_token)
    if offer is not None:
        offer.write_tasks[task.key] = task
    return task


class Side:
    """`Staged` with ``count`` slots, of which ``kept`` are for each use that is not parking; and what it has called."""

    def __init__(self, count: int = 24, kept: int = 8, block_sizes: tuple[int, ...] = (BLOCK_SIZE,)) -> None:
        self.slots = Slots(count, kept)
        self.copies = HeldCopies()
        self.staging = staging_over(self.slots, self.copies, block_sizes)
        self.advanced: list[WriteTask] = []
        self.settled: list[Offer] = []
        self.failed: list[tuple[WriteTask, str]] = []
        local = SimpleNamespace(step_tokens=lambda sizes: math.lcm(*block_sizes, *sizes))
        context: Any = SimpleNamespace(staging=self.staging, local=local)
        self.staged = Staged(
            context,
            self.advanced.append,
            self.settled.append,
            lambda task, why: self.failed.append((task, str(why))),
        )

    @property
    def used(self) -> tuple[int, int]:
        """Slots of parked offers, and of windows."""
        return self.slots.used(Use.PARKED), self.slots.used(Use.SENDING)

    def fill(self, use: Use) -> list[int]:
        """Takes all slots that are left for a use."""
        return self.slots.take(self.slots.available(use), use)

    def free(self, taken: list[int], use: Use) -> None:
        """Gives slots back, and lets those that wait try again."""
        group = KernelBlockRange(0, tuple(map(KernelBlock, taken)))
        self.staging.give_back(Held(use, "", 0, 0, (group,), list(group.block_ids), 0))
        self.staging.turn()

    def is_clean(self) -> bool:
        return self.used == (0, 0) and not self.copies.asked and not leftovers(self.staged, self.staging)


@pytest.fixture
def side() -> Side:
    """24 slots: 8 for parked offers, and 16 for windows of up to 4 each."""
    return Side()


@pytest.fixture
def narrow() -> Side:
    """8 slots: none for parked offers, and 4 for windows of one block each."""
    return Side(8, 4)


def found_in(side: Side, task: WriteTask, end_token: int = TOKENS) -> Source:
    found = side.staged.find(task, end_token)
    assert found is not None
    return found


# -------------------------------------------------------------------------------------------------------- not staged


def test_without_a_slab_a_request_is_written_from_its_blocks() -> None:
    source = FromBlocks()
    found = source.find(task_of(offer_of(8, ((7, 3), (1, 2, 4, 5)))), 8)
    assert found is not None and (found.end_token, found.held) == (8, None)
    assert [(group.first_token, list(group.ids)) for group in found.groups] == [(0, [7, 3]), (0, [1, 2, 4, 5])]
    offer = offer_of(8, ((7, 3), (0, 0, 4, 5)), num_tokens=8, first_tokens=(0, 4), block_sizes=(4, 2))
    found = source.find(task_of(offer), 8)
    assert found is not None
    assert [(group.first_token, list(group.ids)) for group in found.groups] == [(0, [7, 3]), (4, [4, 5])]
    assert not source.is_copying(offer_of()) and not source.is_free_of_blocks(offer_of())


# ------------------------------------------------------------------------------------------------------------- parked


def test_an_offer_is_parked_block_by_block_and_then_whole(side: Side) -> None:
    """Slots for all of it are taken at once; the tokens of a block that is not full are copied with the next step's."""
    offer = offer_of(3, ((7,),))
    task = task_of(offer)
    for ready, blocks, copied in ((3, (7,), []), (6, (7, 3), [7]), (7, (7, 3), []), (8, (7, 3), [3]), (9, BLOCKS, [])):
        side.staged.told(update(offer, ready, (blocks,)))
        assert side.copies.blocks == [copied] * bool(copied) and side.used == (3, 0)
        assert side.staged.is_copying(offer) is bool(copied)
        side.copies.end_all()
        assert not side.staged.is_copying(offer) and not side.staged.is_free_of_blocks(offer)
    assert found_in(side, task).end_token == 8
    side.staged.told(update(offer, TOKENS))
    assert side.copies.blocks == [[9]] and side.copies.slots == [[2]]
    side.copies.end_all()
    assert side.staged.is_free_of_blocks(offer)
    found = found_in(side, task)
    assert [(group.first_token, list(group.ids)) for group in found.groups] == [(0, [0, 1, 2])]
    assert found.end_token == TOKENS and found.held is not None and found.held.use is Use.PARKED
    assert side.advanced == [task] * 3 and side.settled == [offer] * 3
    side.staged.offer_finished(offer)
    assert side.is_clean()


def test_nothing_is_written_from_slots_before_it_is_copied_into_them(side: Side) -> None:
    """Nor beyond that, nor up to inside a block of decode."""
    offer = offer_of(8, ((7, 3),))
    side.staged.told(offer)
    task, larger = task_of(offer), task_of(offer, 2, block_sizes=(16,), block_ids=((17,),))
    assert side.staged.find(task, 8) is None
    side.copies.end_all()
    assert found_in(side, task, 5).end_token == 5
    assert found_in(side, task, 8).end_token == found_in(side, task).end_token == 8
    assert side.staged.find(larger, TOKENS) is None, "half of decode's block goes with the other half"
    task.next_token = 4
    assert found_in(side, task).end_token == 8
    task.next_token = 8
    assert side.staged.find(task, TOKENS) is None


@pytest.mark.parametrize("block_size", [1, 4])
def test_an_offer_of_one_token_is_copied_before_its_block_is_free(block_size: int) -> None:
    side = Side(block_sizes=(block_size,))
    offer = offer_of(1, ((7,),), num_tokens=1)
    side.staged.told(offer)
    assert side.copies.blocks == [[7]] and not side.staged.is_free_of_blocks(offer)
    assert side.staged.find(task_of(offer, end_token=1, num_tokens=1), 1) is None
    side.copies.end_all()
    assert side.staged.is_free_of_blocks(offer)


@pytest.mark.parametrize(("count", "is_parked"), [(11, False), (12, True)])
def test_an_offer_that_is_larger_than_the_slab_is_not_parked(count: int, is_parked: bool) -> None:
    """To the slot: one slot is kept for each of the other two uses."""
    side = Side(count, 1, block_sizes=(1,))
    side.staged.told(offer_of(blocks=(tuple(range(TOKENS)),)))
    assert side.used == (TOKENS * is_parked, 0)


@pytest.mark.parametrize("why", ["not held", "stopped", "no blocks"])
def test_an_offer_whose_blocks_may_not_be_read_is_not_copied(why: str, side: Side) -> None:
    offer = offer_of(is_held=why != "not held")
    if why == "stopped":
        offer.stopped = "revoked"
    elif why == "no blocks":
        update(offer, 0, ())
    side.staged.told(offer)
    assert side.staged.find(task_of(offer), TOKENS) is None
    assert side.is_clean()


def test_one_offer_is_copied_by_one_copy_at_a_time(side: Side) -> None:
    """What has become ready meanwhile is copied as soon as the copy has ended."""
    offer = offer_of(4, ((7,),))
    side.staged.told(offer)
    side.staged.told(update(offer, TOKENS))
    assert side.copies.blocks == [[7]]
    side.copies.end()
    assert side.copies.blocks == [[3, 9]] and side.staged.is_copying(offer)
    side.copies.end()
    assert side.staged.is_free_of_blocks(offer)


def test_an_offer_whose_copy_fails_is_parked_no_more(side: Side) -> None:
    """Its registrations are written from windows."""
    offer = offer_of(4, ((7,),))
    task = task_of(offer)
    side.staged.told(offer)
    side.copies.end("no room")
    assert side.is_clean() and side.advanced == [task] and side.settled == [offer]
    assert side.staged.find(task, 4) is None
    assert side.used == (0, 1) and side.copies.blocks == [[7]]


@pytest.mark.parametrize("ready", [3, 4])
def test_slots_of_tokens_that_are_computed_again_are_freed(ready: int, side: Side) -> None:
    """If these tokens were being copied, when that has ended; and not at all if all that was copied is still good."""
    offer = offer_of(4, ((7,),))
    side.staged.told(offer)
    side.staged.forget(update(offer, ready, ((7,),)))
    assert side.used == (3, 0), "the copy is under way"
    side.copies.end()
    assert side.used == (3 * (ready == 4), 0) and side.settled == [offer]
    side.staged.forget(update(offer, 0, ((7,),)))
    assert side.is_clean()


def test_slots_are_not_given_back_while_they_are_written_from(side: Side) -> None:
    """Also if the offer was preempted meanwhile."""
    offer = offer_of(4, ((7,),))
    task = task_of(offer)
    side.staged.told(offer)
    side.copies.end()
    held = found_in(side, task, 4).held
    assert held is not None
    held.jobs += 2
    side.staged.forget(update(offer, 0, ()))
    side.staged.written(task, held)
    assert side.used == (3, 0)
    side.staged.written(task, held)
    assert side.is_clean()


def test_slots_of_an_offer_are_kept_when_a_write_from_them_has_ended(side: Side) -> None:
    """Another rank of decode may register."""
    offer = offer_of()
    task = task_of(offer)
    side.staged.told(offer)
    side.copies.end()
    held = found_in(side, task).held
    assert held is not None
    held.jobs += 1
    side.staged.written(task, held)
    side.staged.written(task, None)
    side.staged.task_finished(task)
    assert side.used == (3, 0)
    side.staged.offer_finished(offer)
    assert side.is_clean()


def test_the_tokens_before_a_window_take_no_slots(side: Side) -> None:
    offer = offer_of(first_tokens=(4,))
    side.staged.told(offer)
    assert side.used == (2, 0) and side.copies.blocks == [[3, 9]]
    side.copies.end()
    assert [(group.first_token, list(group.ids)) for group in found_in(side, task_of(offer)).groups] == [(4, [0, 1])]


def test_groups_with_blocks_of_other_sizes_are_copied_where_blocks_of_all_end() -> None:
    side = Side(block_sizes=(4, 2))
    offer = offer_of(6, ((7, 3), (1, 2, 4)))
    side.staged.told(offer)
    assert side.used == (8, 0) and side.copies.blocks == [[7, 1, 2]]


def test_an_offer_that_has_ended_is_parked_when_slots_are_free(side: Side) -> None:
    """So are those behind it; one that ended meanwhile, or must not be read any more, keeps nobody waiting."""
    taken = side.fill(Use.PARKED)
    offers = [offer_of(is_held=False) for _ in range(4)]
    for offer in offers:
        side.staged.told(offer)
        assert not side.staging.is_waiting(Use.PARKED, offer), "it is not finished"
        offer.finished = True
        side.staged.told(offer)
        assert side.staging.is_waiting(Use.PARKED, offer)
    side.staged.offer_finished(offers[0])
    offers[1].stopped = "revoked"
    side.free(taken, Use.PARKED)
    assert side.used == (6, 0) and side.copies.blocks == [list(BLOCKS)] * 2
    assert not any(side.staging.is_waiting(Use.PARKED, offer) for offer in offers)
    side.copies.end_all()
    assert [side.staged.is_free_of_blocks(offer) for offer in offers] == [False, False, True, True]


def test_an_offer_that_is_still_computed_does_not_wait_for_slots(side: Side) -> None:
    """Its next step asks for them again."""
    taken = side.fill(Use.PARKED)
    offer = offer_of(8, ((7, 3),))
    side.staged.told(offer)
    assert not side.staging.is_waiting(Use.PARKED, offer)
    side.free(taken, Use.PARKED)
    assert not side.copies.asked
    side.staged.told(update(offer, TOKENS))
    assert side.copies.blocks == [list(BLOCKS)]


def test_blocks_are_not_free_while_an_earlier_copy_reads_them(side: Side) -> None:
    """An offer that was preempted while it was copied is copied again, and the copies may end in any order."""
    offer = offer_of()
    side.staged.told(offer)
    side.staged.forget(update(offer, 0, ()))
    side.staged.told(update(offer, TOKENS))
    assert side.used == (6, 0) and len(side.copies.asked) == 2
    side.copies.asked.pop().ended("")
    assert side.staged.is_copying(offer) and not side.staged.is_free_of_blocks(offer)
    side.copies.end()
    assert side.staged.is_free_of_blocks(offer) and side.used == (3, 0)


def test_an_offer_that_waits_for_slots_goes_on_waiting_if_there_are_too_few(side: Side) -> None:
    taken = side.fill(Use.PARKED)
    offer = offer_of()
    offer.finished = True
    side.staged.told(offer)
    side.free(taken[:2], Use.PARKED)
    assert side.staging.is_waiting(Use.PARKED, offer) and not side.copies.asked
    side.free(taken[2:], Use.PARKED)
    assert not side.staging.is_waiting(Use.PARKED, offer) and side.copies.blocks == [list(BLOCKS)]


def test_an_offer_that_is_written_from_windows_is_not_parked_as_well(side: Side) -> None:
    """Its tokens would be copied twice."""
    taken = side.fill(Use.PARKED)
    offer = offer_of()
    task = task_of(offer)
    offer.finished = True
    side.staged.told(offer)
    assert side.staged.find(task, TOKENS) is None and side.used == (8, 3)
    side.staged.told(offer)
    side.free(taken, Use.PARKED)
    assert side.used == (0, 3) and not side.staging.is_waiting(Use.PARKED, offer)
    side.staged.told(offer)
    assert side.used == (0, 3)


# ------------------------------------------------------------------------------------------------------------ windows


def test_one_range_is_copied_while_the_other_is_written(narrow: Side) -> None:
    """Each registration has at most two windows, and each window is freed when it is written."""
    assert WINDOWS == 2
    offer = offer_of()
    task = task_of(offer)
    for _ in range(4):
        assert narrow.staged.find(task, TOKENS) is None
    assert narrow.used == (0, 1) and narrow.copies.blocks == [[7]], "the first one is not copied yet"
    narrow.copies.end()
    assert narrow.advanced == [task] and narrow.settled == [offer] and not narrow.staged.is_copying(offer)
    for next_token, end_token, block in ((4, 4, 3), (8, 8, 9)):
        found = found_in(narrow, task)
        assert found.end_token == end_token and found.held is not None
        found.held.jobs += 1
        task.next_token = next_token
        assert narrow.staged.find(task, TOKENS) is None and narrow.copies.blocks == [[block]]
        assert narrow.used == (0, 2)
        narrow.copies.end()
        narrow.staged.written(task, found.held)
        assert narrow.used == (0, 1)
    found = found_in(narrow, task)
    assert found.end_token == TOKENS and found.held is not None
    assert [(group.first_token, len(group.ids)) for group in found.groups] == [(8, 1)]
    found.held.jobs += 1
    task.next_token = TOKENS
    narrow.staged.written(task, found.held)
    narrow.staged.task_finished(task)
    assert narrow.is_clean()


def test_a_window_is_kept_until_all_writes_from_it_have_ended_and_all_of_it_is_written(narrow: Side) -> None:
    task = task_of(offer_of())
    assert narrow.staged.find(task, TOKENS) is None
    narrow.copies.end()
    held = found_in(narrow, task).held
    assert held is not None
    held.jobs += 2
    task.next_token = 3
    narrow.staged.written(task, held)
    assert narrow.used == (0, 1)
    narrow.staged.written(task, held)
    assert narrow.used == (0, 1), "its last token was not written yet"
    held.jobs += 1
    task.next_token = 4
    narrow.staged.written(task, held)
    assert narrow.used == (0, 0)


def test_a_registration_begins_where_decodes_prefix_cache_ends(narrow: Side) -> None:
    task = task_of(offer_of(), next_token=4, first_token=4, block_ids=((13, 19),))
    assert narrow.staged.find(task, 4) is None and not narrow.copies.asked, "nothing of it is ready"
    assert narrow.staged.find(task, 8) is None and narrow.copies.blocks == [[3]]


def test_a_registration_whose_groups_are_not_those_of_the_offer_is_refused(narrow: Side) -> None:
    """Before any slot is taken."""
    task = task_of(offer_of(), block_ids=((17, 13, 19), (1, 2, 3)))
    with pytest.raises(HandOverFailed, match="registration of 2 KV-cache groups; expected 1") as refused:
        narrow.staged.find(task, TOKENS)
    assert refused.value.cause is FailureCause.RANGE and narrow.used == (0, 0)


def test_a_window_that_cannot_be_copied_fails_its_registration(narrow: Side) -> None:
    offer = offer_of()
    task = task_of(offer)
    assert narrow.staged.find(task, TOKENS) is None
    narrow.copies.end("no room")
    assert narrow.failed == [(task, "no room")] and narrow.advanced == [] and narrow.settled == [offer]
    narrow.staged.task_finished(task)
    assert narrow.is_clean()


@pytest.mark.parametrize("failed", ["", "no room"])
def test_a_window_that_is_not_wanted_any_more_is_freed_when_its_copy_has_ended(failed: str, narrow: Side) -> None:
    offer = offer_of()
    task = task_of(offer)
    assert narrow.staged.find(task, TOKENS) is None
    narrow.staged.task_finished(task)
    assert narrow.used == (0, 1) and narrow.staged.is_copying(offer)
    narrow.copies.end(failed)
    assert narrow.is_clean() and narrow.settled == [offer] and not (narrow.advanced or narrow.failed)


@pytest.mark.parametrize(("ready", "left"), [(4, 1), (7, 1), (8, 2)])
def test_windows_of_tokens_that_are_computed_again_are_dropped(ready: int, left: int, narrow: Side) -> None:
    """And only those."""
    offer = offer_of()
    task = task_of(offer)
    assert narrow.staged.find(task, TOKENS) is None
    narrow.copies.end()
    task.next_token = 4
    assert narrow.staged.find(task, TOKENS) is None
    narrow.copies.end()
    assert narrow.used == (0, 2)
    narrow.staged.forget(update(offer, ready))
    assert narrow.used == (0, left)


def waiting(narrow: Side, number: int = 2) -> tuple[list[int], list[WriteTask]]:
    """Returns all slots for windows, and registrations of offers of their own that wait for them."""
    taken = narrow.fill(Use.SENDING)
    tasks = [task_of(offer_of(), attempt) for attempt in range(number)]
    for task in tasks:
        for _ in range(2):
            assert narrow.staged.find(task, TOKENS) is None
        assert narrow.staging.is_waiting(Use.SENDING, task)
    return taken, tasks


def test_registrations_that_wait_for_slots_are_served_in_turn(narrow: Side) -> None:
    taken, tasks = waiting(narrow)
    assert not narrow.copies.asked
    narrow.free(taken, Use.SENDING)
    assert narrow.copies.blocks == [[7], [7]] and narrow.used == (0, 2)
    assert not any(narrow.staging.is_waiting(Use.SENDING, task) for task in tasks)
    narrow.copies.end_all()
    assert narrow.advanced == tasks and [found_in(narrow, task).end_token for task in tasks] == [4, 4]


@pytest.mark.parametrize("why", ["stopped", "no offer", "computed again", "revoked"])
def test_a_registration_that_needs_no_slots_any_more_keeps_nobody_waiting(why: str, narrow: Side) -> None:
    """It is not copied; if prefill computes tokens again, it is advanced when they are ready."""
    taken, (first, second) = waiting(narrow)
    assert first.offer is not None
    if why == "stopped":
        first.stopping = HandOverFailed(FailureCause.STOPPED, "withdrawn")
    elif why == "no offer":
        first.offer = None
    elif why == "computed again":
        update(first.offer, TOKENS - 1)
    else:
        first.offer.stopped = "revoked"
    narrow.free(taken, Use.SENDING)
    assert narrow.copies.blocks == [[7]]
    assert not narrow.staging.is_waiting(Use.SENDING, first) and not narrow.staging.is_waiting(Use.SENDING, second)
    narrow.copies.end()
    assert narrow.advanced == [second] and narrow.failed == []


def test_a_registration_that_waits_goes_on_waiting_if_there_are_no_slots(narrow: Side) -> None:
    taken, tasks = waiting(narrow)
    narrow.free(taken[:1], Use.SENDING)
    assert narrow.copies.blocks == [[7]]
    assert [narrow.staging.is_waiting(Use.SENDING, task) for task in tasks] == [False, True]


def test_a_registration_that_fails_when_slots_are_free_is_told_why(narrow: Side) -> None:
    """And keeps nobody waiting."""
    taken, (first, second) = waiting(narrow)
    assert first.offer is not None
    update(first.offer, TOKENS, (BLOCKS, BLOCKS))
    narrow.free(taken, Use.SENDING)
    assert narrow.failed == [(first, "found a registration of 1 KV-cache groups; expected 2")]
    assert narrow.copies.blocks == [[7]] and not narrow.staging.is_waiting(Use.SENDING, second)


def test_a_registration_that_is_finished_does_not_wait_any_more(narrow: Side) -> None:
    taken, tasks = waiting(narrow)
    for task in tasks:
        narrow.staged.task_finished(task)
    narrow.free(taken, Use.SENDING)
    assert narrow.is_clean()
