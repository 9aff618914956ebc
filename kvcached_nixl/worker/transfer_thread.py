# SPDX-License-Identifier: Apache-2.0
"""The transfer thread: all hand-over work that uses the NIXL agent runs on it. One per worker.

    first         selects its device: `kvcached_nixl.current_device`
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
    drops         messages that match nothing, counted in `TransferThread.dropped`; nothing else

An exception in the handling of one message, one command or one transfer fails what that belongs to, and is counted.
Any other exception stops the thread and is raised on the engine's thread at its next call: hand-overs never continue
with half of the state updated.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.base import Transport, TransportError, WriteGate
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.lease import heartbeats, is_heartbeat, read_heartbeat
from kvcached_nixl.wire.messages import (
    Message,
    Reading,
    Registration,
    Release,
    StagingGrant,
    StagingRequest,
    Stopped,
    Withdrawal,
    Written,
    decode,
)
from kvcached_nixl.wire.step import (
    AwaitClaim,
    EndRenewal,
    FetchSpec,
    Finish,
    LeaseRenewal,
    OfferUpdate,
    Preempt,
    Revoke,
    Stop,
    UnneededOffer,
    WakeAddress,
    Withdraw,
)
from kvcached_nixl.worker.decode.receiver import Receiver
from kvcached_nixl.worker.prefill.registry import OfferRegistry
from kvcached_nixl.worker.thread_messages import (
    BlocksWritable,
    Command,
    LocalIdentity,
    NewWeights,
    Outcome,
    OutcomeQueue,
    Reached,
)
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.lease import Renewals
from kvcached_nixl.worker.transfer.topology import contributors, peers_of

__all__ = ["TransferThread"]

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


class TransferThread:
    """The engine's thread submits commands and takes outcomes; everything else runs on the transfer thread.

    Args:
        outcomes: where ``receiver`` and ``registry`` report what has ended.
        wake: set by any thread to wake the transfer thread.
        wake_engine: called by the transfer thread when something has ended; does not block.
        closed: called when the thread has stopped.
        select_device: called by the transfer thread before anything else.

    Attributes:
        engine_computes: set by the engine's thread while it submits a step to the device.
    """

    def __init__(
        self,
        context: WorkerContext,
        receiver: Receiver,
        registry: OfferRegistry,
        outcomes: OutcomeQueue,
        wake: threading.Event,
        wake_engine: Callable[[WakeAddress], None],
        closed: Callable[[], None],
        select_device: Callable[[], None],
    ) -> None:
        self._context = context
        self._transport: Transport = context.transport
        self._clock: Clock = context.clock
        self._receiver = receiver
        self._registry = registry
        self._outcomes = outcomes
        self._wake_engine = wake_engine
        self._closed = closed
        self._select_device = select_device
        self._is_ready = threading.Event()
        self.engine_computes = False
        self._inbox: deque[Command] = deque()
        self._wake = wake
        self._closing = threading.Event()
        self._defect: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._moved_at_seconds = context.clock.now_seconds()
        # Everything below is used by the transfer thread only.
        self._wake_address: WakeAddress | None = None
        self._renewals = Renewals(context.clock)
        self._computing: deque[Reached] = deque()
        self._malformed = 0
        self._defects = 0
        # When the thread last had work.
        self._busy_seconds = 0.0

    @property
    def dropped(self) -> Counter[str]:
        mine = Counter(malformed=self._malformed, defect=self._defects)
        return self._registry.registrations.dropped + self._receiver.dropped + self._context.peers.dropped + mine

    # ---------------------------------------------------------------------------------------------- the engine's thread

    def start(self) -> None:
        """Start the thread, and wait until it has selected its device.

        Raises:
            RuntimeError: the device cannot be used.
        """
        self._thread = threading.Thread(target=self._run, name="kvcached-nixl-transfer", daemon=True)
        self._thread.start()
        # vLLM captures graphs next, and another thread's first use of the device would spoil the capture.
        self._is_ready.wait()
        self._raise_defect()

    def submit(self, *commands: Command) -> None:
        """Queue commands for the transfer thread. Returns at once.

        Raises:
            RuntimeError: an internal error has stopped the transfer thread.
        """
        self._raise_defect()
        self._inbox.extend(commands)
        self._wake.set()

    def engine_moves(self) -> None:
        """The engine takes a step, and does not stand still."""
        self._moved_at_seconds = self._clock.now_seconds()

    def take_outcome(self) -> Outcome:
        """Returns what has ended since the last call.

        Raises:
            RuntimeError: an internal error has stopped the transfer thread.
        """
        self._raise_defect()
        return self._outcomes.take()

    def close(self) -> None:
        """Stop the thread, once all transfers have ended or CLOSE_SECONDS have passed."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * CLOSE_SECONDS)
        self._closed()

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
        is_busy = bool(self._inbox)
        while self._inbox:
            command = self._inbox.popleft()
            self._take(command, _COMMANDS)
        self._take_reached()
        is_busy |= self._hear()
        self._context.peers.turn()
        if self._context.staging is not None:
            self._context.staging.turn()
        self._context.checksums.turn()
        self._context.transfer_queue.turn()
        is_engine_alive = self._clock.now_seconds() < self._moved_at_seconds + STANDING_SECONDS
        deadlines = [self._registry.turn(is_engine_alive=is_engine_alive), self._receiver.turn()]
        if is_engine_alive:
            deadlines.append(self._renew())
        if self._context.staging is not None:
            self._outcomes.slab(self._context.staging.use, self._context.staging.num_waits)
        if self._outcomes.take_news():
            self._wake_own()
        now = self._clock.now_seconds()
        is_moving = bool(self._context.transfer_queue.is_busy or self._computing)
        if is_busy or is_moving:
            self._busy_seconds = now
        later_seconds = min((now - self._busy_seconds) * _LONGER_BY, COMPUTING_POLL_SECONDS)
        if is_moving or self._receiver.is_awaiting or self._registry.is_awaiting:
            return max(self._poll_seconds(), later_seconds)
        longest = COMPUTING_POLL_SECONDS if len(self._registry) else IDLE_POLL_SECONDS
        return max(0.0, min([longest, *(deadline - now for deadline in deadlines if deadline is not None)]))

    def _poll_seconds(self) -> float:
        queue = self._context.transfer_queue
        if self.engine_computes and not self._registry.is_delivering:
            return POLL_SECONDS if queue.is_moving else COMPUTING_POLL_SECONDS
        if queue.has_more:
            return 0.0
        return POLL_SECONDS if len(queue) else 2 * POLL_SECONDS

    def _wake_own(self) -> None:
        if self._wake_address is not None:
            self._wake_engine(self._wake_address)

    def _identify(self, command: LocalIdentity) -> None:
        self._wake_address, self._context.own = command.wake_address, command.own
        self._context.incarnation = command.incarnation
        self._registry.registrations.started(command.incarnation)

    def _change_weights(self, command: NewWeights) -> None:
        self._context.weights, self._context.weight_names = command.weights, command.names

    def _revoke(self, command: Revoke) -> None:
        # Who has begun to read meanwhile may not be overtaken.
        self._hear()
        if self._registry.outlasts(command.request_id, command.revocation):
            self._outcomes.spared(command.revocation.number)
            return
        # It keeps its `Finish`: it ends by itself.
        self._forget_computing(command.request_id, OfferUpdate)
        self._registry.revoke(command.request_id, command.revocation)

    def _preempt(self, command: Preempt) -> None:
        self._forget_computing(command.request_id, OfferUpdate, Finish)
        self._registry.preempt(command.request_id, command.hold)

    def _stop(self, command: Stop) -> None:
        self._forget_computing(command.request_id, OfferUpdate, Finish)
        self._registry.stop(command.request_id, command.reason, is_kept=command.is_kept)

    def _forget_computing(self, request_id: PrefillRequestId, *kinds: type[OfferUpdate | Finish]) -> None:
        """Drop what still waits for the device of a request."""
        self._computing = deque(
            one for one in self._computing if not isinstance(one.command, kinds) or one.command.request_id != request_id
        )

    def _take_reached(self) -> None:
        """Handle, in order, what the device has finished: a request's `Finish` is never handled before its steps."""
        while self._computing and self._computing[0].is_reached():
            self._take(self._computing.popleft().command, _REACHED)

    def _hear(self) -> bool:
        """Handle what peers have sent. Returns whether they have sent anything."""
        has_heard = False
        listening: list[Transport | WriteGate] = [self._transport, *self._receiver.gates]
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
        try:
            message = read_heartbeat(notification) if is_heartbeat(notification) else decode(notification)
        except Malformed as error:
            if not self._malformed:
                logger.warning(
                    "Dropping a malformed notification from %s; later ones are only counted: %s", agent, error
                )
            self._malformed += 1
            return
        with self._contained(lambda failure: self._fail_message(agent, message, failure)):
            _MESSAGES[type(message)](self, agent, message)

    def _fail_message(self, agent: str, message: Message | list[str], failure: HandOverFailed) -> None:
        if isinstance(message, (StagingRequest, Written, Stopped)):
            self._receiver.fail(message.attempt, failure)
        elif isinstance(message, (Registration, StagingGrant)):
            self._registry.registrations.fail((agent, message.attempt), str(failure))

    def _take_heartbeat(self, agent: str, names: list[str]) -> None:
        self._registry.renew(names)
        self._receiver.renew(agent, names)

    def _renew(self) -> float | None:
        """Send the heartbeats that are due; returns when the next one is, in the clock's seconds."""
        local = self._context.local
        for prefill, names in self._renewals.take_due().items():
            # Sizes that do not divide are reported as a failure when the request gets its blocks.
            try:
                ranks = contributors(prefill, tp_rank=local.tp_rank, tp_size=local.tp_size, kv_shares=local.kv_shares)
            except ValueError:
                continue
            for address in peers_of(prefill, (*ranks[0], *ranks[1])):
                for beat in heartbeats(names):
                    self._context.peers.send(address, beat)
        return self._renewals.first_seconds

    def _take(self, command: Command | BlocksWritable, rules: Mapping[type, _Rule]) -> None:
        rule = rules[type(command)]
        fails = rule.fails
        with self._contained(None if fails is None else lambda failure: self._fail(fails(command), failure)):
            rule.apply(self, command)

    def _fail(self, attempts: Sequence[int], failure: HandOverFailed) -> None:
        for attempt in attempts:
            self._receiver.fail(attempt, failure)

    @contextlib.contextmanager
    def _contained(self, fail: Callable[[HandOverFailed], None] | None) -> Iterator[None]:
        """Log and count an exception, and call ``fail`` with it; raise it again without."""
        try:
            yield
        except Exception as defect:
            self._defects += 1
            logger.exception("internal error in kvcached_nixl; this hand-over fails")
            if fail is None:
                raise
            fail(HandOverFailed(FailureCause.DEFECT, f"{type(defect).__name__}: {defect}"))


class _Rule(NamedTuple):
    """What the transfer thread does with a command.

    Attributes:
        fails: the attempts that an exception fails. None: it stops the engine, because the scheduler must hear when
            prefill's blocks are free, and half of the state is updated.
    """

    apply: Callable[[TransferThread, Any], None]
    fails: Callable[[Any], Sequence[int]] | None = None


def _nobody(_: object) -> Sequence[int]:
    return ()


def _begin(thread: TransferThread, command: BlocksWritable) -> None:
    for attempt in command.attempts:
        thread._receiver.begin(attempt)


def _withdraw(thread: TransferThread, command: Withdraw) -> None:
    thread._receiver.fail(command.attempt, HandOverFailed(FailureCause.STOPPED, command.reason))


_COMMANDS: Mapping[type[Command], _Rule] = {
    LocalIdentity: _Rule(TransferThread._identify, _nobody),
    NewWeights: _Rule(TransferThread._change_weights),
    Revoke: _Rule(TransferThread._revoke),
    LeaseRenewal: _Rule(lambda thread, one: thread._renewals.begin(one), _nobody),
    EndRenewal: _Rule(lambda thread, one: thread._renewals.end(one.request_id), _nobody),
    FetchSpec: _Rule(lambda thread, one: thread._receiver.fetch(one), lambda one: (one.attempt,)),
    OfferUpdate: _Rule(lambda thread, one: thread._registry.offer(one)),
    AwaitClaim: _Rule(lambda thread, one: thread._registry.await_claim(one.request_id, one.number)),
    Withdraw: _Rule(_withdraw, lambda one: (one.attempt,)),
    UnneededOffer: _Rule(lambda thread, one: thread._receiver.release(one), _nobody),
    Preempt: _Rule(TransferThread._preempt),
    Finish: _Rule(lambda thread, one: thread._computing.append(Reached(one))),
    Stop: _Rule(TransferThread._stop),
    Reached: _Rule(lambda thread, one: thread._computing.append(one)),
}

_REACHED: Mapping[type, _Rule] = {
    OfferUpdate: _COMMANDS[OfferUpdate],
    Finish: _Rule(lambda thread, one: thread._registry.finish(one.request_id)),
    BlocksWritable: _Rule(_begin, lambda one: one.attempts),
}
"""Of a `Reached` that the device has reached."""

_MESSAGES: Mapping[type[Message | list[str]], Callable[[TransferThread, str, Any], None]] = {
    list: TransferThread._take_heartbeat,
    Registration: lambda thread, agent, one: thread._registry.registrations.register(agent, one),
    StagingGrant: lambda thread, agent, one: thread._registry.registrations.take_grant(agent, one),
    Withdrawal: lambda thread, agent, one: thread._registry.registrations.withdraw(agent, one),
    Reading: lambda thread, _, one: thread._registry.read(one),
    Release: lambda thread, _, one: thread._registry.release(one),
    StagingRequest: lambda thread, agent, one: thread._receiver.handle(agent, one),
    Written: lambda thread, agent, one: thread._receiver.handle(agent, one),
    Stopped: lambda thread, agent, one: thread._receiver.handle(agent, one),
}
