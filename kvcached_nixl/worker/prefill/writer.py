# SPDX-License-Identifier: Apache-2.0
"""Prefill: makes the WRITEs for decode's registrations, and ends them. Once per worker, on the transfer thread.

A registration is finished when none of its WRITEs is in flight; only then is it answered, and only then are the blocks
on both sides free (rule R2).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.messages import Peer, StagingGrant, StagingRequest, Stopped, Written, encode
from kvcached_nixl.worker.geometry.descriptors import Descriptors, KernelBlocks
from kvcached_nixl.worker.prefill.offers import Offer, WriteTask
from kvcached_nixl.worker.prefill.source import FromBlocks, Source, Staged
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.peer_link import ConnectedPeer
from kvcached_nixl.worker.transfer.peers import contained
from kvcached_nixl.worker.transfer.staging import Held
from kvcached_nixl.worker.transfer.transfer_queue import TransferJob

__all__ = ["Writer"]


class Writer:
    """Makes and ends WRITEs.

    Args:
        ended: called with a registration that is finished.
        settle: called with an offer whose blocks may be free now.

    Attributes:
        source: the memory that the bytes are written from.
        num_final: last WRITEs of registrations that have not ended; decode waits for nothing else.
    """

    def __init__(
        self, context: WorkerContext, ended: Callable[[WriteTask], None], settle: Callable[[Offer], None]
    ) -> None:
        self._context = context
        self._ended = ended
        self._settle = settle
        self.source = FromBlocks()
        if context.staging is not None:
            self.source = Staged(context, self.advance, settle, self.stop)
        self.num_final = 0

    def connect(self, task: WriteTask) -> None:
        """Begin a handshake with the rank that has registered, if there is no connection to it."""
        if task.stopping is None or task.jobs:
            self._context.peers.need(
                task.registration.decode,
                "",
                partial(self._connected, task),
                partial(self.stop, task, is_answered=False),
                is_doubted=task.is_doubted,
            )

    def advance(self, task: WriteTask) -> None:
        """Make WRITEs of the tokens that are ready and in no WRITE yet, up to a block boundary of both sides."""
        offer, registration = task.offer, task.registration
        if task.stopping is not None or task.is_complete or offer is None:
            return
        if offer.finished and offer.update.ready_tokens < registration.end_token:
            reason = f"prefill computed {offer.update.ready_tokens} of {registration.end_token} tokens"
            self.stop(task, HandOverFailed(FailureCause.STOPPED, reason))
            return
        with contained(partial(self.stop, task)):
            try:
                while self._advance(task, offer):
                    pass
            except (ValueError, HandOverFailed) as error:
                what = error.cause if isinstance(error, HandOverFailed) else FailureCause.RANGE
                self.stop(task, HandOverFailed(what, f"no WRITE was made: {error}"))

    def take_grant(self, task: WriteTask, grant: StagingGrant) -> None:
        """Decode grants slots for the tokens that prefill has asked for; a late or repeated grant is ignored."""
        first_token, end_token = task.asked
        if grant.first_token == first_token == task.next_token and grant.end_token <= end_token:
            task.grant = grant
            self.advance(task)

    def _advance(self, task: WriteTask, offer: Offer) -> bool:
        """Make one WRITE, if one can be made. Returns whether there may be another one to make."""
        known, registration = task.known, task.registration
        end = min(offer.update.ready_tokens, registration.end_token)
        if end < registration.end_token:
            # A step may end inside a block; the tokens of that block go with the next step's.
            end -= end % self._context.local.step_tokens(registration.block_sizes)
        if known is None or end <= task.next_token:
            return False
        if registration.is_staged:
            if task.grant is None or task.grant.end_token <= task.next_token:
                self._ask_for_grant(task, end)
                return False
            end = min(end, task.grant.end_token)
        found = self.source.find(task, end)
        if found is None:
            return False
        self._write(task, offer, known, found)
        return not task.is_complete

    def _ask_for_grant(self, task: WriteTask, end: int) -> None:
        if task.asked[0] != task.next_token:
            task.asked = task.next_token, end
            said = StagingRequest(task.registration.attempt, self._context.local.tp_rank, *task.asked)
            self._context.peers.send(task.registration.decode, encode(said), only=task.agent)

    def follow(self, offer: Offer) -> None:
        """Note in the timeline of an offer what state it is in now."""
        offer.follow(self._context.clock.now_seconds(), is_copied=self.source.is_copying(offer))

    def stop(self, task: WriteTask, cause: HandOverFailed, *, is_answered: bool = True) -> None:
        """Stop a registration: post nothing more of it, and answer it once it is idle. Only the first reason counts."""
        if task.stopping is not None:
            return
        task.stopping = cause
        for job in [job for job in task.jobs if job not in task.awaiting_checksum]:
            self._context.transfer_queue.drop(job)
        if not is_answered:
            task.known = None
        self._end_if_idle(task, is_answered)

    def answer(self, agent: str, decode: Peer, attempt: int, cause: HandOverFailed) -> None:
        """Tell a rank of decode that nothing of its attempt is in flight, or will be; ``agent``: the one that asked."""
        message = Stopped(attempt, self._context.local.tp_rank, int(cause.cause), str(cause)[:1000])
        self._context.peers.send(decode, encode(message), only=agent)

    def _connected(self, task: WriteTask, known: ConnectedPeer) -> None:
        if known.agent != task.agent and not task.is_doubted:
            # The known agent may be from before a restart, and this registration the first message of the new one.
            task.is_doubted = True
            self.connect(task)
        elif known.agent != task.agent:
            cause = HandOverFailed(FailureCause.LOST, "another engine answers at decode's address")
            self.stop(task, cause, is_answered=False)
        elif task.stopping is None:
            task.known = known
            if task.offer is not None:
                self.follow(task.offer)
            self.advance(task)

    def _write(self, task: WriteTask, offer: Offer, known: ConnectedPeer, source: Source) -> None:
        registration, context = task.registration, self._context
        memory, end = known.rank.groups, source.end_token
        targets = registration.groups if task.grant is None else task.grant.groups
        block_sizes = tuple(group.kernel_block_size for group in memory)
        if len(targets) != len(source.groups) or registration.block_sizes != block_sizes:
            raise HandOverFailed(
                FailureCause.RANGE, "the registration does not fit the handshake (groups or block sizes)"
            )
        groups = [
            (here, KernelBlocks(there.block_ids, there.first_token), max(task.next_token, there.first_token))
            for here, there in zip(source.groups, targets, strict=True)
        ]
        routes = context.routes.of(known.agent, memory, is_prefill=True)
        found = Descriptors.none() if registration.is_read else context.routes.ranges(routes, groups, end)
        task.next_token = end
        is_final = task.is_complete
        if not (len(found.local) or is_final or registration.is_verified or registration.is_staged):
            # Other ranks write these tokens, and decode waits for the last range only.
            if source.held is not None:
                source.held.jobs += 1
                self.source.written(task, source.held)
            return
        if is_final and offer.update.manifest is None:
            raise HandOverFailed(FailureCause.PROTOCOL, "prefill has no manifest of what it computed")
        manifest = None if offer.update.manifest is None else msgspec.structs.replace(offer.update.manifest, groups=())
        digest: str | None = None

        def notify(_: int, is_last: bool) -> bytes:
            said = Written(
                registration.attempt,
                context.local.tp_rank,
                task.next_index,
                manifest if is_final and is_last else None,
                end if is_last else 0,
                digest if is_last else None,
            )
            task.next_index += 1
            return encode(said)

        @contained(partial(self.stop, task))
        def ended(failed: str) -> None:
            self._written(task, job, source.held, failed)

        # Without a gate, or where nothing is written, the notification goes to the rank's own agent.
        target = self._context.gate_connections.use(known, registration.gate) if registration.gate else known.agent
        job = TransferJob("WRITE", target, found.local, found.remote, ended, notify, tally=task.tally)
        if source.held is not None:
            source.held.jobs += 1
        if not registration.is_verified:
            self._submit(task, job, is_final)
            return

        @contained(partial(self.stop, task))
        def digested(found_digest: str, failed: str) -> None:
            nonlocal digest
            digest = found_digest
            self._checksummed(task, job, failed, is_final)

        # In `jobs` already: the checksum reads the bytes, so the blocks must not be freed before it has ended.
        task.jobs[job] = False
        sent = [(here, first) for here, _, first in groups], end
        context.checksums.of_sent(known.agent, sent, memory, lambda: task.stopping is None, digested)
        task.awaiting_checksum.add(job)

    def _submit(self, task: WriteTask, job: TransferJob, is_final: bool) -> None:
        task.jobs[job] = is_final
        self.num_final += is_final
        if not len(job.local) and job.notify is not None:
            # Decode has read the bytes already, or other ranks write all of them: only the notification is sent.
            self._context.peers.send(task.registration.decode, job.notify(0, True), only=task.agent)
        self._context.transfer_queue.submit(job)

    def _checksummed(self, task: WriteTask, job: TransferJob, failed: str, is_final: bool) -> None:
        task.awaiting_checksum.discard(job)
        if failed:
            self.stop(task, HandOverFailed(FailureCause.DEFECT, failed))
        if task.stopping is not None:
            self._context.transfer_queue.drop(job)
            return
        self._submit(task, job, is_final)

    def _written(self, task: WriteTask, job: TransferJob, held: Held | None, failed: str) -> None:
        self.num_final -= task.jobs.pop(job)
        self.source.written(task, held)
        if task.registration.gate:
            self._context.gate_connections.used(job.peer)
        if failed:
            self.stop(task, HandOverFailed(FailureCause.LOST, failed))
        self._end_if_idle(task, True)
        if not task.is_finished:
            # A staging window may be free now for the tokens that follow.
            self.advance(task)
            if task.offer is not None:
                self._settle(task.offer)

    def _end_if_idle(self, task: WriteTask, is_answered: bool) -> None:
        if task.is_finished or task.jobs or (task.stopping is None and not task.is_complete):
            return
        task.is_finished = True
        if task.stopping is not None and is_answered:
            self.answer(task.agent, task.registration.decode, task.registration.attempt, task.stopping)
        self.source.task_finished(task)
        self._ended(task)
