# SPDX-License-Identifier: Apache-2.0
"""Push on the engine's thread of a worker: from the scheduler's steps to the writer thread and back. Once per worker.

What a step computed is offered when the step has been given to the device, with an event that tells the writer thread
when the device has got there; nothing waits for it on this thread. Everything here returns at once but for one thing: a
step that computes nothing waits for something to end.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcached_nixl.idle import idle_step_seconds
from kvcached_nixl.ids import DecodeRequestId, EngineId, PrefillRequestId
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.params import RemotePrefill
from kvcached_nixl.wire.push import Peer, Registration, draw_attempt
from kvcached_nixl.wire.push_step import BlockIds, PushStep, Wanted, quiet_id
from kvcached_nixl.worker.push_commands import Decline, Finish, Offer, Refuse, Register, Renew, Restart, Stop, Withdraw
from kvcached_nixl.worker.push_handshake import contributors
from kvcached_nixl.worker.push_writer import Push

__all__ = ["Ended", "Place", "PushWorker"]

logger = logging.getLogger(SERVER_LOGGER)


@dataclass(frozen=True)
class Place:
    """Where a worker is, and how its blocks are counted.

    Attributes:
        block_size: tokens in a block of the attention kernel.
        kernel_blocks_per_block: how many of those make a block of the scheduler.
        is_latent: all ranks hold the same KV (multi-latent attention).
    """

    engine_id: EngineId
    tp_size: int
    tp_rank: int
    block_size: int
    kernel_blocks_per_block: int
    is_latent: bool


class Ended(NamedTuple):
    """What vLLM is told.

    Attributes:
        sent: prefill's requests, and ids of holds, whose blocks are free.
        received: decode's requests that wait no more, ``failed`` ones among them.
        invalid: blocks that hold no KV.
        expired: those of ``sent`` that nobody has fetched in time.
    """

    sent: set[str]
    received: set[str]
    failed: set[str]
    invalid: set[int]
    expired: set[str]


class PushWorker:
    """See the module.

    Args:
        push: the writer thread, started.
        record_event: called when a step has been given to the device; what it returns tells whether the device has
            done it, on any thread.
    """

    def __init__(self, push: Push, place: Place, record_event: Callable[[], Callable[[], bool]]) -> None:
        self._push = push
        self._place = place
        self._record_event = record_event
        self._step: PushStep | None = None
        self._is_idle = False
        self._idle_steps = 0
        self._waiting: dict[DecodeRequestId, BlockIds] = {}
        self._unusable: dict[DecodeRequestId, str] = {}

    def begin_step(self, step: PushStep) -> None:
        """Before the step is given to the device."""
        # A step that was not ended was given to the device all the same.
        self.end_step()
        submit = self._push.submit
        for prefill, names in step.beats:
            self._renew(prefill, names)
        for wanted in step.wanted:
            self._register(step, wanted)
        for unusable in step.unusable:
            self._fail(unusable.request_id, unusable.block_ids, unusable.reason)
        for transfer, prefill in step.unneeded:
            submit(Decline(transfer, self._ranks(prefill, range(prefill.tp_size))))
        for decode_request_id, reason in step.withdrawn.items():
            submit(Withdraw(decode_request_id, reason))
        for request_id, hold in step.preempted:
            submit(Restart(request_id, hold))
        for request_id in step.finished:
            submit(Finish(request_id))
        for request_id, reason in step.stopped.items():
            submit(Stop(request_id, reason))
        for transfer, reason in step.refused.items():
            submit(Refuse(transfer, reason))
        self._step = step
        self._is_idle = step.is_idle
        self._push.engine_computes = not step.is_idle

    def end_step(self) -> None:
        """After the step was given to the device."""
        self._push.engine_computes = False
        step, self._step = self._step, None
        if step is None or not step.computed:
            return
        is_computed = self._record_event()
        for one in step.computed:
            blocks = self._kernel_blocks(one.block_ids)
            self._push.submit(Offer(one.transfer, one.request_id, blocks, one.ready_tokens, is_computed))

    def take_ended(self) -> Ended:
        """What ended since the last call."""
        self._idle_steps = self._idle_steps + 1 if self._is_idle and not self._unusable else 0
        outcome = self._push.take_outcome(idle_step_seconds(self._idle_steps))
        failed = outcome.failed | self._unusable
        self._unusable = {}
        invalid: set[int] = set()
        for request_id, reason in failed.items():
            invalid.update(block_id for group in self._waiting[request_id] for block_id in group)
            logger.warning("The KV of request %s was not received: %s", request_id, reason)
        for prefill_request_id in outcome.expired:
            logger.warning("The lease of request %s has ended; decode has not registered for it", prefill_request_id)
        received = outcome.received | failed.keys()
        for request_id in received:
            del self._waiting[request_id]
        sent = {*outcome.done, *map(quiet_id, outcome.quiet)}
        return Ended(sent, set(received), set(failed), invalid, set(outcome.expired))

    def close(self) -> None:
        """Stop the writer thread."""
        self._push.close()

    def _renew(self, prefill: RemotePrefill, names: list[PrefillRequestId]) -> None:
        # Who cannot be a contributor is refused in words when the request is registered.
        with contextlib.suppress(ValueError):
            writers, others = self._contributors(prefill)
            self._push.submit(Renew(names, self._ranks(prefill, (*writers, *others))))

    def _contributors(self, prefill: RemotePrefill) -> tuple[tuple[int, ...], tuple[int, ...]]:
        place = self._place
        return contributors(prefill, tp_rank=place.tp_rank, tp_size=place.tp_size, is_latent=place.is_latent)

    def _register(self, step: PushStep, wanted: Wanted) -> None:
        place = self._place
        try:
            writers, others = self._contributors(wanted.prefill)
        except ValueError as cause:
            self._fail(wanted.request_id, wanted.block_ids, str(cause))
            return
        self._waiting[wanted.request_id] = wanted.block_ids
        registration = Registration(
            transfer=wanted.transfer,
            attempt=draw_attempt(),
            decode_request_id=wanted.request_id,
            decode=Peer(place.engine_id, step.host, step.port, place.tp_size, place.tp_rank),
            first_token=wanted.first_token,
            end_token=wanted.end_token,
            block_size=place.block_size,
            block_ids=tuple(tuple(group) for group in self._kernel_blocks(wanted.block_ids)),
        )
        self._push.submit(Register(registration, self._ranks(wanted.prefill, writers)))
        if others:
            self._push.submit(Decline(wanted.transfer, self._ranks(wanted.prefill, others)))

    def _fail(self, request_id: DecodeRequestId, block_ids: BlockIds, reason: str) -> None:
        self._waiting[request_id] = block_ids
        self._unusable[request_id] = reason

    def _kernel_blocks(self, block_ids: BlockIds) -> tuple[Sequence[int], ...]:
        ratio = self._place.kernel_blocks_per_block
        if ratio == 1:
            return block_ids
        return tuple([block * ratio + part for block in group for part in range(ratio)] for group in block_ids)

    @staticmethod
    def _ranks(prefill: RemotePrefill, ranks: Sequence[int]) -> tuple[Peer, ...]:
        engine_id = EngineId(prefill.engine_id)
        return tuple(Peer(engine_id, prefill.host, prefill.port, prefill.tp_size, rank) for rank in ranks)
