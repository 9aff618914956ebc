# SPDX-License-Identifier: Apache-2.0
"""The worker's hand-over state on the engine's thread: passes a step's commands on to the transfer thread when it is
time, and turns the transfer thread's outcomes into what vLLM is told. Once per worker.

What a step computes is offered once the step has been submitted to the device, together with an event that tells the
transfer thread when the device has finished it. Decode's blocks are written only after the device has finished every
step that could still write them (rule R8, vllm#45357). Nothing here blocks, except `Device.wait`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from kvcached_nixl.current_device import select
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.handshake import Weights
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.wire.step import (
    FetchSpec,
    Finish,
    OfferUpdate,
    Step,
)
from kvcached_nixl.worker.commands import BlocksWritable, Command, IsReached, LocalIdentity, NewWeights, Reached
from kvcached_nixl.worker.outcomes import Outcome, WorkerCounters
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer_thread import TransferThread

__all__ = ["Device", "WorkerFacade"]

logger = logging.getLogger(SERVER_LOGGER)


class Device:
    """The device that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def select(self) -> None:
        """Make it the calling thread's."""
        select(self._device.type, self._device.index or 0)

    def record(self) -> IsReached:
        """Returns a function that says whether all work has finished that was submitted before this call."""
        if self._device.type == "cpu":
            # vLLM's CPU worker computes before it returns.
            return lambda: True
        event = torch.Event(self._device)
        event.record()
        query: IsReached = event.query
        return query

    def wait(self) -> None:
        """Block until all work has finished that was submitted so far."""
        if self._device.type != "cpu":
            event = torch.Event(self._device)
            event.record()
            event.synchronize()


class WorkerFacade:
    """See the module.

    Args:
        thread: the transfer thread, started.
        offer_handshake: publishes the handshake answer for peers, given the weights this rank computes with.
        answers_early: prefill's answer does not imply that its device has finished the step, so that is waited for
            before KV is offered that decode reads.
    """

    def __init__(
        self,
        context: WorkerContext,
        thread: TransferThread,
        device: Device,
        offer_handshake: Callable[[Weights], None],
        *,
        zeroes_blocks: bool = False,
        answers_early: bool = False,
    ) -> None:
        self.thread = thread
        self.tokens = context.token_table
        self._local = context.local
        self._outcomes = context.outcomes
        mode = context.settings.transfer_mode
        # Where KV is staged decode cannot read blocks: prefill frees them as soon as they are copied.
        self._is_read = not mode.is_push and context.staging is None
        self._zeroes_blocks = zeroes_blocks
        self._unwritable: list[int] = []
        self.record_event = device.record
        self._device = device
        self._offer_handshake = offer_handshake
        # Only READs need it: before a WRITE, prefill waits for the device by itself.
        self._answers_early = answers_early and not mode.is_push
        self._step: Step | None = None
        # Of ``_step``: what it computes, and which requests end with that.
        self._offered: list[OfferUpdate] = []
        self._finished: list[Finish] = []
        self._incarnation = ""
        self._marks: set[int] = set()
        self._reasons: list[tuple[int, str]] = []

    def begin_step(self, step: Step) -> None:
        """Called before the step is submitted to the device. Idempotent: vLLM 0.29 and later call this twice a step."""
        if step is self._step:
            return
        # Of a step that raised before it zeroed blocks; nothing else of it will run.
        self.blocks_zeroed()
        # A previous step that computes is still here only if it raised: vLLM never reported that it was submitted.
        self.end_step(has_failed=self._step is not None and not self._step.is_idle)
        self._step = step
        if commands := self._commands(step):
            self.thread.submit(*commands)
        self._outcomes.computed(step)
        self.thread.engine_computes = not step.is_idle
        if not step.is_stalled:
            self.thread.engine_moves()

    def blocks_zeroed(self) -> None:
        """Called when the step's zeroing of new blocks was submitted to the device, after `begin_step`. Idempotent."""
        if self._unwritable:
            self.thread.submit(*self._writable())

    def end_step(self, *, has_failed: bool = False) -> None:
        """Called after the step was submitted to the device.

        Args:
            has_failed: the step was not submitted, or only in part: nothing it was to compute is offered.
        """
        self.thread.engine_computes = False
        offered, finished = self._offered, self._finished
        self._step, self._offered, self._finished = None, [], []
        if not offered:
            return
        if has_failed:
            self.thread.submit(*finished)
            return
        if self._answers_early and any(one.manifest is not None for one in offered):
            self._device.wait()
        is_reached = self.record_event()
        for one in offered:
            if one.manifest is not None and self._is_read:
                # Published here, not on the transfer thread: decode may read it as soon as prefill has answered.
                self._publish(one.request_id, one.manifest.ownership_token)
        self.thread.submit(*(Reached(one, is_reached) for one in offered), *finished)

    def identify(self, weights: Weights, names: Mapping[str, Sequence[str]] = MappingProxyType({})) -> None:
        """Announce the weights this rank computes with. Called at start and whenever they may have changed.

        Args:
            names: of their tensors, as in `Weights.misfit`.
        """
        self._offer_handshake(weights)
        self.thread.submit(NewWeights(weights, names))

    def take_ended(self) -> Outcome:
        """Returns what has finished since the last call.

        Does not end a step that computes: a draft model may still compute its part of it. vLLM reports that end itself.
        """
        self.thread.engine_computes = False
        if self._step is not None and self._step.is_idle:
            self.end_step()
        outcome = self.thread.take_outcome()
        self._marks |= outcome.marks
        self._reasons += outcome.reasons
        return outcome

    def take_marks(self) -> set[int]:
        """Returns the marks of attempts that failed since the last call; they travel among vLLM's invalid blocks."""
        marks, self._marks = self._marks, set()
        return marks

    def take_counted(self) -> WorkerCounters:
        """Returns the counts for the metrics since the last call."""
        counted = self._outcomes.take_counted()
        # Together with the marks: the scheduler looks for both at once.
        counted.reasons, self._reasons = self._reasons, []
        return counted

    def close(self) -> None:
        """Stop the transfer thread."""
        self.thread.close()

    def _commands(self, step: Step) -> list[Command]:
        """Returns what the transfer thread is told before the step is submitted to the device, in this order."""
        commands: list[Command] = []
        if self._incarnation != step.incarnation:
            self._incarnation, local = step.incarnation, self._local
            own = Peer(local.engine_id, step.host, step.port, local.tp_size, local.tp_rank)
            commands.append(LocalIdentity(own, step.wake_address, step.incarnation))
        computed = {one.request_id for one in step.of(OfferUpdate) if one.ready_tokens}
        for one in step.in_order():
            if isinstance(one, OfferUpdate) and one.ready_tokens:
                self._offered.append(one)
            elif isinstance(one, Finish) and one.request_id in computed:
                self._finished.append(one)
            else:
                commands.append(one)
        self._unwritable += (spec.attempt for spec in step.of(FetchSpec))
        return commands if self._zeroes_blocks else [*commands, *self._writable()]

    def _writable(self) -> list[Command]:
        attempts, self._unwritable = tuple(self._unwritable), []
        return [Reached(BlocksWritable(attempts), self.record_event())] if attempts else []

    def _publish(self, request_id: str, ownership_token: int) -> None:
        if not self.tokens.publish(request_id, ownership_token):
            logger.warning("The ownership-token table is full, so decode will not use the KV of request %s", request_id)
