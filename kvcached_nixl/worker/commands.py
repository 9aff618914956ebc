# SPDX-License-Identifier: Apache-2.0
"""What the transfer thread is told, by the engine's thread (commands) and by peers (messages), and what it does then.

Commands of a step are passed on unchanged (`wire.step.StepCommand`); those of this rank alone are defined here. One
table says how each command is taken in, another one how each message is.

An exception in the handling of one message or one command fails what that belongs to, and is counted. One that may have
left prefill's blocks without an owner stops the engine.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.settings import SERVER_LOGGER
from kvcached_nixl.transport.agent import Transport, TransportError, WriteGate
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.checked import Malformed
from kvcached_nixl.wire.handshake import Weights
from kvcached_nixl.wire.lease import is_heartbeat, read_heartbeat
from kvcached_nixl.wire.messages import (
    Message,
    Peer,
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
    StepCommand,
    Stop,
    UnneededOffer,
    WakeAddress,
    Withdraw,
)
from kvcached_nixl.worker.decode.receiver import Receiver
from kvcached_nixl.worker.prefill.registry import OfferRegistry
from kvcached_nixl.worker.transfer.context import WorkerContext
from kvcached_nixl.worker.transfer.peers import contained

__all__ = ["BlocksWritable", "Command", "Dispatch", "IsReached", "LocalIdentity", "NewWeights", "Reached"]

logger = logging.getLogger(SERVER_LOGGER)

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


class Dispatch:
    """Takes in what the engine and its peers say. Owned by the transfer thread.

    Attributes:
        wake_address: under which the engine is woken; None before its first step.
        computing: commands that wait for the device, in order.
    """

    def __init__(self, context: WorkerContext, receiver: Receiver, registry: OfferRegistry) -> None:
        self._context = context
        self._receiver = receiver
        self._registry = registry
        self.wake_address: WakeAddress | None = None
        self.computing: deque[Reached] = deque()

    def take(self, command: Command) -> None:
        self._take(command, _COMMANDS)

    def take_reached(self) -> None:
        """Handle, in order, what the device has finished: a request's `Finish` is never handled before its steps."""
        while self.computing and self.computing[0].is_reached():
            self._take(self.computing.popleft().command, _REACHED)

    def hear(self) -> bool:
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

    def _identify(self, command: LocalIdentity) -> None:
        self.wake_address, self._context.own = command.wake_address, command.own
        self._context.incarnation = command.incarnation
        self._registry.writer.started(command.incarnation)

    def _change_weights(self, command: NewWeights) -> None:
        self._context.weights, self._context.weight_names = command.weights, command.names

    def _revoke(self, command: Revoke) -> None:
        # Who has begun to read meanwhile may not be overtaken.
        self.hear()
        if self._registry.outlasts(command.request_id, command.revocation):
            self._context.outcomes.spared(command.revocation.number)
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
        self.computing = deque(
            one for one in self.computing if not isinstance(one.command, kinds) or one.command.request_id != request_id
        )

    def _read(self, agent: str, notification: bytes) -> None:
        try:
            message = read_heartbeat(notification) if is_heartbeat(notification) else decode(notification)
        except Malformed as error:
            if not self._context.dropped["malformed"]:
                logger.warning(
                    "Dropping a malformed notification from %s; later ones are only counted: %s", agent, error
                )
            self._context.dropped["malformed"] += 1
            return
        # Twice: nothing that a peer sends stops the engine, not even where its hand-over cannot be failed.
        with contained(self._count_defect), contained(lambda failure: self._fail_message(agent, message, failure)):
            _MESSAGES[type(message)](self, agent, message)

    def _fail_message(self, agent: str, message: Message | list[str], failure: HandOverFailed) -> None:
        self._count_defect(failure)
        if isinstance(message, (StagingRequest, Written, Stopped)):
            self._receiver.fail(message.attempt, failure)
        elif isinstance(message, (Registration, StagingGrant)):
            self._registry.writer.fail((agent, message.attempt), failure)

    def _take_heartbeat(self, agent: str, names: list[str]) -> None:
        self._registry.renew(names)
        self._receiver.renew(agent, names)

    def _take(self, command: Command | BlocksWritable, rules: Mapping[type, _Rule]) -> None:
        rule = rules[type(command)]
        if rule.fails is None:
            rule.apply(self, command)
            return
        attempts = rule.fails(command)

        def fail(failure: HandOverFailed) -> None:
            self._count_defect(failure)
            for attempt in attempts:
                self._receiver.fail(attempt, failure)

        with contained(fail):
            rule.apply(self, command)

    def _count_defect(self, _: HandOverFailed) -> None:
        self._context.dropped["defect"] += 1


class _Rule(NamedTuple):
    """What the transfer thread does with a command.

    Attributes:
        fails: the attempts that an exception fails. None: it stops the engine, because the scheduler must hear when
            prefill's blocks are free, and half of the state is updated.
    """

    apply: Callable[[Dispatch, Any], None]
    fails: Callable[[Any], Sequence[int]] | None = None


def _nobody(_: object) -> Sequence[int]:
    return ()


def _begin(taker: Dispatch, command: BlocksWritable) -> None:
    for attempt in command.attempts:
        taker._receiver.begin(attempt)


def _withdraw(taker: Dispatch, command: Withdraw) -> None:
    taker._receiver.fail(command.attempt, HandOverFailed(FailureCause.STOPPED, command.reason))


_COMMANDS: Mapping[type[Command], _Rule] = MappingProxyType(
    {
        LocalIdentity: _Rule(Dispatch._identify, _nobody),
        NewWeights: _Rule(Dispatch._change_weights),
        Revoke: _Rule(Dispatch._revoke),
        LeaseRenewal: _Rule(lambda taker, one: taker._receiver.renewals.begin(one), _nobody),
        EndRenewal: _Rule(lambda taker, one: taker._receiver.renewals.end(one.request_id), _nobody),
        FetchSpec: _Rule(lambda taker, one: taker._receiver.fetch(one), lambda one: (one.attempt,)),
        OfferUpdate: _Rule(lambda taker, one: taker._registry.offer(one)),
        AwaitClaim: _Rule(lambda taker, one: taker._registry.await_claim(one.request_id, one.number)),
        Withdraw: _Rule(_withdraw, lambda one: (one.attempt,)),
        UnneededOffer: _Rule(lambda taker, one: taker._receiver.release(one), _nobody),
        Preempt: _Rule(Dispatch._preempt),
        Finish: _Rule(lambda taker, one: taker.computing.append(Reached(one))),
        Stop: _Rule(Dispatch._stop),
        Reached: _Rule(lambda taker, one: taker.computing.append(one)),
    }
)

_REACHED: Mapping[type, _Rule] = MappingProxyType(
    {
        OfferUpdate: _COMMANDS[OfferUpdate],
        Finish: _Rule(lambda taker, one: taker._registry.finish(one.request_id)),
        BlocksWritable: _Rule(_begin, lambda one: one.attempts),
    }
)
"""Of a `Reached` that the device has reached."""

_MESSAGES: Mapping[type[Message | list[str]], Callable[[Dispatch, str, Any], None]] = MappingProxyType(
    {
        list: Dispatch._take_heartbeat,
        Registration: lambda taker, agent, one: taker._registry.writer.register(agent, one),
        StagingGrant: lambda taker, agent, one: taker._registry.writer.take_grant(agent, one),
        Withdrawal: lambda taker, agent, one: taker._registry.writer.withdraw(agent, one),
        Reading: lambda taker, _, one: taker._registry.read(one),
        Release: lambda taker, _, one: taker._registry.release(one),
        StagingRequest: lambda taker, agent, one: taker._receiver.handle(agent, one),
        Written: lambda taker, agent, one: taker._receiver.handle(agent, one),
        Stopped: lambda taker, agent, one: taker._receiver.handle(agent, one),
    }
)
