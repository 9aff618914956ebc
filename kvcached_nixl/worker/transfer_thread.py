# SPDX-License-Identifier: Apache-2.0
"""The transfer thread: all hand-over work that uses the NIXL agent runs on it. One per worker.

    first         selects its device: `transport.agent.select_device`
    owns          the transport (notifications, READs, WRITEs), the state of both roles, peers, leases; and write gates,
                  which a background thread opens and closes, except for the first one
    inbox         `TransferThread.submit`: commands of the engine's thread, in order; handshakes that have ended
    wakes on      both; the next deadline; and, because NIXL has no event for an arrival or an end, after POLL_SECONDS
                  while something is in flight or awaited, COMPUTING_POLL_SECONDS while the engine's thread computes
                  meanwhile and nothing is left to post, IDLE_POLL_SECONDS while nothing is awaited, to hear peers that
                  send first
    may block on  that wait, and nothing else: handshakes run on another thread, so one peer never delays another, and
                  the end of a step on the device is polled, not waited for
    wakes         its own engine, which sleeps until something has ended
    stops when    `close` is called; transfers in flight are then waited for up to CLOSE_SECONDS
    drops         messages that match nothing, counted in `WorkerContext.dropped`; nothing else

An exception in the handling of one message or one command fails what that belongs to, and is counted. One that may have
left prefill's blocks without an owner stops the thread, and is raised on the engine's thread at its next call:
hand-overs never continue with half of the state updated.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.agent import Transport, TransportError, WriteGate
from kvcached_nixl.wire import messages, step
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.handshake import Weights
from kvcached_nixl.wire.messages import Message, Peer, is_heartbeat, read_heartbeat
from kvcached_nixl.wire.step import FetchSpec, Finish, OfferUpdate, Report, StepCommand, WakeAddress
from kvcached_nixl.worker.decode.receiver import Receiver
from kvcached_nixl.worker.prefill.registry import OfferRegistry
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.peers import contained

logger = logging.getLogger(SERVER_LOGGER)

POLL_SECONDS = 0.0005
COMPUTING_POLL_SECONDS = 0.01
"""Each poll takes the interpreter's lock from the engine's thread: polled every millisecond, prefill computed up to
45 % slower. While there is more to post, most of a turn is spent in NIXL, without that lock."""
IDLE_POLL_SECONDS = 0.1
_LONGER_BY = 0.01
"""The polling interval as a share of the time since the thread last had work. At most COMPUTING_POLL_SECONDS: a peer's
wait may have begun only now, and an offer may be revoked before its reader is heard."""
CLOSE_SECONDS = 5.0
STANDING_SECONDS = 120.0
"""An engine that has taken no step for so long, or was paused or stood still for want of memory, sends no heartbeats:
its peers need not wait for it, nor keep memory for it."""

IsReached: TypeAlias = Callable[[], bool]
"""Returns whether the device has finished every step that was submitted before. May be called on any thread."""


@dataclass(frozen=True)
class LocalIdentity:
    """This rank's address for peers, the one under which it wakes its engine, and the engine's incarnation. Sent again
    when one of them changes."""

    own: Peer
    wake_address: WakeAddress
    incarnation: str


@dataclass(frozen=True)
class NewWeights:
    """The weights that this rank computes with from now on. ``names``: of their tensors, as in `Weights.misfit`."""

    weights: Weights
    names: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class BlocksWritable:
    """Decode: no work queued on the device writes these attempts' blocks."""

    attempts: tuple[int, ...]


@dataclass(frozen=True)
class Reached:
    """A command that counts once the device has finished what was submitted before it (rule R8): then the tokens of an
    offer are in its blocks. A `Finish` waits for the offers before it."""

    command: OfferUpdate | Finish | BlocksWritable
    is_reached: IsReached = lambda: True


Command: TypeAlias = StepCommand | LocalIdentity | NewWeights | Reached


class TransferThread:
    """The engine's thread submits commands and takes outcomes; everything else runs on the transfer thread.
    ``engine_computes``: set by the engine's thread while it submits a step to the device."""

    def __init__(
        self, context: WorkerContext, receiver: Receiver, registry: OfferRegistry, select_device: Callable[[], None]
    ) -> None:
        self._context = context
        self._clock: Clock = context.clock
        self._receiver = receiver
        self._registry = registry
        self._outcomes = context.outcomes
        self._select_device = select_device
        self._is_ready = threading.Event()
        self.engine_computes = False
        self._inbox: deque[Command] = deque()
        self._wake = context.wake
        self._closing = threading.Event()
        self._defect: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._moved_at_seconds = context.clock.now_seconds()
        # All below is used by the transfer thread only; first what it does with each kind of command and message.
        self._commands: Mapping[type, Callable[[Any], None]] = MappingProxyType(
            {
                LocalIdentity: self._identify,
                NewWeights: self._identify,
                step.Revoke: self._revoke,
                step.LeaseRenewal: receiver.renewals.want,
                FetchSpec: receiver.fetch,
                BlocksWritable: lambda one: receiver.begin(*one.attempts),
                OfferUpdate: registry.offer,
                step.AwaitClaim: lambda one: registry.await_claim(one.request_id, one.number),
                step.Withdraw: lambda one: receiver.fail(one.attempt, HandOverFailed(FailureCause.STOPPED, one.reason)),
                step.UnneededOffer: receiver.release,
                step.Preempt: self._end,
                Finish: lambda one: registry.finish(one.request_id),
                step.Stop: self._end,
            }
        )
        writer = registry.writer
        self._messages: Mapping[type, Callable[[str, Any], None]] = MappingProxyType(
            {
                list: self._take_heartbeat,
                messages.Registration: writer.register,
                messages.StagingGrant: writer.take_grant,
                messages.Withdrawal: writer.withdraw,
                messages.Reading: lambda _, one: registry.read(one),
                messages.Release: lambda _, one: registry.release(one),
                messages.StagingRequest: receiver.handle,
                messages.Written: receiver.handle,
                messages.Stopped: receiver.handle,
            }
        )
        self._wake_address: WakeAddress | None = None
        # Commands that wait for the device, in order.
        self._computing: deque[Reached] = deque()
        # When the thread last had work.
        self._busy_seconds = 0.0

    # ---------------------------------------------------------------------------------------------- the engine's thread

    def start(self) -> None:
        """Start the thread, and wait until it has selected its device. Raises `RuntimeError`: that cannot be used."""
        self._thread = threading.Thread(target=self._run, name="kvcached-nixl-transfer", daemon=True)
        self._thread.start()
        # vLLM captures graphs next, and another thread's first use of the device would spoil the capture.
        self._is_ready.wait()
        self._raise_defect()

    def submit(self, *commands: Command) -> None:
        """Queue commands for the transfer thread. Returns at once. Raises `RuntimeError`: an internal error has stopped
        that thread."""
        self._raise_defect()
        if commands:
            self._inbox.extend(commands)
            self._wake.set()

    def engine_moves(self) -> None:
        self._moved_at_seconds = self._clock.now_seconds()

    def take_outcome(self) -> tuple[set[str], Report]:
        """As `OutcomeQueue.take`. Raises `RuntimeError` as `submit`."""
        self._raise_defect()
        return self._outcomes.take()

    def close(self) -> None:
        """Stop this thread, once all transfers have ended or CLOSE_SECONDS have passed; then all others."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * CLOSE_SECONDS)
        if self._context.staging is not None:
            self._context.staging.copier.close()
        self._context.checksums.background.close(is_dropping=True)
        self._receiver.gates.close()
        self._context.channel.close()

    def _raise_defect(self) -> None:
        if self._defect is not None:
            raise RuntimeError(f"the transfer thread has stopped: {self._defect!r}") from self._defect

    # ---------------------------------------------------------------------------------------------- the transfer thread

    def _run(self) -> None:
        try:
            self._select_device()
            self._is_ready.set()
            while not self._closing.is_set():
                self._wake.wait(self.turn())
                self._wake.clear()
            # Revokes the ownership tokens and tells waiting peers at once, instead of at their deadlines.
            self._registry.close("prefill is shutting down")
            until = self._clock.now_seconds() + CLOSE_SECONDS
            while len(self._context.transfer_queue) and self._clock.now_seconds() < until:
                self._wake.wait(min(POLL_SECONDS, self.turn()))
                self._wake.clear()
        except BaseException as defect:  # kept for the engine's thread, which raises it
            self._defect = defect
            self._is_ready.set()
            logger.exception("The transfer thread has stopped; the engine stops at its next step")
            self._wake_own()

    def turn(self) -> float:
        """Do everything that can be done without waiting; returns the seconds until the next call is due."""
        context, is_busy = self._context, bool(self._inbox)
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, (Reached, Finish)):
                self._computing.append(Reached(command) if isinstance(command, Finish) else command)
            else:
                self._apply(command)
        # In order: a request's `Finish` is never handled before its steps.
        while self._computing and self._computing[0].is_reached():
            self._apply(self._computing.popleft().command)
        is_busy |= self._hear()
        context.peers.turn()
        if context.staging is not None:
            context.staging.turn()
        context.checksums.background.turn()
        context.transfer_queue.turn()
        is_engine_alive = self._clock.now_seconds() < self._moved_at_seconds + STANDING_SECONDS
        deadlines = [self._registry.turn(is_engine_alive=is_engine_alive), self._receiver.turn()]
        if is_engine_alive:
            deadlines.append(self._receiver.send_heartbeats())
        if context.staging is not None:
            self._outcomes.slab(context.staging.use, context.staging.num_waits)
        if self._outcomes.take_news():
            self._wake_own()
        return self._wait_seconds(is_busy, deadlines)

    def _wait_seconds(self, is_busy: bool, deadlines: Sequence[float | None]) -> float:
        now, queue, registry = self._clock.now_seconds(), self._context.transfer_queue, self._registry
        is_moving = bool(queue.is_busy or self._computing)
        if is_busy or is_moving:
            self._busy_seconds = now
        if not (is_moving or self._receiver.is_awaiting or registry.is_awaiting):
            longest = COMPUTING_POLL_SECONDS if len(registry) else IDLE_POLL_SECONDS
            return max(0.0, min([longest, *(deadline - now for deadline in deadlines if deadline is not None)]))
        if self.engine_computes and not registry.writer.num_final:
            poll_seconds = POLL_SECONDS if queue.is_moving else COMPUTING_POLL_SECONDS
        elif queue.has_more:
            poll_seconds = 0.0
        else:
            poll_seconds = POLL_SECONDS if len(queue) else 2 * POLL_SECONDS
        return max(poll_seconds, min((now - self._busy_seconds) * _LONGER_BY, COMPUTING_POLL_SECONDS))

    def _wake_own(self) -> None:
        address = self._wake_address
        if address is not None:
            self._context.channel.wake(address.host, address.port, address.key)

    # --------------------------------------------------------------------------------------------------------- commands

    def _apply(self, command: StepCommand | LocalIdentity | NewWeights | BlocksWritable) -> None:
        """Handle a command. An exception fails the attempts that it is of."""
        handle = self._commands[type(command)]
        if isinstance(command, BlocksWritable):
            attempts = command.attempts
        elif isinstance(command, (FetchSpec, step.Withdraw)):
            attempts = (command.attempt,)
        elif isinstance(command, (LocalIdentity, step.LeaseRenewal, step.UnneededOffer)):
            attempts = ()
        else:
            # Not contained: the scheduler must hear when prefill's blocks are free, and half of the state is updated.
            handle(command)
            return

        def fail(failure: HandOverFailed) -> None:
            self._count_defect(failure)
            for attempt in attempts:
                self._receiver.fail(attempt, failure)

        with contained(fail):
            handle(command)

    def _identify(self, command: LocalIdentity | NewWeights) -> None:
        context = self._context
        if isinstance(command, NewWeights):
            context.weights, context.weight_names = command.weights, command.names
            return
        self._wake_address, context.own, context.incarnation = command.wake_address, command.own, command.incarnation
        self._registry.writer.started(command.incarnation)

    def _revoke(self, command: step.Revoke) -> None:
        # Who has begun to read meanwhile may not be overtaken.
        self._hear()
        if self._registry.outlasts(command.request_id, command.revocation):
            self._outcomes.spared(command.revocation.number)
            return
        # It keeps its `Finish`: it ends by itself.
        self._forget_computing(command.request_id, OfferUpdate)
        self._registry.revoke(command.request_id, command.revocation)

    def _end(self, command: step.Preempt | step.Stop) -> None:
        self._forget_computing(command.request_id, OfferUpdate, Finish)
        if isinstance(command, step.Preempt):
            self._registry.preempt(command.request_id, command.hold)
        else:
            self._registry.stop(command.request_id, command.reason, is_kept=command.is_kept)

    def _forget_computing(self, request_id: PrefillRequestId, *kinds: type[OfferUpdate | Finish]) -> None:
        """Drop what still waits for the device of a request."""
        waiting = self._computing
        self._computing = deque(
            one for one in waiting if not isinstance(one.command, kinds) or one.command.request_id != request_id
        )

    # --------------------------------------------------------------------------------------------------------- messages

    def _hear(self) -> bool:
        """Handle what peers have sent. Returns whether they have sent anything."""
        has_heard = False
        listening: list[Transport | WriteGate] = [self._context.transport, *self._receiver.gates]
        for one in listening:
            try:
                heard = one.received()
            except TransportError as error:
                logger.warning("%s", error)
                continue
            has_heard |= bool(heard)
            for agent, notification in heard:
                self._read(agent, notification)
        return has_heard

    def _read(self, agent: str, notification: bytes) -> None:
        dropped = self._context.dropped
        try:
            message = read_heartbeat(notification) if is_heartbeat(notification) else messages.decode(notification)
        except Malformed as error:
            if not dropped["malformed"]:
                logger.warning(
                    "Dropping a malformed notification from %s; later ones are only counted: %s", agent, error
                )
            dropped["malformed"] += 1
            return
        # Twice: nothing that a peer sends stops the engine, not even where its hand-over cannot be failed.
        with contained(self._count_defect), contained(partial(self._fail_message, agent, message)):
            self._messages[type(message)](agent, message)

    def _fail_message(self, agent: str, message: Message | list[str], failure: HandOverFailed) -> None:
        self._count_defect(failure)
        if isinstance(message, (messages.StagingRequest, messages.Written, messages.Stopped)):
            self._receiver.fail(message.attempt, failure)
        elif isinstance(message, (messages.Registration, messages.StagingGrant)):
            self._registry.writer.fail((agent, message.attempt), failure)

    def _take_heartbeat(self, agent: str, names: list[str]) -> None:
        self._registry.renew(agent, names)
        self._receiver.renew(agent, names)

    def _count_defect(self, _: HandOverFailed) -> None:
        self._context.dropped["defect"] += 1
