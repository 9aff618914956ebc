# SPDX-License-Identifier: Apache-2.0
"""The writer thread: everything of push that touches the NIXL agent happens on it. One per worker.

    owns          the transport (registrations, notifications, WRITEs), both halves of the push, the connections
    inboxes       `Push.submit`: what the engine's thread wants, in order; futures of the handshakes under way
    wakes on      both inboxes; the next deadline; and, because NIXL has no event for what arrives or ends, every
                  POLL_SECONDS while something is awaited, every BUSY_POLL_SECONDS while the engine's thread computes
                  meanwhile, every IDLE_POLL_SECONDS while nothing is awaited, for peers that speak first
    may block on  that wait, and nothing else: handshakes run in a pool of their own, so one peer never holds up
                  another, and a step's end on the device is asked for, not waited for
    stops when    `Push.close` is called; what is in flight then is waited for up to CLOSE_SECONDS
    drops         messages that fit nothing, counted in `Push.dropped`; nothing else

An exception on this thread is a defect. It is kept, and the engine's thread raises it at its next call: a push never
goes on half alive.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable

from kvcached_nixl.clock import Clock
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.base import Transport
from kvcached_nixl.wire.lease import is_beat, read_beat
from kvcached_nixl.wire.push import Declined, Malformed, Peer, Registration, Withdrawal, decode
from kvcached_nixl.worker.push_commands import (
    Command,
    Connected,
    Decline,
    Finish,
    Offer,
    Outcome,
    Refuse,
    Register,
    Renew,
    Restart,
    Withdraw,
)
from kvcached_nixl.worker.push_connections import Connections, Made
from kvcached_nixl.worker.push_receive import PushReceiver
from kvcached_nixl.worker.push_send import PushSender

__all__ = ["Push"]

logger = logging.getLogger(SERVER_LOGGER)

POLL_SECONDS = 0.001
BUSY_POLL_SECONDS = 0.01
"""Each look takes the interpreter's lock from the engine's thread: looking every millisecond, a prefill computed up to
45 % slower."""
IDLE_POLL_SECONDS = 0.1
CLOSE_SECONDS = 5.0
PROBE_SECONDS = 5.0
"""Between two questions to a peer of which something is expected whether it lives."""


class Push:
    """Push of one worker: commands in and outcomes out, on the engine's thread; the rest is the writer thread's.

    Args:
        transport: used by the writer thread only, once it has started.
        connect: asks a rank of the other side, as `Connections` says.

    Attributes:
        engine_computes: set by the engine's thread while it gives a step to the device.
        dropped: what was received and had no effect, counted by reason.
    """

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        sender: PushSender,
        receiver: PushReceiver,
        connect: Callable[[Peer], Connected],
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._sender = sender
        self._receiver = receiver
        self.engine_computes = False
        self._inbox: deque[Command] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._outcome = Outcome()
        self._ended = threading.Event()
        self._defect: BaseException | None = None
        self._thread: threading.Thread | None = None
        # Below: the writer thread's own.
        self._connections = Connections(transport, connect, self._wake.set)
        self._probe_at_seconds: float | None = None
        self._unconnected: list[Register | Decline | Renew] = []
        self._computing: deque[Offer | Finish] = deque()
        self._malformed = 0

    @property
    def dropped(self) -> Counter[str]:
        return self._sender.dropped + self._receiver.dropped + Counter(malformed=self._malformed)

    # ---------------------------------------------------------------------------------------------- the engine's thread

    def start(self) -> None:
        """Start the writer thread."""
        self._thread = threading.Thread(target=self._run, name="kvcached-nixl-push", daemon=True)
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Hand a command over. Returns at once.

        Raises:
            RuntimeError: the writer thread has ended by a defect.
        """
        self._raise_defect()
        self._inbox.append(command)
        self._wake.set()

    def take_outcome(self, wait_seconds: float = 0.0) -> Outcome:
        """What ended since the last call; if nothing did, waits for something to end, for at most ``wait_seconds``.

        Raises:
            RuntimeError: the writer thread has ended by a defect.
        """
        if wait_seconds:
            self._ended.wait(wait_seconds)
        self._raise_defect()
        with self._lock:
            self._ended.clear()
            outcome, self._outcome = self._outcome, Outcome()
        return outcome

    def close(self) -> None:
        """Stop the thread, after what is in flight has ended or CLOSE_SECONDS have passed."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * CLOSE_SECONDS)
        self._connections.close()

    def _raise_defect(self) -> None:
        if self._defect is not None:
            raise RuntimeError(f"the push writer has stopped: {self._defect!r}") from self._defect

    # ------------------------------------------------------------------------------------------------ the writer thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._wake.wait(self.turn())
                self._wake.clear()
            until = self._clock.now_seconds() + CLOSE_SECONDS
            while self._sender.in_flight and self._clock.now_seconds() < until:
                self._wake.wait(min(POLL_SECONDS, self.turn()))
                self._wake.clear()
        except BaseException as defect:  # kept for the engine's thread, which raises it
            self._defect = defect
            self._ended.set()
            logger.exception("The push writer has stopped; the engine stops at its next step")

    def turn(self) -> float:
        """Do everything that can be done now, without waiting; returns for how many seconds nothing else is due."""
        while self._inbox:
            self._take(self._inbox.popleft())
        self._take_computed()
        for peer, notification in self._transport.received():
            self._take_notification(peer, notification)
        for agent, address in self._sender.unknown_peers().items():
            known = self._connections.agent_at(address)
            if known == agent:
                self._connections.make_anew(address)
                continue
            self._connections.ask(address)
            if known is not None:
                self._sender.peer_lost(agent, "another engine answers at its address")
        for address in self._connections.addresses_of(self._receiver.take_lost()):
            self._connections.make_anew(address)
        self._take_connected()
        self._go_on_unconnected()
        deadlines = [self._sender.tick(), self._receiver.tick()]
        self._probe()
        self._report()
        if self._sender.is_owing or self._computing or len(self._receiver) or self._connections.is_asking:
            return BUSY_POLL_SECONDS if self.engine_computes and not self._sender.is_delivering else POLL_SECONDS
        now = self._clock.now_seconds()
        return max(0.0, min([IDLE_POLL_SECONDS, *(deadline - now for deadline in deadlines if deadline is not None)]))

    def _take(self, command: Command) -> None:
        if isinstance(command, (Register, Decline, Renew)):
            for address in command.contributors:
                self._connections.ask(address)
            self._unconnected.append(command)
        elif isinstance(command, (Offer, Finish)):
            self._computing.append(command)
        elif isinstance(command, Withdraw):
            self._withdraw(command)
        elif isinstance(command, Refuse):
            self._sender.refuse(command.transfer, command.reason)
        else:
            # What the device has not finished of it is not needed any more.
            dropped = [one for one in self._computing if one.request_id == command.request_id]
            self._computing = deque(one for one in self._computing if one.request_id != command.request_id)
            if isinstance(command, Restart):
                self._sender.restart(command.request_id, command.hold)
            else:
                self._sender.stop(command.request_id, command.reason)
                for one in dropped:
                    if isinstance(one, Offer):
                        self._sender.refuse(one.transfer, command.reason)

    def _withdraw(self, command: Withdraw) -> None:
        for one in self._unconnected:
            if isinstance(one, Register) and one.registration.decode_request_id == command.request_id:
                self._unconnected.remove(one)
                self._fail(one, command.reason)
                return
        self._receiver.withdraw(command.request_id, command.reason)

    def _take_computed(self) -> None:
        """In order: a request's end is never seen before its steps."""
        while self._computing:
            head = self._computing[0]
            if isinstance(head, Finish):
                self._sender.finish(head.request_id)
            elif head.is_computed():
                self._sender.offer(head.transfer, head.request_id, head.block_ids, head.ready_tokens)
            else:
                return
            self._computing.popleft()

    def _take_notification(self, peer: str, notification: bytes) -> None:
        try:
            if is_beat(notification):
                self._sender.renew(read_beat(notification))
                return
            message = decode(notification)
        except Malformed:
            self._malformed += 1
            return
        half = self._sender if isinstance(message, (Registration, Withdrawal, Declined)) else self._receiver
        half.handle(peer, message)

    def _probe(self) -> None:
        """Ask contributors for another handshake from time to time: it shows whether they still live."""
        silent = self._receiver.silent_peers()
        now = self._clock.now_seconds()
        if self._probe_at_seconds is not None and silent and now >= self._probe_at_seconds:
            for address in self._connections.addresses_of(silent):
                self._connections.ask(address, again=True)
            self._probe_at_seconds = None
        if not silent:
            self._probe_at_seconds = None
        elif self._probe_at_seconds is None:
            self._probe_at_seconds = now + PROBE_SECONDS

    def _take_connected(self) -> None:
        for ended in self._connections.take_ended():
            if not isinstance(ended, Made):
                for waiting in [agent for agent, at in self._sender.unknown_peers().items() if at == ended.address]:
                    self._sender.peer_lost(waiting, f"no handshake: {ended.cause}")
                self._fail_unconnected(ended.address, ended.cause)
            if ended.gone is not None:
                self._sender.peer_lost(ended.gone, "the peer is gone")
                self._receiver.peer_gone(ended.gone)
            if isinstance(ended, Made):
                self._sender.peer_known(ended.agent, ended.planes)

    def _go_on_unconnected(self) -> None:
        for command in list(self._unconnected):
            agents = self._connections.agents_at(command.contributors)
            if agents is None:
                continue
            self._unconnected.remove(command)
            if isinstance(command, Decline):
                self._receiver.decline(command.transfer, agents)
            elif isinstance(command, Renew):
                self._receiver.renew(command.names, agents)
            else:
                ranks = [address.tp_rank for address in command.contributors]
                self._receiver.register(command.registration, list(zip(ranks, agents, strict=True)))

    def _fail_unconnected(self, address: Peer, cause: Exception) -> None:
        for command in [one for one in self._unconnected if address in one.contributors]:
            self._unconnected.remove(command)
            if isinstance(command, Register):
                self._fail(command, f"no handshake with prefill: {cause}")

    def _fail(self, command: Register, reason: str) -> None:
        """Nobody was told of it, so nobody writes: it is over."""
        with self._lock:
            self._outcome.failed[command.registration.decode_request_id] = reason
            self._ended.set()

    def _report(self) -> None:
        ended, done, quiet = self._receiver.take_ended(), self._sender.take_done(), self._sender.take_quiet()
        if not (ended or done or quiet):
            return
        with self._lock:
            for one in ended:
                if one.failed:
                    self._outcome.failed[one.request_id] = one.failed
                else:
                    self._outcome.received.add(one.request_id)
            self._outcome.done.update(done)
            self._outcome.quiet.update(quiet)
            self._outcome.expired.update(self._sender.take_expired())
            self._ended.set()
