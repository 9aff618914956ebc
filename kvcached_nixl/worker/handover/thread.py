# SPDX-License-Identifier: Apache-2.0
"""The transfer thread: everything of a hand-over that touches the NIXL agent happens on it. One per worker.

    begins with   the device that it is to use: `kvcached_nixl.current_device`
    owns          the transport (notifications, READs, WRITEs), both halves of the hand-over, peers, leases; and gates,
                  which are opened and closed elsewhere, but for the first one
    inbox         `TransferThread.submit`: what the engine's thread wants, in order; handshakes that have ended
    wakes on      both; the next deadline; and, because NIXL has no event for what arrives or ends, after POLL_SECONDS
                  while something is in flight or awaited, COMPUTING_POLL_SECONDS while the engine's thread computes
                  meanwhile, IDLE_POLL_SECONDS while nothing is awaited, for peers that speak first
    may block on  that wait, and nothing else: handshakes run elsewhere, so one peer never holds up another, and a
                  step's end on the device is asked for, not waited for
    wakes         its own engine, which sleeps while nothing has ended
    stops when    `close` is called; what is in flight then is waited for up to CLOSE_SECONDS
    drops         messages that fit nothing, counted in `TransferThread.dropped`; nothing else

An exception that belongs to one message, one command or one transfer fails what it belongs to and is counted. Any other
one is kept, and the engine's thread raises it at its next call: a hand-over never goes on half alive.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from kvcached_nixl.clock import Clock
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.base import Transport, TransportError
from kvcached_nixl.wire.causes import Cause, HandOverFailed
from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.lease import beats, is_beat, read_beat
from kvcached_nixl.wire.messages import Ready, Registration, Room, Stopped, Written, decode
from kvcached_nixl.worker.handover.attempt import Side
from kvcached_nixl.worker.handover.commands import (
    Begin,
    Command,
    Finish,
    Identify,
    Known,
    Offer,
    Outcome,
    Preempt,
    Release,
    Renew,
    Revoke,
    Stop,
    Unrenew,
    Want,
    Withdraw,
)
from kvcached_nixl.worker.handover.lease import Renewals
from kvcached_nixl.worker.handover.local import contributors, peers_of
from kvcached_nixl.worker.handover.receiving import Receiving
from kvcached_nixl.worker.handover.reported import Reported
from kvcached_nixl.worker.handover.serving import Serving

__all__ = ["TransferThread"]

logger = logging.getLogger(SERVER_LOGGER)

POLL_SECONDS = 0.0005
COMPUTING_POLL_SECONDS = 0.01
"""Each look takes the interpreter's lock from the engine's thread: looking every millisecond, a prefill computed up to
45 % slower."""
IDLE_POLL_SECONDS = 0.1
CLOSE_SECONDS = 5.0


class TransferThread:
    """Commands in and outcomes out, on the engine's thread; the rest is the transfer thread's.

    Args:
        reported: what ``receiving`` and ``serving`` report to.
        wake_engine: called by the transfer thread when something has ended; does not block.
        closed: called when the thread has stopped.
        select_device: called by the transfer thread before anything else.

    Attributes:
        engine_computes: set by the engine's thread while it gives a step to the device.
    """

    def __init__(
        self,
        side: Side,
        clock: Clock,
        receiving: Receiving,
        serving: Serving,
        reported: Reported,
        wake_engine: Callable[[Known], None],
        closed: Callable[[], None] = lambda: None,
        select_device: Callable[[], None] = lambda: None,
    ) -> None:
        self._side = side
        self._transport: Transport = side.transport
        self._clock = clock
        self._receiving = receiving
        self._serving = serving
        self._reported = reported
        self._wake_engine = wake_engine
        self._closed = closed
        self._select_device = select_device
        self._is_ready = threading.Event()
        self.engine_computes = False
        self._inbox: deque[Command] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._defect: BaseException | None = None
        self._thread: threading.Thread | None = None
        # Below: the transfer thread's own.
        self._known: Known | None = None
        self._renewals = Renewals(clock)
        self._computing: deque[Offer | Finish | Begin] = deque()
        self._malformed = 0
        self._defects = 0

    @property
    def dropped(self) -> Counter[str]:
        mine = Counter(malformed=self._malformed, defect=self._defects)
        return self._serving.dropped + self._receiving.dropped + self._side.peers.dropped + mine

    # ---------------------------------------------------------------------------------------------- the engine's thread

    def start(self) -> None:
        """Start the thread, and wait until it has selected its device.

        Raises:
            RuntimeError: the device cannot be used.
        """
        self._thread = threading.Thread(target=self._run, name="kvcached-nixl-transfer", daemon=True)
        self._thread.start()
        # vLLM captures graphs next, and a device's first use elsewhere would spoil one.
        self._is_ready.wait()
        self._raise_defect()

    def submit(self, *commands: Command) -> None:
        """Hand commands over. Returns at once.

        Raises:
            RuntimeError: the transfer thread has ended by a defect.
        """
        self._raise_defect()
        self._inbox.extend(commands)
        self._wake.set()

    def wake(self) -> None:
        """Something has ended that the thread waits for; from any thread."""
        self._wake.set()

    def take_outcome(self) -> Outcome:
        """What ended since the last call.

        Raises:
            RuntimeError: the transfer thread has ended by a defect.
        """
        self._raise_defect()
        return self._reported.take()

    def close(self) -> None:
        """Stop the thread, after what is in flight has ended or CLOSE_SECONDS have passed."""
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
            # Whoever would read what is here, or waits for it, hears of the end at once.
            self._serving.close("prefill is shut down")
            until = self._clock.now_seconds() + CLOSE_SECONDS
            while len(self._side.posting) and self._clock.now_seconds() < until:
                self._wake.wait(min(POLL_SECONDS, self.turn()))
                self._wake.clear()
        except BaseException as defect:  # kept for the engine's thread, which raises it
            self._defect = defect
            self._is_ready.set()
            logger.exception("The transfer thread has stopped; the engine stops at its next step")
            if self._known is not None:
                self._wake_engine(self._known)

    def turn(self) -> float:
        """Do everything that can be done now, without waiting; returns for how many seconds nothing else is due."""
        while self._inbox:
            command = self._inbox.popleft()
            self._contain(command, self._take, command)
        self._take_reached()
        self._hear()
        self._side.peers.turn()
        if self._side.staging is not None:
            self._side.staging.turn()
        self._side.digests.turn()
        self._side.posting.turn()
        deadlines = [self._serving.turn(), self._receiving.turn(), self._renew()]
        if self._side.gates is not None:
            deadlines.append(self._side.gates.turn())
        if self._reported.take_news() and self._known is not None:
            self._wake_engine(self._known)
        if self._side.posting.is_busy or self._computing or self._receiving.is_awaiting or self._serving.is_awaiting:
            return self._poll_seconds()
        now = self._clock.now_seconds()
        longest = COMPUTING_POLL_SECONDS if len(self._serving) else IDLE_POLL_SECONDS
        return max(0.0, min([longest, *(deadline - now for deadline in deadlines if deadline is not None)]))

    def _poll_seconds(self) -> float:
        if self.engine_computes and not self._serving.is_delivering:
            return COMPUTING_POLL_SECONDS
        if self._side.posting.has_more:
            return 0.0
        return POLL_SECONDS if len(self._side.posting) else 2 * POLL_SECONDS

    def _take(self, command: Command) -> None:
        if isinstance(command, (Want, Withdraw, Release, Renew, Unrenew)):
            self._take_decodes(command)
        elif isinstance(command, Known):
            self._known, self._side.own, self._side.start = command, command.own, command.start
            self._serving.started(command.start)
        elif isinstance(command, Identify):
            self._side.weights = command.weights
        elif isinstance(command, Offer) and not command.ready_tokens:
            # Nothing that the device has to end first.
            self._reach(command)
        elif isinstance(command, (Offer, Finish, Begin)):
            self._computing.append(command)
        else:
            self._take_ends(command)

    def _take_decodes(self, command: Want | Withdraw | Release | Renew | Unrenew) -> None:
        receiving = self._receiving
        if isinstance(command, Want):
            receiving.want(command.wanted)
        elif isinstance(command, Withdraw):
            receiving.fail(command.attempt, HandOverFailed(Cause.STOPPED, command.reason))
        elif isinstance(command, Release):
            receiving.release(command.released)
        elif isinstance(command, Renew):
            one = command.renewed
            self._renewals.begin(one.request_id, one.prefill, one.name, one.lease_seconds, one.longest_seconds)
        else:
            self._renewals.end(command.request_id)

    def _take_ends(self, command: Stop | Revoke | Preempt) -> None:
        # What the device has not finished of it is not needed any more; one that is still computed ends by itself.
        self._computing = deque(
            one
            for one in self._computing
            if isinstance(one, Begin)
            or one.request_id != command.request_id
            or (isinstance(one, Finish) and isinstance(command, Revoke))
        )
        if isinstance(command, Preempt):
            self._serving.preempt(command.request_id, command.hold)
        elif isinstance(command, Revoke):
            self._serving.revoke(command.request_id, command.reason)
        else:
            self._serving.stop(command.request_id, command.reason, is_kept=command.is_kept)

    def _take_reached(self) -> None:
        """In order: a request's end is never seen before its steps."""
        while self._computing:
            head = self._computing[0]
            if not isinstance(head, Finish) and not head.is_reached():
                return
            self._computing.popleft()
            self._contain(head, self._reach, head)

    def _reach(self, reached: Offer | Finish | Begin) -> None:
        if isinstance(reached, Finish):
            self._serving.finish(reached.request_id)
        elif isinstance(reached, Begin):
            for attempt in reached.attempts:
                self._receiving.begin(attempt)
        else:
            one = reached
            self._serving.offer(
                one.request_id,
                one.name,
                one.digest,
                one.num_tokens,
                one.block_ids,
                one.ready_tokens,
                one.manifest,
                is_held=one.is_held,
            )

    def _hear(self) -> None:
        for one in (self._transport, *(self._side.gates or ())):
            try:
                heard = one.received()
            except TransportError as cause:
                logger.warning("%s", cause)
                continue
            for agent, notification in heard:
                self._contain(None, self._take_notification, agent, notification)

    def _take_notification(self, agent: str, notification: bytes) -> None:
        try:
            if is_beat(notification):
                self._serving.renew(read_beat(notification))
                return
            message = decode(notification)
        except Malformed as cause:
            if not self._malformed:
                logger.warning("Dropped what %s says, and whatever like it follows: %s", agent, cause)
            self._malformed += 1
            return
        try:
            if isinstance(message, (Ready, Written, Stopped)):
                self._receiving.handle(agent, message)
            else:
                self._serving.handle(agent, message)
        except Exception as defect:
            words = f"{type(defect).__name__}: {defect}"
            if isinstance(message, (Ready, Written, Stopped)):
                self._receiving.fail(message.attempt, HandOverFailed(Cause.DEFECT, words))
            elif isinstance(message, (Registration, Room)):
                self._serving.fail((agent, message.attempt), words)
            raise

    def _renew(self) -> float | None:
        """Send the beats that are due; returns when the next ones are."""
        place = self._side.place
        for prefill, names in self._renewals.take_due().items():
            # Who cannot be a contributor is refused in words when the request is allocated.
            try:
                ranks = contributors(prefill, tp_rank=place.tp_rank, tp_size=place.tp_size, is_latent=place.is_latent)
            except ValueError:
                continue
            for address in peers_of(prefill, (*ranks[0], *ranks[1])):
                for beat in beats(names):
                    self._side.peers.send(address, beat)
        return self._renewals.first_seconds

    def _contain(self, command: Command | None, action: Callable[..., None], *arguments: Any) -> None:
        """An exception fails what the command names; a message that raises one has no effect."""
        try:
            action(*arguments)
        except Exception as defect:
            self._defects += 1
            logger.exception("A hand-over fails by a defect of kvcached_nixl")
            cause = HandOverFailed(Cause.DEFECT, f"{type(defect).__name__}: {defect}")
            if isinstance(command, (Want, Withdraw)):
                attempt = command.wanted.attempt if isinstance(command, Want) else command.attempt
                self._receiving.fail(attempt, cause)
            elif isinstance(command, Begin):
                for attempt in command.attempts:
                    self._receiving.fail(attempt, cause)
            elif isinstance(command, (Offer, Finish, Stop, Revoke, Preempt, Identify)):
                # Whoever owns blocks must hear of their end: nothing may be left half done here.
                raise
