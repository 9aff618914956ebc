# SPDX-License-Identifier: Apache-2.0
"""Decode: one request's attempt to get its KV, with a part for each rank of prefill that has some of its bytes.

    part     connecting ─► moving ─► verifying ─► done
                 │            │          │
                 └────────────┴──────────┴──► stopping ─► idle         (done is idle, too)

    attempt  waiting ─► received     every part is done
             waiting ─► failed       a part has failed, or the attempt was withdrawn; reported at once
                        ─► finished  no part has anything in flight: only now are the blocks free (rules R2, R9)

The two kinds of parts differ in who moves the bytes and in what is verified. `ReadPart` reads the bytes, then the
ownership token. `write_part.WritePart` registers blocks, and counts the WRITEs that arrive. Owned by the transfer
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.messages import KernelBlockRange, Peer, Reading, Release, encode
from kvcached_nixl.wire.planes import GroupMemory, named_planes
from kvcached_nixl.wire.step import FetchSpec, UnneededOffer
from kvcached_nixl.wire.timeline import State, Timeline
from kvcached_nixl.worker.transfer import topology
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.peers import contained
from kvcached_nixl.worker.transfer.staging import StagingWindow
from kvcached_nixl.worker.transfer.topology import ConnectedPeer, kernel_blocks_of
from kvcached_nixl.worker.transfer.transfer_queue import TransferJob, TransferTally


class Part:
    """What one rank of prefill contributes to an attempt.

    Attributes:
        agent: the agent that was told of the blocks, or is read; None before that.
        known: the rank, once it is connected.
        is_abandoned: another engine answers at the rank's address, so the agent can no longer be asked to stop.
    """

    def __init__(self, context: WorkerContext, attempt: Attempt, address: Peer) -> None:
        self._context = context
        self._attempt = attempt
        self.address = address
        self.agent: str | None = None
        self.known: ConnectedPeer | None = None
        self.is_abandoned = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is in flight, and nothing will be."""
        raise NotImplementedError

    def begin(self, *, is_doubted: bool = False) -> None:
        """Connect to the rank. ``is_doubted``: with a new handshake."""
        self._reached(State.DECODE_HANDSHAKE)
        manifest = self._attempt.spec.manifest
        incarnation = "" if manifest is None else manifest.incarnation

        def met(known: ConnectedPeer) -> None:
            misfit = self._context.misfit_of(known)
            if misfit is not None and not is_doubted:
                # This may be an old handshake, and weights may have been updated since: repeat it once.
                self.begin(is_doubted=True)
            elif (reason := misfit or self._context.distrust_of(self.address, known.incarnation)) is not None:
                self._attempt.fail(reason)
            else:
                self._connected(known)

        self._context.peers.need(self.address, incarnation, met, self._attempt.fail, is_doubted=is_doubted)

    def _connected(self, known: ConnectedPeer) -> None:
        raise NotImplementedError

    def _reached(self, state: State) -> None:
        self._attempt.reached(self, state)

    def stop(self) -> None:
        """Move nothing more; ``is_idle`` becomes true when nothing is in flight. A repeated call repeats the request to
        the peer."""
        raise NotImplementedError

    # The rest matters only where the rank WRITEs.

    def finish(self) -> None:
        """The attempt is finished."""

    @property
    def may_write(self) -> bool:
        """Whether the agent was told of blocks and may still write them."""
        return False

    @property
    def is_dead(self) -> bool:
        """Whether the agent is a process on this host that has ended, or has stopped after a WRITE failed."""
        return False

    def fence(self) -> bool:
        """The agent does not answer; `end_without` is called once it can no longer write. Returns whether it can be
        fenced: it writes through a gate, and only over a network."""
        return False

    def end_without(self, what: str) -> None:
        """The agent cannot write any more. ``what``: why not, as in "is dead"."""

    def cut_off(self) -> None:
        """The part has taken too long: its gate is about to be closed."""


class Attempt:
    """See the module. ``changed``: called whenever the attempt may have failed or finished.

    Attributes:
        blocks: per KV-cache group, the kernel blocks to fill.
        failed: why it failed; None as long as it has not.
        failed_at_seconds: when that was reported, and its writers were asked to stop.
        unneeded: to be told to prefill when nothing of it is in flight any more.
        staging_window: the slots its KV arrives in; None until a rank of prefill is to be told of them.
        tally: of its READs.
        timeline: its state is that of the part that is furthest behind.
    """

    def __init__(
        self, spec: FetchSpec, blocks: tuple[KernelBlockRange, ...], clock: Clock, changed: Callable[[Attempt], None]
    ) -> None:
        self.spec, self.number = spec, spec.attempt
        self.blocks = blocks
        self.parts: list[Part] = []
        self.failed: HandOverFailed | None = None
        self.failed_at_seconds: float | None = None
        self.unneeded: UnneededOffer | None = None
        self.staging_window: StagingWindow | None = None
        self.timeline = Timeline()
        self.timeline.enter(State.DECODE_ALLOCATED, clock.now_seconds())
        self.tally = TransferTally()
        self._clock = clock
        self._states: dict[Peer, State] = {}
        self._changed = changed

    def lacks_layers(self, groups: Sequence[GroupMemory]) -> bool:
        """Whether the pipeline stages of prefill do not have all layers of this rank together, so that the KV of some
        was not moved. ``groups``: this rank's."""
        if self.spec.prefill.pp_size == 1:
            return False
        ours, of_ranks = named_planes(groups), dict[int, set[tuple[int, int, int]]]()
        for part in self.parts:
            planes = of_ranks.setdefault(part.address.tp_rank, set())
            planes |= named_planes(part.known.rank.groups) if part.known is not None else set()
        return any(planes != ours for planes in of_ranks.values())

    def reached(self, part: Part, state: State) -> None:
        self._states[part.address] = state
        behind = min(self._states.get(one.address, State.DECODE_ALLOCATED) for one in self.parts)
        self.timeline.enter(behind, self._clock.now_seconds())

    def fail(self, cause: HandOverFailed) -> None:
        """Fail the attempt and stop its parts. Only the first failure is kept."""
        if self.failed is None:
            self.failed = cause
            for part in self.parts:
                if not part.is_idle:
                    part.stop()
        self.settle()

    def settle(self) -> None:
        """Something of the attempt has ended."""
        self._changed(self)


class ReadPart(Part):
    """Reads the blocks that one rank of prefill keeps, then the ownership token, which shows that they were still kept.
    The attempt's specification has a manifest. ``instead``: called to replace this part by a `WritePart`: with False
    where blocks cannot be read because prefill stages, with True where prefill has to send checksums of what was read.
    """

    def __init__(
        self,
        context: WorkerContext,
        attempt: Attempt,
        address: Peer,
        instead: Callable[[Attempt, ReadPart, bool], None],
    ) -> None:
        super().__init__(context, attempt, address)
        assert attempt.spec.manifest is not None
        self._manifest = attempt.spec.manifest
        self._instead = instead
        self._is_idle = False
        self._job: TransferJob | None = None
        self._buffer: int | None = None

    @property
    def is_idle(self) -> bool:
        return self._is_idle

    def stop(self) -> None:
        if self._job is None:
            self._is_idle = True
        else:
            self._context.transfer_queue.drop(self._job)

    def _connected(self, known: ConnectedPeer) -> None:
        context, attempt, manifest, memory = self._context, self._attempt, self._manifest, known.rank.groups
        if attempt.failed is not None:
            return
        if known.rank.is_staged:
            self._instead(attempt, self, False)
            return
        self.known, self.agent = known, known.agent
        try:
            if manifest.block_sizes != tuple(one.block_size for one in memory) or len(manifest.groups) != len(memory):
                raise ValueError("the manifest does not fit the handshake (block sizes or groups)")
            theirs = kernel_blocks_of(manifest.groups, memory)
            groups = [(here, there, here.first_token) for here, there in zip(attempt.blocks, theirs, strict=True)]
            found = topology.ranges(known.routes(context.local, is_prefill=False), groups, attempt.spec.end_token)
        except ValueError as error:
            attempt.fail(HandOverFailed(FailureCause.RANGE, str(error)))
            return
        context.peers.send(self.address, encode(Reading(manifest.request_id, context.local.tp_rank)))
        ended = contained(attempt.fail)(self._read)
        self._job = TransferJob("READ", known.agent, found.local, found.remote, ended, tally=attempt.tally)
        self._reached(State.DECODE_MOVING)
        context.transfer_queue.submit(self._job)

    def _read(self, failed: str) -> None:
        self._job = None
        self._is_idle = bool(failed) or self._attempt.failed is not None
        if failed:
            self._attempt.fail(HandOverFailed(FailureCause.LOST, failed))
        elif self._is_idle:
            self._attempt.settle()
        else:
            self._look()

    def _look(self) -> None:
        context, known = self._context, self.known
        assert known is not None
        if self._attempt.failed is not None:
            return
        self._reached(State.DECODE_VERIFYING)
        self._buffer = context.token_buffers.take(self._look)
        if self._buffer is None:
            return
        table, token = known.rank.token_table_address, self._manifest.ownership_token
        bucket = context.token_buffers.ranges(self._buffer, table, token)
        self._job = TransferJob("READ", known.agent, *bucket, contained(self._attempt.fail)(self._looked), is_host=True)
        context.transfer_queue.submit(self._job, is_urgent=True)

    def _looked(self, failed: str) -> None:
        context, known, buffer, attempt = self._context, self.known, self._buffer, self._attempt
        assert known is not None and buffer is not None
        # Before anything below can fail or stop the part: nothing is in flight any more.
        self._job, self._buffer, self._is_idle = None, None, True
        is_kept = not failed and context.token_buffers.holds(buffer, self._manifest.ownership_token)
        context.token_buffers.give_back(buffer)
        if attempt.failed is not None:
            attempt.settle()
        elif failed:
            attempt.fail(HandOverFailed(FailureCause.LOST, failed))
        elif not is_kept:
            kept = f"prefill does not keep the KV of {self._manifest.request_id} any more"
            attempt.fail(HandOverFailed(FailureCause.LEASE, f"{kept}, or never made these parameters"))
        elif (doubt := context.distrust_of(self.address, known.incarnation)) is not None:
            # Another hand-over from this engine has failed its checksum meanwhile.
            attempt.fail(doubt)
        elif context.checksums.are_compared(attempt.number):
            self._instead(attempt, self, True)
        else:
            local = context.local
            done = Release(self._manifest.request_id, "", self._manifest.digest, local.tp_rank, local.tp_size)
            context.peers.send(self.address, encode(done))
            attempt.settle()
