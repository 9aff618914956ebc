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
from support.worker_fakes import BLOCK_SIZE, DIGEST, TOKENS, HeldCopies, registration, staging_over

from kvcached_nixl.ids import KernelBlock, PrefillRequestId
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.messages import KernelBlockRange
from kvcached_nixl.wire.step import OfferUpdate
from kvcached_nixl.worker.prefill.offers import Offer, WriteTask
from kvcached_nixl.worker.prefill.source import Staged
from kvcached_nixl.worker.transfer.slab import Slots, Use
from kvcached_nixl.worker.transfer.staging import Held

BLOCKS = (7, 3, 9)


def update(offer: Offer, ready_tokens: int, blocks: tuple[tuple[int, ...], ...] = (BLOCKS,)) -> Offer:
    """Prefill has computed so many tokens of an offer, in these kernel blocks per group."""
    offer.update = msgspec.structs.replace(offer.update, ready_tokens=ready_tokens, groups=grown(*blocks))
    offer.blocks = tuple(KernelBlockRange(0, [KernelBlock(block) for block in group]) for group in blocks)
    return offer


def offer_of() -> Offer:
    told = OfferUpdate(PrefillRequestId("p-1"), "transfer:t", DIGEST, TOKENS, (), 0, None, is_held=True)
    return update(Offer(told), TOKENS)


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
    """24 slots: 8 for parked offers, and 16 for windows of up to 2 each; 4 for one decode."""
    return Side()


@pytest.fixture
def narrow() -> Side:
    """16 slots: none for parked offers, and 8 for windows of one block each; 2 for one decode."""
    return Side(16, 8)


def held_for(side: Side, task: WriteTask) -> Held:
    found = side.staged.find(task, TOKENS)
    assert found is not None and found[1] is not None
    return found[1]


# ------------------------------------------------------------------------------------------------------------- parked


def test_slots_of_an_offer_are_kept_when_a_write_from_them_has_ended(side: Side) -> None:
    """Another rank of decode may register."""
    offer = offer_of()
    task = task_of(offer)
    side.staged.told(offer)
    side.copies.end()
    held = held_for(side, task)
    held.jobs += 1
    side.staged.written(task, held)
    side.staged.written(task, None)
    side.staged.finished(task)
    assert side.used == (3, 0)
    side.staged.finished(offer)
    assert side.is_clean()


# ------------------------------------------------------------------------------------------------------------ windows


def test_a_registration_begins_where_decodes_prefix_cache_ends(narrow: Side) -> None:
    task = task_of(offer_of(), next_token=4, first_token=4, block_ids=((13, 19),))
    assert narrow.staged.find(task, 4) is None and not narrow.copies.asked, "nothing of it is ready"
    assert narrow.staged.find(task, 8) is None and narrow.copies.blocks == [[3]]


def test_a_window_that_cannot_be_copied_fails_its_registration(narrow: Side) -> None:
    offer = offer_of()
    task = task_of(offer)
    assert narrow.staged.find(task, TOKENS) is None
    narrow.copies.end("no room")
    assert narrow.failed == [(task, "no room")] and narrow.advanced == [] and narrow.settled == [offer]
    narrow.staged.finished(task)
    assert narrow.is_clean()


@pytest.mark.parametrize("failed", ["", "no room"])
def test_a_window_that_is_not_wanted_any_more_is_freed_when_its_copy_has_ended(failed: str, narrow: Side) -> None:
    offer = offer_of()
    task = task_of(offer)
    assert narrow.staged.find(task, TOKENS) is None
    narrow.staged.finished(task)
    assert narrow.used == (0, 1) and offer.copies
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
    task.next_token = 8
    assert narrow.staged.find(task, TOKENS) is None and narrow.used == (0, 2), "no third one while both are sent"
    narrow.staged.forget(update(offer, ready))
    assert narrow.used == (0, left)


def waiting(narrow: Side, number: int = 2) -> tuple[list[int], list[WriteTask]]:
    """Returns all slots for windows, and registrations of offers of their own that wait for them."""
    taken = narrow.fill(Use.SENDING)
    tasks = [task_of(offer_of(), attempt) for attempt in range(number)]
    for task in tasks:
        for _ in range(2):
            assert narrow.staged.find(task, TOKENS) is None
        assert narrow.staging.is_waiting(Use.SENDING, task, task.decode_engine)
    return taken, tasks


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
    assert not any(narrow.staging.is_waiting(Use.SENDING, one, one.decode_engine) for one in (first, second))
    narrow.copies.end()
    assert narrow.advanced == [second] and narrow.failed == []


def test_a_registration_that_fails_when_slots_are_free_is_told_why(narrow: Side) -> None:
    """And keeps nobody waiting."""
    taken, (first, second) = waiting(narrow)
    assert first.offer is not None
    update(first.offer, TOKENS, (BLOCKS, BLOCKS))
    narrow.free(taken, Use.SENDING)
    assert narrow.failed == [(first, "found a registration of 1 KV-cache groups; expected 2")]
    assert narrow.copies.blocks == [[7]] and not narrow.staging.is_waiting(Use.SENDING, second, second.decode_engine)
