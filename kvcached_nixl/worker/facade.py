# SPDX-License-Identifier: Apache-2.0
"""The worker on the engine's thread: is built over the memory that was registered, passes a step's commands on to the
transfer thread when it is time, and turns the transfer thread's outcomes into what vLLM is told. Once per worker.

What a step computes is offered once the step has been submitted to the device, together with an event that tells the
transfer thread when the device has finished it. Decode's blocks are written only after the device has finished every
step that could still write them (rule R8, vllm#45357). Nothing here blocks, except `Device.wait`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.errors import ContractChanged
from kvcached_nixl.ids import EngineId
from kvcached_nixl.processes import Host
from kvcached_nixl.settings import SERVER_LOGGER, Settings
from kvcached_nixl.transport.agent import Transport, open_gate, register, select_device
from kvcached_nixl.transport.side_channel import SideChannel
from kvcached_nixl.wire.handshake import RankHandshake, Tag, Weights
from kvcached_nixl.wire.messages import Peer
from kvcached_nixl.wire.planes import GroupMemory
from kvcached_nixl.wire.step import FetchSpec, Finish, OfferUpdate, Report, Step
from kvcached_nixl.worker.background import Background
from kvcached_nixl.worker.decode.fencing import WriteGates
from kvcached_nixl.worker.decode.receiver import Receiver
from kvcached_nixl.worker.geometry.layout import Layout, group_memory
from kvcached_nixl.worker.memory_registration import Registered, num_kept
from kvcached_nixl.worker.outcomes import WorkerCounters
from kvcached_nixl.worker.prefill.registry import OfferRegistry
from kvcached_nixl.worker.transfer.checksums import Checksums, Content
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.ownership_tokens import BUCKETS, BUFFERS, TOKENS_PER_BUCKET, TokenArray
from kvcached_nixl.worker.transfer.slab import Slab, Slots
from kvcached_nixl.worker.transfer.staging import Staging
from kvcached_nixl.worker.transfer.topology import LocalRank
from kvcached_nixl.worker.transfer_thread import (
    BlocksWritable,
    Command,
    IsReached,
    LocalIdentity,
    NewWeights,
    Reached,
    TransferThread,
)

if TYPE_CHECKING:
    from kvcached_nixl.vllm.adapter.nixl_worker import WorkerView

logger = logging.getLogger(SERVER_LOGGER)


MOST_UNTAKEN = 3
"""Steps with a report that vLLM has not asked for."""


class Device:
    """The device that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def select(self) -> None:
        select_device(self._device.type, self._device.index or 0)

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
        self._report, self._num_untaken = Report(), 0

    def begin_step(self, step: Step) -> None:
        """Called before the step is submitted to the device. Idempotent: vLLM 0.29 and later call this twice a step."""
        if step is self._step:
            return
        # Of a step that raised before it zeroed blocks; nothing else of it will run.
        self.blocks_zeroed()
        # A previous step that computes is still here only if it raised: vLLM never reported that it was submitted.
        self.end_step(has_failed=self._step is not None and not self._step.is_idle)
        self._step, commands = step, list[Command]()
        if self._incarnation != step.incarnation:
            self._incarnation, local = step.incarnation, self._local
            where = local.engine_id, step.host, step.port
            own = Peer(*where, local.tp_size, local.tp_rank, local.pp_size, local.pp_rank)
            commands.append(LocalIdentity(own, step.wake_address, step.incarnation))
        computed = {one.request_id for one in step.of(OfferUpdate) if one.ready_tokens}
        for one in step.in_order():
            if isinstance(one, OfferUpdate) and one.ready_tokens:
                self._offered.append(one)
            elif isinstance(one, Finish) and one.request_id in computed:
                self._finished.append(one)
            else:
                commands.append(one)
        self.thread.submit(*commands)
        self._unwritable += (spec.attempt for spec in step.of(FetchSpec))
        if not self._zeroes_blocks:
            self.blocks_zeroed()
        self._outcomes.computed(step)
        self.thread.engine_computes = not step.is_idle
        if not step.is_stalled:
            self.thread.engine_moves()

    def blocks_zeroed(self) -> None:
        """Called when the step's zeroing of new blocks was submitted to the device, after `begin_step`. Idempotent."""
        if self._unwritable:
            attempts, self._unwritable = tuple(self._unwritable), []
            self.thread.submit(Reached(BlocksWritable(attempts), self.record_event()))

    def end_step(self, *, has_failed: bool = False) -> None:
        """Called after the step was submitted to the device. ``has_failed``: it was not, or only in part: nothing that
        it was to compute is offered."""
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
        """Announce the weights this rank computes with. Called at start and whenever they may have changed. ``names``:
        of their tensors, as in `Weights.misfit`."""
        self._offer_handshake(weights)
        self.thread.submit(NewWeights(weights, names))

    def take_sent(self) -> set[str]:
        """Returns prefill's requests, since the last call, whose blocks are not needed any more.

        Does not end a step that computes: a draft model may still compute its part of it. vLLM reports that end itself.
        Raises `ContractChanged`: `take_report` was not called for the last steps.
        """
        self.thread.engine_computes = False
        if self._step is not None and self._step.is_idle:
            self.end_step()
        self._num_untaken += self._report != Report()
        if self._num_untaken > MOST_UNTAKEN:
            raise ContractChanged(
                found=f"the reports of {self._num_untaken} steps, which vLLM has not asked for",
                expected="a call of build_connector_worker_meta in each step, behind get_finished",
                consequence="The engine would not hear which hand-overs have ended, and never free their blocks.",
                remedy="If another connector is around NixlConnector, have it pass that call on.",
            )
        sent, report = self.thread.take_outcome()
        self._report.add(report)
        return sent

    def take_report(self) -> Report | None:
        """Returns what else has ended until the last `take_sent`, since the last call; None if nothing has."""
        found, self._report, self._num_untaken = self._report, Report(), 0
        return None if found == Report() else found

    def take_counted(self) -> WorkerCounters:
        return self._outcomes.take_counted()

    def close(self) -> None:
        self.thread.close()

    def _publish(self, request_id: str, ownership_token: int) -> None:
        if not self.tokens.publish(request_id, ownership_token):
            logger.warning("The ownership-token table is full, so decode will not use the KV of request %s", request_id)


def build_worker(
    worker: WorkerView, registered: Registered, settings: Settings, channel: SideChannel, clock: Clock
) -> WorkerFacade:
    """Describe the registered memory, publish the handshake answer to peers, and start the threads that move KV. Raises
    `LayoutRefused`: the memory cannot be described token by token and head by head.
    """
    layout, slab = registered.layout, registered.slab
    own_groups = groups = tuple(
        group_memory(layout, layers, worker.kernel_blocks_per_block, worker.share_of)
        for layers in registered.layers_of_groups
    )
    if slab is not None:
        groups = slab.groups(groups)
    local = LocalRank(
        engine_id=EngineId(worker.engine_id),
        tp_size=worker.tp_size,
        tp_rank=worker.tp_rank,
        groups=groups,
        kv_shares=worker.kv_shares,
        pp_size=worker.pp_size,
        pp_rank=worker.pp_rank,
        needs_equal_blocks=slab is not None and worker.zeroes_blocks,
    )
    tokens: TokenArray = np.zeros((BUCKETS + BUFFERS, TOKENS_PER_BUCKET), dtype=np.uint64)
    worker.keep_registered(register(worker.agent, [(tokens.ctypes.data, tokens.nbytes)], worker.backends))
    memory_type = registered.memory_type or worker.memory_type
    # Other threads keep this event, not the transfer thread: so an engine without references is freed at once, with
    # its NIXL agent.
    wake = threading.Event()
    background = Background("kvcached-nixl-checksums", layout.device, wake.set)
    blocks = Content(own_groups, layout.areas())
    sent = blocks if slab is None else Content(groups, slab.areas)
    context = WorkerContext(
        settings=settings,
        clock=clock,
        channel=channel,
        wake=wake,
        transport=Transport(worker.agent, memory_type, worker.device_id),
        local=local,
        tokens=tokens,
        compatibility=str(_tag(worker, groups, settings)),
        checksums=Checksums(sent, blocks, background, settings.verify_fraction),
        host=Host.here(memory_type, os.environ),
        staging=None if slab is None else _staging(layout, slab, local, wake),
        memory_path=registered.path,
    )
    facade = assemble(
        context,
        Device(layout.device),
        _publisher(worker, context),
        _gates(worker, registered, background, context),
        zeroes_blocks=worker.zeroes_blocks,
        answers_early=worker.answers_before_drafts,
    )
    facade.thread.start()
    return facade


def _tag(worker: WorkerView, groups: Sequence[GroupMemory], settings: Settings) -> Tag:
    return Tag(
        mode=settings.transfer_mode.value,
        facts=worker.facts,
        cells=tuple(tuple(kind.cell_bytes for kind in group.parts or group.planes) for group in groups),
    )


def _staging(layout: Layout, slab: Slab, local: LocalRank, wake: threading.Event) -> Staging:
    copier = Background("kvcached-nixl-copies", layout.device, wake.set)
    slots = Slots(slab.num_slots, num_kept(slab.num_slots))
    in_slot = tuple(group.planes[0].num_blocks // slab.num_slots for group in local.groups)
    return Staging(slots, slab, copier, local.kernel_block_sizes, in_slot)


def _publisher(worker: WorkerView, context: WorkerContext) -> Callable[[Weights], None]:
    local = context.local
    handshake = RankHandshake(
        engine_id=local.engine_id,
        tp_size=local.tp_size,
        tp_rank=local.tp_rank,
        pp_size=local.pp_size,
        pp_rank=local.pp_rank,
        agent_metadata=context.transport.metadata(),
        device_id=worker.device_id,
        memory_type=context.host.memory_type,
        is_staged=context.staging is not None,
        process=context.host.own,
        groups=local.groups,
        token_table_address=int(context.tokens.ctypes.data),
        weights=Weights(),
    )

    def publish(weights: Weights) -> None:
        told = msgspec.structs.replace(handshake, weights=weights)
        worker.offer_handshake(context.compatibility, msgspec.msgpack.encode(told))

    return publish


def _gates(worker: WorkerView, registered: Registered, background: Background, context: WorkerContext) -> WriteGates:
    # Copied: a reference to the worker would keep its agent.
    where = tuple(worker.backends), registered.extents, context.host.memory_type, registered.device_id
    gates = WriteGates(lambda: open_gate(*where), background, context.clock)
    if context.settings.transfer_mode.is_push or context.staging is not None:
        # Otherwise the first gate is opened when this rank first meets a prefill that stages, and so writes in a pull.
        gates.join()
    return gates


def assemble(
    context: WorkerContext,
    device: Device,
    offer_handshake: Callable[[Weights], None],
    gates: WriteGates,
    *,
    zeroes_blocks: bool = False,
    answers_early: bool = False,
) -> WorkerFacade:
    """Build all parts of one worker; its thread is not started. Arguments as of `Receiver` and `WorkerFacade`."""
    receiver, registry = Receiver(context, gates), OfferRegistry(context)
    context.peers.listen(receiver, registry.writer, context.gate_connections, context.transfer_queue)
    thread = TransferThread(context, receiver, registry, device.select)
    return WorkerFacade(
        context, thread, device, offer_handshake, zeroes_blocks=zeroes_blocks, answers_early=answers_early
    )
