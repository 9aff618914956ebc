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
    drops         messages that match nothing, counted in `WorkerContext.dropped`; nothing else

An exception that is not contained (`commands`) stops the thread and is raised on the engine's thread at its next call:
hand-overs never continue with half of the state updated.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from kvcached_nixl.deadlines import Clock
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.wire.step import Report
from kvcached_nixl.worker.commands import Command, Dispatch
from kvcached_nixl.worker.decode.receiver import Receiver
from kvcached_nixl.worker.prefill.registry import OfferRegistry
from kvcached_nixl.worker.transfer.context import WorkerContext

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
        select_device: called by the transfer thread before anything else.

    Attributes:
        engine_computes: set by the engine's thread while it submits a step to the device.
    """

    def __init__(
        self, context: WorkerContext, receiver: Receiver, registry: OfferRegistry, select_device: Callable[[], None]
    ) -> None:
        self._context = context
        self._clock: Clock = context.clock
        self._receiver = receiver
        self._registry = registry
        self._outcomes = context.outcomes
        self._channel = context.channel
        self._select_device = select_device
        self._is_ready = threading.Event()
        self.engine_computes = False
        self._inbox: deque[Command] = deque()
        self._wake = context.wake
        self._closing = threading.Event()
        self._defect: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._moved_at_seconds = context.clock.now_seconds()
        # Everything below is used by the transfer thread only.
        self._dispatch = Dispatch(context, receiver, registry)
        # When the thread last had work.
        self._busy_seconds = 0.0

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

    def take_outcome(self) -> tuple[set[str], Report]:
        """As `OutcomeQueue.take`.

        Raises:
            RuntimeError: an internal error has stopped the transfer thread.
        """
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
        self._context.checksums.close()
        self._receiver.close()
        self._channel.close()

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
            self._dispatch.take(self._inbox.popleft())
        self._dispatch.take_reached()
        is_busy |= self._dispatch.hear()
        self._context.peers.turn()
        if self._context.staging is not None:
            self._context.staging.turn()
        self._context.checksums.turn()
        self._context.transfer_queue.turn()
        is_engine_alive = self._clock.now_seconds() < self._moved_at_seconds + STANDING_SECONDS
        deadlines = [self._registry.turn(is_engine_alive=is_engine_alive), self._receiver.turn()]
        if is_engine_alive:
            deadlines.append(self._receiver.send_heartbeats())
        if self._context.staging is not None:
            self._outcomes.slab(self._context.staging.use, self._context.staging.num_waits)
        if self._outcomes.take_news():
            self._wake_own()
        now = self._clock.now_seconds()
        is_moving = bool(self._context.transfer_queue.is_busy or self._dispatch.computing)
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
        address = self._dispatch.wake_address
        if address is not None:
            self._channel.wake(address.host, address.port, address.key)
