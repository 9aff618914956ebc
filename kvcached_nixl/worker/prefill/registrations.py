# SPDX-License-Identifier: Apache-2.0
"""Prefill: decode's registrations, from their arrival until they are finished. Once per worker, on the transfer thread.

A registration finds its offer by the request's id where decode knows that, else by name and digest; a name alone
matches nothing (rule R7). One that finds no offer waits for it, for a limited time. No time is limited while its
request waits for its turn, or is computed: decode is told so by heartbeats, which name attempts.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcached_nixl.deadlines import Clock, Deadlines, earliest
from kvcached_nixl.ids import PrefillRequestId
from kvcached_nixl.wire.causes import FailureCause, HandOverFailed
from kvcached_nixl.wire.lease import INTERVAL, heartbeats
from kvcached_nixl.wire.messages import Peer, Registration, StagingGrant, Withdrawal
from kvcached_nixl.worker.prefill.offers import Offer, OfferMatcher, WriteKey, WriteTask
from kvcached_nixl.worker.prefill.writer import Writer
from kvcached_nixl.worker.transfer.context import RecentSet, WorkerContext
from kvcached_nixl.worker.transfer.peer_link import PeerListener

__all__ = ["Registrations"]

PROBE_SECONDS = 5.0
"""How often a rank of decode is probed once its registration is overdue."""
RENEW_SECONDS = 5.0
"""How often decode is told of registrations whose request is not computed yet, at least."""

_STARTED_AGAIN = HandOverFailed(
    FailureCause.RESTARTED, "prefill was restarted, or its weights were changed, since decode's handshake with it"
)
_WITHDRAWN = HandOverFailed(FailureCause.STOPPED, "withdrawn")


class Registrations(PeerListener):
    """See the module.

    Attributes:
        tasks: those that are not finished.
        is_asked_at_once: whether the last one came without the request's id, and so without prefill's answer.
    """

    def __init__(self, context: WorkerContext, matcher: OfferMatcher, writer: Writer) -> None:
        self._context = context
        self._clock: Clock = context.clock
        self._matcher = matcher
        self._writer = writer
        self._unmatched_seconds = context.settings.handover_timeout_seconds
        self.tasks: dict[WriteKey, WriteTask] = {}
        self.is_asked_at_once = False
        self._finished = RecentSet[WriteKey]()
        self._stuck = Deadlines[WriteKey]()
        self._renew_seconds = min(RENEW_SECONDS, INTERVAL * self._unmatched_seconds)
        self._renewed = Deadlines[WriteKey]()

    # ----------------------------------------------------------------------------------------------- messages of decode

    def register(self, agent: str, registration: Registration) -> None:
        """Serve a registration; one that came already, or was withdrawn, is dropped."""
        key = agent, registration.attempt
        if key in self.tasks or key in self._finished:
            self._context.dropped["doubled or late registration"] += 1
            return
        task = self.tasks[key] = WriteTask(agent, registration, next_token=registration.begin_token)
        self.is_asked_at_once = not registration.request_id
        # Later than the matcher's deadline, so that a missing request is reported as that.
        self._stuck[key] = self._clock.now_seconds() + self._unmatched_seconds + PROBE_SECONDS
        self._renewed[key] = self._clock.now_seconds() + self._renew_seconds
        if self._context.incarnation not in ("", registration.incarnation):
            self._writer.stop(task, _STARTED_AGAIN)
        elif registration.request_id:
            offer = self._matcher.offers.get(PrefillRequestId(registration.request_id))
            if offer is None or offer.stopped:
                why = "" if offer is None else f": {offer.stopped}"
                reason = f"prefill does not keep this request any more{why}"
                self._writer.stop(task, HandOverFailed(FailureCause.LEASE, reason))
            elif not offer.means(registration):
                self._writer.stop(task, HandOverFailed(FailureCause.DIGEST, "prefill computed another prompt"))
            else:
                self._matcher.join(task, offer)
        elif not self._context.settings.transfer_mode.is_push:
            # In pull only an ended request may be written: before that vLLM may give its blocks to another one.
            reason = "found a pull without a request id; expected that of a request that has ended"
            self._writer.stop(task, HandOverFailed(FailureCause.PROTOCOL, reason))
        else:
            offer = self._matcher.wanted_by(registration)
            if offer is not None:
                self._matcher.join(task, offer)
            else:
                self._matcher.wait(task)
        if task.offer is not None:
            task.offer.report_claim(self._context.outcomes)
            self._writer.follow(task.offer)
        self._writer.connect(task)

    def take_grant(self, agent: str, message: StagingGrant) -> None:
        """Decode grants slots for a registration."""
        task = self.tasks.get((agent, message.attempt))
        if task is not None:
            self._writer.take_grant(task, message)

    def withdraw(self, agent: str, message: Withdrawal) -> None:
        """Decode needs a registration no more. It is answered in any case."""
        key = agent, message.attempt
        task = self.tasks.get(key)
        if task is not None:
            self._writer.stop(task, _WITHDRAWN)
            return
        # It is finished, or its registration is still on its way: remember it, so that it is dropped when it arrives.
        self._finished.add(key)
        self._writer.answer(agent, message.decode, message.attempt, _WITHDRAWN)

    # ---------------------------------------------------------------------------------------------------- how they end

    def is_used(self, agent: str) -> bool:
        """Whether an agent has a registration that is not finished."""
        return any(task.agent == agent for task in self.tasks.values())

    def dead(self, agent: str) -> None:
        """Stop an agent's registrations without an answer."""
        for task in [one for one in self.tasks.values() if one.agent == agent]:
            cause = HandOverFailed(FailureCause.LOST, "the peer is dead or unreachable")
            self._writer.stop(task, cause, is_answered=False)

    unreachable = dead

    def fail(self, key: WriteKey, failure: HandOverFailed) -> None:
        """An internal error occurred while this registration was served: stop it."""
        task = self.tasks.get(key)
        if task is not None:
            self._writer.stop(task, failure)

    def started(self, incarnation: str) -> None:
        """Stop registrations that were made for another incarnation of this engine."""
        for task in list(self.tasks.values()):
            if task.registration.incarnation != incarnation:
                self._writer.stop(task, _STARTED_AGAIN)

    def stop_those_of(self, offer: Offer, cause: HandOverFailed) -> None:
        """Nothing more of this offer is written."""
        for task in list(offer.write_tasks.values()):
            # Otherwise a decode that has vanished silently would be probed only at its deadline.
            self._stuck[task.key] = self._clock.now_seconds() + PROBE_SECONDS
            self._writer.stop(task, cause)

    def _renew(self, keys: Iterable[WriteKey], now_seconds: float) -> None:
        names: dict[tuple[Peer, str], list[str]] = {}
        for task in map(self.tasks.__getitem__, keys):
            if task.offer is not None and not (task.offer.finished or task.is_complete or task.stopping):
                self._stuck[task.key] = now_seconds + self._unmatched_seconds + PROBE_SECONDS
                registration = task.registration
                names.setdefault((registration.decode, task.agent), []).append(str(registration.attempt))
        for (address, agent), of_agent in names.items():
            for beat in heartbeats(of_agent):
                self._context.peers.send(address, beat, only=agent)

    def close(self, reason: str) -> None:
        """The engine ends: tell the ranks of decode that wait."""
        for task in list(self.tasks.values()):
            self._writer.stop(task, HandOverFailed(FailureCause.REVOKED, reason))

    def forget(self, task: WriteTask) -> None:
        """It is finished: nothing of it is in flight, and it has been answered if it was stopped."""
        del self.tasks[task.key]
        self._finished.add(task.key)
        self._stuck.pop(task.key, None)
        self._renewed.pop(task.key, None)
        self._matcher.forget(task)

    @property
    def first_seconds(self) -> float | None:
        """When something is due next, in the clock's seconds; None if nothing is."""
        return earliest(*(one.first_seconds for one in (self._matcher, self._stuck, self._renewed)))

    def turn(self, now_seconds: float, *, is_engine_alive: bool) -> None:
        """Renew those whose request is not computed yet; stop those that are due: without an offer, or not written in
        time."""
        if due := self._renewed.take_due(now_seconds):
            self._renewed.move(dict.fromkeys(due, now_seconds + self._renew_seconds))
            if is_engine_alive:
                self._renew(due, now_seconds)
        for key in self._matcher.take_due(now_seconds):
            task = self.tasks.get(key)
            if task is not None:
                reason = "prefill has no request of this name and prompt"
                self._writer.stop(task, HandOverFailed(FailureCause.DEADLINE, reason))
        for key in self._stuck.take_due(now_seconds):
            task = self.tasks.get(key)
            if task is not None:
                # Decode has given up by now. If it does not answer the probe, its connection is taken down, which ends
                # what is in flight to it.
                self._stuck[key] = now_seconds + PROBE_SECONDS
                self._writer.stop(task, HandOverFailed(FailureCause.DEADLINE, "prefill did not write it in time"))
                self._context.peers.probe(task.registration.decode)
