# SPDX-License-Identifier: Apache-2.0
"""Prefill: the memory that an offer's bytes are written from. Owned by the transfer thread.

Without a slab they are written from the request's blocks. With a slab they are copied into slots first:

    parked    slots for the whole offer, taken at prefill's first update if there are enough: the blocks are free as
              soon as the last one is copied, whenever decode registers
    window    otherwise slots for a range of tokens, taken when decode has registered; the blocks are kept, and one
              range is copied while the previous one is transferred
"""

from __future__ import annotations

from collections.abc import Callable

from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.worker.prefill.offers import Offer, WriteTask
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.slab import Use
from kvcached_nixl.worker.transfer.staging import Held

WINDOWS = 2
"""Windows that one registration has at a time: one is transferred while the other is copied."""


class FromBlocks:
    """The source where nothing is staged: the request's own blocks."""

    def told(self, offer: Offer) -> None:
        """Prefill has updated or finished an offer."""

    def forget(self, offer: Offer) -> None:
        """Tokens from ``offer.update.ready_tokens`` on are computed again: drop copies of them."""

    def find(self, task: WriteTask, end_token: int) -> tuple[int, Held | None] | None:
        """Returns up to which token a registration's next tokens can be written, and from which slots: None for its
        offer's blocks. None if they cannot be written yet: it is advanced later."""
        return end_token, None

    def written(self, task: WriteTask, held: Held | None, *, is_begun: bool = True) -> None:
        """A WRITE from a source that `find` returned has ended, or need not be made; ``held``: its slots, if staged."""

    def finished(self, one: WriteTask | Offer) -> None: ...


class Staged(FromBlocks):
    """See the module. ``advance``: called with a registration whose next tokens may be in slots now; ``settle``: with
    an offer when a copy out of its blocks has ended or failed; ``stop``: if a registration's tokens cannot be copied.
    """

    def __init__(
        self,
        context: WorkerContext,
        advance: Callable[[WriteTask], None],
        settle: Callable[[Offer], None],
        stop: Callable[[WriteTask, HandOverFailed], None],
    ) -> None:
        assert context.staging is not None
        self._staging = context.staging
        self._local = context.local
        self._advance = advance
        self._settle = settle
        self._stop = stop

    def told(self, offer: Offer) -> None:
        if offer.may_be_read:
            self.forget(offer)
            if not self._park(offer) and offer.finished:
                # Park it after all when slots are free, so that its blocks can be freed.
                self._staging.wait(Use.PARKED, offer, lambda: self._park(offer))

    def forget(self, offer: Offer) -> None:
        if offer.parked is not None and offer.update.ready_tokens < offer.parked.asked_token:
            self._unpark(offer)
        for task in offer.write_tasks.values():
            for window in [one for one in task.windows if one.end_token > offer.update.ready_tokens]:
                task.windows.remove(window)
                self._let_go(window)

    def find(self, task: WriteTask, end_token: int) -> tuple[int, Held | None] | None:
        offer = task.offer
        assert offer is not None
        parked = offer.parked
        if parked is not None:
            if parked.staged_token < end_token:
                step = self._local.step_tokens(task.registration.block_sizes)
                end_token = parked.staged_token - parked.staged_token % step
            return (end_token, parked) if end_token > task.next_token else None
        if not offer.may_be_read:
            return None
        for window in task.windows:
            if window.first_token <= task.next_token < window.end_token:
                return (window.end_token, window) if not window.copies else None
        if len(task.windows) < WINDOWS and not self._staging.is_waiting(Use.SENDING, task, task.decode_engine):
            self._open(task, end_token)
        return None

    def written(self, task: WriteTask, held: Held | None, *, is_begun: bool = True) -> None:
        if held is None:
            return
        held.jobs -= is_begun
        if held in task.windows and not held.jobs and task.next_token >= held.end_token:
            task.windows.remove(held)
        is_parked = task.offer is not None and task.offer.parked is held
        if held not in task.windows and not is_parked:
            self._let_go(held)

    def finished(self, one: WriteTask | Offer) -> None:
        if isinstance(one, Offer):
            self._staging.forget(Use.PARKED, one)
            self._unpark(one)
            return
        self._staging.forget(Use.SENDING, one, one.decode_engine)
        windows, one.windows = one.windows, []
        for window in windows:
            self._let_go(window)

    # -------------------------------------------------------------------------------------------------------- inside

    def _park(self, offer: Offer) -> bool:
        """Copy what is ready into slots for the whole offer. Returns False if there are too few slots now; also True if
        the slab is too small for all of it, or windows have a range of it."""
        if offer.parked is None:
            tokens, has_windows = offer.update.num_tokens, any(task.windows for task in offer.write_tasks.values())
            firsts = [blocks.first_token for blocks in offer.blocks]
            if not offer.may_be_read or has_windows or not self._staging.fits(Use.PARKED, firsts, 0, tokens):
                return True
            step = self._local.step_tokens(())
            offer.parked = self._staging.take(Use.PARKED, firsts, 0, tokens, step, is_whole=True)
            if offer.parked is None:
                return False
        self._copy_parked(offer)
        return True

    def _unpark(self, offer: Offer) -> None:
        parked, offer.parked = offer.parked, None
        if parked is not None:
            self._let_go(parked)

    def _copy_parked(self, offer: Offer) -> None:
        parked, ready = offer.parked, offer.update.ready_tokens
        assert parked is not None
        if ready < offer.update.num_tokens:
            ready -= ready % self._local.step_tokens(())
        # One copy after the other: what a failed one has left behind is told from what is there.
        if ready <= parked.staged_token or parked.copies or not offer.may_be_read:
            return

        def copied(failed: str) -> None:
            offer.copies -= 1
            if offer.parked is not parked:
                self._let_go(parked)
            elif failed:
                self._unpark(offer)
            else:
                parked.staged_token = ready
                self._copy_parked(offer)
            for task in list(offer.write_tasks.values()):
                self._advance(task)
            self._settle(offer)

        offer.copies += 1
        parked.asked_token = ready
        self._staging.gather(parked, offer.blocks, ready, copied)

    def _open(self, task: WriteTask, end_token: int) -> bool:
        """A window for the next tokens that are in none. Returns whether it does not wait for slots."""
        offer = task.offer
        assert offer is not None
        first_token = max([task.next_token, *(one.end_token for one in task.windows)])
        if first_token >= end_token:
            return True
        groups = [group.first_token for group in task.registration.groups]
        if len(groups) != len(offer.blocks):
            reason = f"found a registration of {len(groups)} KV-cache groups; expected {len(offer.blocks)}"
            raise HandOverFailed(FailureCause.RANGE, reason)
        step = self._local.step_tokens(task.registration.block_sizes)
        held = self._staging.take(Use.SENDING, groups, first_token, end_token, step, owner=task.decode_engine)
        if held is None:
            self._staging.wait(Use.SENDING, task, lambda: self._open_late(task, end_token), task.decode_engine)
            return False
        task.windows.append(held)

        def copied(failed: str) -> None:
            offer.copies -= 1
            held.staged_token = held.end_token
            if held not in task.windows:
                self._let_go(held)
            elif failed:
                self._stop(task, HandOverFailed(FailureCause.DEFECT, failed))
            else:
                self._advance(task)
            self._settle(offer)

        offer.copies += 1
        self._staging.gather(held, offer.blocks, held.end_token, copied)
        return True

    def _open_late(self, task: WriteTask, end_token: int) -> bool:
        # If prefill computes some of the tokens again, the registration is advanced when they are ready.
        offer = task.offer
        if task.stopping is not None or offer is None or offer.update.ready_tokens < end_token or not offer.may_be_read:
            return True
        try:
            return self._open(task, end_token)
        except (ValueError, HandOverFailed) as error:
            self._stop(task, HandOverFailed(FailureCause.DEFECT, str(error)))
            return True

    def _let_go(self, held: Held) -> None:
        """Give slots back, as soon as no copy or WRITE uses them any more."""
        if held.copies or held.jobs:
            self._staging.mark_stuck(held)
        else:
            self._staging.give_back(held)
